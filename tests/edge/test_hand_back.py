"""Hand-back over a link: what the target writes after a correction is what it writes in one process, whatever happens
meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from bench.emulated_link import EmulatedLink
from skydraft import DecodingParams, make_plan
from skydraft.access.limits import Limits
from skydraft.cloud.server import ServeOptions
from skydraft.cloud.worker import Worker
from skydraft.edge.channel import SessionStream, Waiting
from skydraft.errors import CloudLost, SessionNotFound
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import VerifyCall

from .. import reference, toys
from ..decoding.test_hand_back import turns_of
from ..decoding.test_laws import assert_whose
from ..serving import PATIENCE_S, Leash, Serving, asked, serving
from ..toys import PROMPT_IDS, law
from .test_remote import SEEDS, decode, gates

AGREE = st.sampled_from(["agree:1", "agree:2", "agree:4"])


@law(100)
@given(
    st.sampled_from(SEEDS), st.sampled_from(toys.DRAFTERS), toys.params(), gates, st.integers(1, 12), st.booleans(),
    AGREE,
)  # fmt: skip
def test_where_a_stop_crosses_every_token_is_still_the_choice_of_the_model_that_it_is_said_to_be(
    clouds: dict[int, Any], seed: int, drafter: tuple[float, int], params: DecodingParams, gate: str, k: int,
    ends_early: bool, hand_back: str,
) -> None:  # fmt: skip
    plan = replace(make_plan(gate=gate, k=k, hand_back=hand_back), ends_early=ends_early and gate != "always")
    edge, target = toys.toy(seed, drafter[0], sign=drafter[1]), toys.toy(seed)
    done = decode(plan, params, edge, clouds[seed])
    assert_whose(done, edge, target, params)
    if gate == "always":
        assert (done.token_ids, done.finish_reason) == reference.plain(target, PROMPT_IDS, params)
    assert all(record.num_draft for record in done.records if record.outcome == "verified")  # a turn is one call
    texts = [*PROMPT_IDS, *done.token_ids]
    for turn in turns_of(done):
        own = [
            reference.next_token(edge, texts[: len(PROMPT_IDS) + base], len(PROMPT_IDS), params) == texts[2 + base]
            for base in turn
        ]
        wanted = int(hand_back.removeprefix("agree:"))
        is_over = any(all(own[end - wanted : end]) for end in range(wanted, len(own) + 1))
        assert is_over or not turn or turn[-1] + 1 == len(done.token_ids)
    read = [agrees for each in done.rounds_so_far for agrees in each.block.read]
    assert len(read) <= sum(record.outcome == "written" for record in done.records) + len(turns_of(done))


# --- Faults

PARAMS = DecodingParams(max_new_tokens=70, min_new_tokens=70, temperature=0.8, seed=5)
LOSSLESS = make_plan("lossless", k=5, hand_back="agree:2")
Fault = Callable[[], None]


def drafter() -> Any:
    return toys.toy(4, 0.2)


def make_way(worker: Worker) -> None:
    """End all that is written, and forget all sessions, as an owner without a seat makes a server do."""
    is_done = Event()

    def work() -> None:
        for job in worker.docket.jobs:
            worker.docket.end(job, SessionNotFound("The session made way for a client that had none."))
        worker.docket.sessions.close_all()
        is_done.set()

    worker.post(work)
    assert is_done.wait(PATIENCE_S)


MOMENTS = [
    "before the verdict", "the verdict is lost", "right after it", "between tokens", "a token is lost", "at the stop",
    "after the stop", "the last is lost",
]  # fmt: skip


@contextmanager
def at(moment: str, number: int, fault: Fault, leash: Leash) -> Iterator[list[str]]:
    """Do something at the first such moment after `number` corrections; gives what became of it. What was read is said
    to the leash."""
    sound_receive, sound_send = SessionStream.receive, SessionStream.send
    done: list[str] = []
    state = {"corrections": 0, "written": 0, "stopped": False}

    def is_now(*moments: str) -> bool:
        if done or state["corrections"] < number or moment not in moments:
            return False
        done.append(moment)
        return True

    async def receive(self: SessionStream, waiting: Waiting, message: bytes | None = None) -> bytes:
        if message is not None:
            call = asked(message)
            may_write = isinstance(call, VerifyCall) and call.write > 0
            if may_write and is_now("before the verdict"):
                fault()
            reply = await sound_receive(self, waiting, message)
            leash.read()
            if may_write:
                verdict, *_ = codec.decode_verdict(reply, len(call.catch_up_ids))  # type: ignore[union-attr]
                state["corrections"] += verdict.num_accepted < len(call.draft_ids)  # type: ignore[union-attr]
                state["written"], state["stopped"] = 0, False
            lost = may_write and is_now("the verdict is lost")
        else:
            passed = {0: "right after it", 1: "between tokens"}.get(state["written"], "")  # type: ignore[call-overload]
            if is_now("after the stop" if state["stopped"] else passed):
                fault()
            reply = await sound_receive(self, waiting)
            said = pb.SessionReply.FromString(reply)
            leash.read(said.num_accepted + said.HasField("token_id"))
            state["written"] += 1
            is_last = state["stopped"] and pb.SessionReply.FromString(reply).last
            lost = is_now("a token is lost", *["the last is lost"] * is_last) and (is_last or "token" in moment)
        if lost:
            fault()
            self.cancel()
            raise CloudLost("lost on the way down")
        return reply

    def send(self: SessionStream, message: bytes) -> None:
        is_stop = isinstance(codec.decode_aside(message), int)
        if is_stop and is_now("at the stop"):
            fault()
        state["stopped"] = state["stopped"] or is_stop
        sound_send(self, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SessionStream, "receive", receive)
        patch.setattr(SessionStream, "send", send)
        yield done


@contextmanager
def faulty(fault: str) -> Iterator[tuple[EmulatedLink, Fault, Leash]]:
    """A link to a server, and what goes wrong. The target's text is not all written before it can be stopped."""
    leash = Leash()
    worker = Worker(leash.put_on(toys.toy(4)), Limits())
    first = Serving(worker, ServeOptions(port=0))
    with serving(leash.put_on(toys.toy(4))) as second:
        link = EmulatedLink(("127.0.0.1", first.port))

        def leads_to(port: int) -> None:
            link.retarget(("127.0.0.1", port))
            link.cut()

        def killed() -> None:
            leads_to(second.port)
            first.stop()

        def draining() -> None:
            link.retarget(("127.0.0.1", second.port))
            ending.start()

        ending = Thread(target=first.stop, args=(PATIENCE_S,))
        faults: dict[str, Fault] = {
            "nothing more": lambda: None, "cut": link.cut, "killed": killed, "draining": draining,
            "made way": partial(make_way, worker),
        }  # fmt: skip
        try:
            with link:
                yield link, faults[fault], leash
        finally:
            if ending.is_alive():
                ending.join(PATIENCE_S)
            first.stop()


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    return reference.plain(toys.toy(4), PROMPT_IDS, PARAMS)[0]


FAULTS = ("nothing more", "cut", "killed", "draining", "made way")
HITS = [(*each, 2 * (at % 2)) for at, each in enumerate(product(MOMENTS, FAULTS))]


@pytest.mark.parametrize(("moment", "fault", "number"), HITS)
def test_a_lossless_text_is_the_targets_anyway(expected: tuple[int, ...], moment: str, fault: str, number: int) -> None:
    """Whatever happens while it writes."""
    with (
        faulty(fault) as (link, happens, leash),
        closing(skydraft.connect(link.address)) as cloud,
        at(moment, number, happens, leash) as done,
    ):
        generation = decode(LOSSLESS, PARAMS, drafter(), cloud)
    assert generation.token_ids == expected and done == [moment]
    assert len([turn for turn in turns_of(generation) if turn]) > 1
