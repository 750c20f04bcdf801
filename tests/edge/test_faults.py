"""What a text does when answers of its server meet faults: each fault at each place in a session, and any in any order.

No token is lost and none is doubled. Faults that last, and texts that go on alone, are in `tests/hostile`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import product, repeat
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from bench.emulated_link import EmulatedLink
from skydraft import DecodingParams, make_plan
from skydraft.decoding.plan import Plan
from skydraft.errors import (
    CloudBusy,
    CloudDraining,
    CloudError,
    CloudLost,
    NotAuthorized,
    SessionNotFound,
    SkydraftError,
    TargetChanged,
)
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.codec import short_fingerprint
from skydraft.protocol.status import to_status
from skydraft.protocol.values import OpenCall, Opening, VerifyCall
from skydraft.types import Prompt

from .. import reference, toys
from ..decoding.test_hand_back import turns_of
from ..hostile.texts import committed
from ..serving import Leash, RawSession, Relay, Serving, asked, serving
from ..toys import PROMPT, PROMPT_IDS, VOCAB, law
from .conftest import RACE

LENGTH = 40
PARAMS = DecodingParams(max_new_tokens=LENGTH, min_new_tokens=LENGTH, temperature=0.8, seed=5)
PLANS = {
    "lossless": make_plan("lossless", k=5, hand_back="agree:2"),
    "gated": make_plan(gate="entropy:1.0", k=5, hand_back="agree:2"),
}
PLACES = ("opening", "verdict", "first token", "second token", "after a stop", "last")
SAYS = {
    "lost": CloudLost, "made way": SessionNotFound, "full": CloudBusy, "draining": CloudDraining,
    "unauthorised": NotAuthorized,
}  # fmt: skip
Reply = pb.SessionReply
LIE = toys.TOOL  # a token that stands where none may come
LIES: dict[str, Callable[[Reply], list[Reply]]] = {  # what is said in place of a reply
    "twice": lambda reply: [reply, reply],
    "too early": lambda reply: [changed(reply, base=max(reply.base - 1, 0), token_id=LIE)],
    "too late": lambda reply: [changed(reply, base=reply.base + 1, token_id=LIE)],
    "no such token": lambda reply: [changed(reply, token_id=VOCAB.size)],
    "after its last": lambda reply: [changed(reply, last=True), changed(reply, base=reply.base + 99, token_id=LIE)],
}
ERRORS = {"unauthorised": NotAuthorized, "another model": TargetChanged}  # after all others the text is the same
FAULTS = (*SAYS, *LIES, "cut", "another server", "another model")


def changed(reply: Reply, **fields: int) -> Reply:
    other = Reply.FromString(reply.SerializeToString())
    for name, value in fields.items():
        setattr(other, name, value)
    return other


ENGINES = {"own": 4, "another server": 4, "another model": 5}  # seeds


class Wire:
    """A link to a relay before the first of these servers."""

    def __init__(self, stack: ExitStack, servers: dict[str, Serving]) -> None:
        self._servers, own = servers, servers["own"].address
        self._relay: Relay = stack.enter_context(Relay(own))
        self._relay.silence = self._passed_on
        self._to_relay = "127.0.0.1", int(self._relay.address.rpartition(":")[2])
        self._link = stack.enter_context(EmulatedLink(self._to_relay))
        self._beside = stack.enter_context(grpc.insecure_channel(own))

    def meet(self, fate_of: Callable[[Reply, list[tuple[str, bytes]]], str]) -> str:
        """Let each answer in a session meet its fate, after these requests; returns the address."""
        self._fate_of = fate_of
        self._relay.requests.clear()
        self._link.retarget(self._to_relay)
        return self._link.address

    def _passed_on(self, replies: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for message in replies:
            requests = [each for each in self._relay.requests if each[0] in ("open", "verify", "stop")]
            if not requests or self._relay.requests[-1][0] in ("Check", "GetInfo"):  # asked beside the session
                yield message
                continue
            fate = self._fate_of(Reply.FromString(message), requests)
            if kind := SAYS.get(fate):
                context.abort_with_status(to_status(kind("Not now, says the server.")))
            if fate in ("forgotten", "another", "asked again"):
                self._meanwhile(fate, [pb.SessionRequest.FromString(data) for _, data in requests])
            if fate in self._servers:
                self._link.retarget(("127.0.0.1", self._servers[fate].port))
            if fate in self._servers or fate == "cut":
                self._link.cut()
            lie = LIES.get(fate)
            yield from (each.SerializeToString() for each in lie(Reply.FromString(message))) if lie else [message]

    def _meanwhile(self, fate: str, requests: list[pb.SessionRequest]) -> None:
        """What others do: ask the first thing once more, or end the session, and take its number for other tokens."""
        number = next(each.session for each in reversed(requests) if each.session)
        begun = Opening(short_fingerprint(VOCAB.fingerprint), Prompt(PROMPT_IDS[::-1]), (1,) * requests[-1].base)
        opening = codec.encode_open(OpenCall(number, requests[-1].epoch, begun))
        close = codec.encode_close(number)
        does = {"forgotten": [close], "another": [close, opening], "asked again": [requests[0].SerializeToString()]}
        for message in does[fate]:
            stream = RawSession(self._beside)
            with suppress(SkydraftError, StopIteration):
                stream.send(message, None)
                stream.answer()
            stream.end()


# --- Each fault at each place


class Meeting:
    """The first answer at a place, after so many corrections, meets a fault."""

    def __init__(self, place: str, after: int, fault: str) -> None:
        self._place, self._after, self._fault, self.has_been = place, after, fault, False
        self._num_verdicts = self._num_written = 0

    def __call__(self, reply: Reply, requests: list[tuple[str, bytes]]) -> str:
        if self.has_been or self._place not in self._places(reply, requests):
            return ""
        self.has_been = True
        return self._fault

    def _places(self, reply: Reply, requests: list[tuple[str, bytes]]) -> list[str]:
        """Where this reply stands in its session."""
        if requests[-1][0] == "open":
            return ["opening"]
        verifies = [asked(data) for name, data in requests if name == "verify"]
        self._num_written += 1
        if len(verifies) > self._num_verdicts:
            call = verifies[-1]
            assert isinstance(call, VerifyCall)
            self._num_verdicts, self._num_written = len(verifies), 0
            self._after -= reply.num_accepted < len(call.draft_ids)
        if self._after >= 0:
            return []
        if requests[-1][0] == "stop":
            return ["after a stop", "last"] if reply.last else ["after a stop"]
        return [{0: "verdict", 1: "first token", 2: "second token"}.get(self._num_written, "")]


@pytest.fixture(scope="module")
def leash() -> Leash:
    """With it the targets write one token more than the text has, so that a stop comes before the end."""
    return Leash(0.03)


@pytest.fixture(scope="module")
def leashed(leash: Leash) -> Iterator[dict[str, Serving]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(serving(leash.put_on(toys.toy(seed)))) for name, seed in ENGINES.items()}


def begin(cloud: Any, plan: Plan, params: DecodingParams = PARAMS, edge: Any = None) -> skydraft.Generation:
    edge = edge or toys.toy(4, 0.2)
    return skydraft.generate(PROMPT, edge=edge, cloud=cloud, plan=plan, params=params, raw=True)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, tuple[int, ...]]:
    return {name: begin(toys.toy(4), plan).run().token_ids for name, plan in PLANS.items()}


# A gated text opens no session ahead, and may end before it asks again. A text without tokens begins again with another
# model.
CASES = [
    (place, fault, "gated" if at % 2 and place != "opening" and fault not in ERRORS else "lossless", at // 2 % 2 * 2)
    for at, (place, fault) in enumerate(product(PLACES, FAULTS)) if (place, fault) != ("opening", "another model")
]  # fmt: skip


@pytest.mark.parametrize(("place", "fault", "plan", "after"), CASES)
def test_a_fault_costs_no_token(
    leashed: Any, leash: Leash, undisturbed: Any, place: str, fault: str, plan: str, after: int
) -> None:
    for _ in range(3):  # on a busy machine a text may end before the fault's place comes
        meeting, error = Meeting(place, after, fault), None
        with ExitStack() as stack:
            address = Wire(stack, leashed).meet(meeting)
            generation = begin(stack.enter_context(closing(skydraft.connect(address, require=True))), PLANS[plan])
            try:
                for _ in generation.rounds():
                    leash.read()
            except SkydraftError as raised:
                error = raised
        if meeting.has_been:
            break
    written = committed(generation)
    assert meeting.has_been and isinstance(error, ERRORS.get(fault, type(None)))
    assert written == undisturbed[plan][: len(written)]
    assert fault in ERRORS or (len(written) == LENGTH and len([turn for turn in turns_of(generation) if turn]) > 1)


# --- Any of them, in any order


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with ExitStack() as stack:
        yield Wire(stack, {name: stack.enter_context(serving(toys.toy(seed))) for name, seed in ENGINES.items()})


FATES = ["", "", "", "lost", "made way", "full", "draining", "twice", "cut", "forgotten", "asked again", "another"]
fates = st.lists(st.sampled_from(FATES), max_size=8)
lossless = st.builds(
    lambda k, hand_back: make_plan("lossless", k=k, hand_back=hand_back),
    st.integers(1, 8), st.sampled_from(["0", "2", "agree:1", "agree:2", "text"]),
)  # fmt: skip
drafters = st.builds(lambda of: toys.toy(4, of[0], sign=of[1]), st.sampled_from(toys.DRAFTERS))


def disturbed(wire: Wire, fates: list[str], plan: Plan, params: DecodingParams, edge: Any) -> skydraft.Generation:
    coming = iter(fates)
    with closing(skydraft.connect(wire.meet(lambda *_: next(coming, "")), require=True)) as cloud:
        return begin(cloud, plan, params, edge).run()


@law(90)
@given(toys.params(), fates, drafters, lossless | st.sampled_from([make_plan("cloud"), RACE]))
def test_lossless_is_the_target(wire: Wire, params: DecodingParams, fates: Any, edge: Any, plan: Plan) -> None:
    """Also what it writes alone or while drafts come, where the stream breaks as it writes on."""
    generation = disturbed(wire, fates, plan, params, edge)
    assert (generation.token_ids, generation.finish_reason) == reference.plain(toys.toy(4), PROMPT_IDS, params)


@law(40)
@given(toys.params(), st.floats(0, 3), st.integers(1, 8), st.sampled_from(["0", "1", "4", "text"]), fates)
def test_gated(wire: Wire, params: DecodingParams, theta: float, k: int, hand_back: str, fates: list[str]) -> None:
    """A gated text that requires the cloud is the undisturbed one."""
    plan, edge = make_plan(gate=f"entropy:{theta}", k=k, hand_back=hand_back), toys.toy(4, 0.7)
    far, near = disturbed(wire, fates, plan, params, edge), begin(toys.toy(4), plan, params, edge).run()
    assert far.token_ids == near.token_ids
    checked, others = (
        [(each.token_ids, each.audit, each.origins) for each in done.rounds_so_far if each.record.outcome != "written"]
        for done in (far, near)
    )
    assert hand_back != "0" or checked == others


def test_more_than_a_target_was_to_write_is_committed_by_nobody() -> None:
    edge, plan = toys.toy(4, 0.2), make_plan("lossless", k=5, hand_back="2")

    def goes_on(replies: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for reply in map(Reply.FromString, replies):
            said = [changed(reply, last=False), changed(reply, base=reply.base + 1, token_id=LIE)]
            yield from (each.SerializeToString() for each in (said if reply.last else [reply]))

    with (
        serving(toys.toy(4)) as server,
        Relay(server.address) as relay,
        closing(skydraft.connect(relay.address, timeout_s=1.0, require=True)) as cloud,
    ):
        relay.faults = repeat(goes_on)
        generation = skydraft.generate(PROMPT, edge=edge, cloud=cloud, plan=plan, params=PARAMS, raw=True)
        with suppress(CloudError):
            generation.run()
        written = committed(generation)
        assert len(written) > 3 and LIE not in written
        records = "".join("-w"[record.outcome == "written"] for record in generation.records)
        assert "w" in records and "www" not in records  # two at most
