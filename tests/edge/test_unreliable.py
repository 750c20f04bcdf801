"""Whatever happens to single messages, no token is lost and none is doubled.

The link below loses requests, loses replies after the server has acted on them, sends twice, and sends old requests
again later: everything that a network between two programs can do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.cloud.server import ServeOptions
from skydraft.decoding.plan import Plan
from skydraft.decoding.verification import Verifier
from skydraft.edge.connection import Cloud
from skydraft.edge.link import Link, LinkOptions, SessionStream
from skydraft.errors import CloudLost, CloudTimeout, SkydraftError
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import Opening, SessionCall
from skydraft.types import DraftBlock, LinkCost, Prompt, Round, Verdict

from .. import reference, toys
from ..serving import PATIENCE_S, Relay, Serving, asked
from ..toys import PROMPT, PROMPT_IDS, VOCAB, law

SEED = 4
FATES = ["pass", "pass", "pass", "lose request", "lose reply", "late reply", "twice", "old again", "forget", "restart"]


class UnreliableStream:
    """Stands in for a session's stream: each request meets the next fate."""

    def __init__(self, stream: SessionStream, unreliable: UnreliableLink) -> None:
        self._stream = stream
        self._unreliable = unreliable
        self._session = 0

    @property
    def is_over(self) -> bool:
        return self._stream.is_over

    @property
    def is_draining(self) -> bool:
        return self._stream.is_draining

    @property
    def is_named(self) -> bool:
        return self._stream.is_named

    def send(self, request: bytes) -> None:
        message = pb.VerifyRequest.FromString(request)
        self._session = message.session = message.session or self._session
        self._fate = self._unreliable.next_fate(message.SerializeToString())
        if self._fate != "lose request":
            self._stream.send(request)

    def receive(self, *waits: float) -> bytes | None:
        if self._fate == "lose request":
            self._stream.cancel()
            raise CloudLost("lost on the way up")
        reply = self._stream.receive(*waits)
        if self._fate in ("lose reply", "late reply"):
            self._stream.cancel()
            raise CloudLost("lost on the way down") if self._fate == "lose reply" else CloudTimeout("too late")
        return reply

    def cancel(self) -> None:
        self._stream.cancel()

    def close(self) -> bool:
        self._stream.cancel()  # that it is over never arrives
        return True


class UnreliableLink:
    """Stands in for Link.call and Link.session: each request meets the next fate. Pings pass."""

    def __init__(self, link: Link, fates: list[str]) -> None:
        self._call = link.call
        self._new_stream = link.session
        self._fates = iter(fates)
        self._sent: list[tuple[str, bytes]] = []
        self._sessions: set[int] = set()
        self.num_streamed = 0

    def session(self) -> UnreliableStream:
        return UnreliableStream(self._new_stream(), self)

    def next_fate(self, request: bytes) -> str:
        """What becomes of a request in a stream; what others do meanwhile is done."""
        self.num_streamed += 1
        message = pb.VerifyRequest.FromString(request)
        self._sessions.add(message.session)
        fate = next(self._fates, "pass")
        if fate == "old again" and self._sent:
            self._quietly(*self._sent[0])
        if fate in ("forget", "restart"):
            self._forget()
        if message.action == pb.ACTION_VERIFY:
            self._sent.append(("Verify", request))
            if fate == "twice":
                self._quietly("Verify", request)
        return "lose request" if fate == "restart" else fate

    def __call__(self, method: str, request: bytes, timeout_s: float, ping_s: float = 5.0) -> bytes:
        if method not in ("Verify", "Open"):
            return self._call(method, request, timeout_s)
        decode = codec.decode_verify_call if method == "Verify" else codec.decode_session_call
        self._sessions.add(decode(request).session)
        fate = next(self._fates, "pass")
        if fate == "lose request":
            raise CloudLost("lost on the way up")
        if fate == "old again" and self._sent:
            self._quietly(*self._sent[0])
        if fate == "forget":
            self._forget()
        if fate == "restart":
            self._forget()
            raise CloudLost("connection reset")
        self._sent.append((method, request))
        reply = self._call(method, request, timeout_s)
        if fate == "lose reply":
            raise CloudLost("lost on the way down")
        if fate == "late reply":
            raise CloudTimeout("too late")
        return self._call(method, request, timeout_s) if fate == "twice" else reply

    def _forget(self) -> None:
        """Nothing is left on the server of any session that was asked for, verdicts included."""
        for session in self._sessions:
            self._call("Close", codec.encode_close(session), PATIENCE_S)

    def _quietly(self, method: str, request: bytes) -> None:
        try:
            self._call(method, request, PATIENCE_S)
        except SkydraftError:
            return


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    running = Serving(toys.toy(SEED), ServeOptions(port=0))
    yield running
    running.stop()


def decode(
    server: Serving, plan: Plan, params: DecodingParams, edge: Any, fates: list[str], unary: bool = False
) -> tuple[Generation, list[Round]]:
    cloud = skydraft.connect(server.address, require=True, unary=unary)
    unreliable = UnreliableLink(cloud.link, fates)
    cloud.link.session = unreliable.session  # type: ignore[assignment, method-assign]
    cloud.link.call = unreliable  # type: ignore[method-assign]
    cloud.link.call_watched = unreliable  # type: ignore[method-assign]
    cloud.link.start = lambda *_: None  # type: ignore[method-assign]  # Close never arrives
    try:
        generation = skydraft.generate(PROMPT, edge=edge, cloud=cloud, plan=plan, params=params, raw=True)
        rounds = [done for done, _ in generation.rounds()]
        assert (unreliable.num_streamed > 0) == (not unary and any(done.record.link.bytes_up for done in rounds))
        return generation, rounds
    finally:
        cloud.close()


fates = st.lists(st.sampled_from(FATES), max_size=12)


@law(62)
@given(st.sampled_from(toys.DRAFTERS), toys.params(), st.integers(1, 8), fates, st.booleans())
def test_lossless_over_an_unreliable_link_is_the_target(
    server: Serving, drafter: tuple[float, int], params: DecodingParams, k: int, fates: list[str], unary: bool
) -> None:
    edge = toys.toy(SEED, drafter[0], sign=drafter[1])
    generation, _ = decode(server, make_plan("lossless", k=k), params, edge, fates, unary)
    assert (generation.token_ids, generation.finish_reason) == reference.plain(toys.toy(SEED), PROMPT_IDS, params)


@law(40)
@given(toys.params(), st.floats(0, 3), st.integers(1, 8), fates, st.booleans())
def test_a_gated_run_that_requires_the_cloud_is_the_undisturbed_one(
    server: Serving, params: DecodingParams, theta: float, k: int, fates: list[str], unary: bool
) -> None:
    plan = make_plan(gate=f"entropy:{theta}", k=k)
    edge = toys.toy(SEED, 0.7)
    disturbed, rounds = decode(server, plan, params, edge, fates, unary)
    calm, undisturbed = decode(server, plan, params, edge, [])
    assert disturbed.token_ids == calm.token_ids
    assert disturbed.origins == calm.origins
    for done, other in zip(rounds, undisturbed, strict=True):
        assert (done.token_ids, done.audit, done.audit_ranks) == (other.token_ids, other.audit, other.audit_ranks)


class Losing:
    """A verifier whose verdicts are lost as told; half of the time the server has judged what the edge gives up."""

    def __init__(self, verifier: Verifier, outages: list[str]) -> None:
        self._verifier = verifier
        self._outages = iter(outages)

    def verify(self, block: DraftBlock, catch_up: Any) -> Verdict:
        is_lost = next(self._outages, "pass") == "gone"
        if not is_lost or len(block.token_ids) % 2:
            verdict = self._verifier.verify(block, catch_up)
        if is_lost:
            raise CloudLost("gone")
        return verdict

    def spent(self) -> LinkCost:
        return self._verifier.spent()

    def close(self) -> None:
        self._verifier.close()


class LosingCloud:
    """A cloud that is patient itself, so that it is lost where it is told to be and nowhere else."""

    engine = None
    works_ahead = False

    def __init__(self, cloud: Cloud, outages: list[str]) -> None:
        self._cloud = cloud
        self._outages = outages

    def verifier(self, *given: Any, **options: Any) -> Losing:
        return Losing(self._cloud.verifier(*given), self._outages)

    def falls_back(self, plan: Plan) -> bool:
        return plan.is_gated

    def max_block(self, *, quick: bool) -> int:
        return self._cloud.max_block(quick=quick)


@law(30)
@given(toys.params(), st.floats(0, 3), st.integers(1, 6), st.lists(st.sampled_from(["pass", "gone"]), max_size=8))
def test_tokens_of_a_run_that_falls_back_come_from_the_model_they_are_said_to_come_from(
    server: Serving, params: DecodingParams, theta: float, k: int, outages: list[str]
) -> None:
    edge, target = toys.toy(SEED, 0.7), toys.toy(SEED)
    cloud = skydraft.connect(server.address, require=True)
    losing: Any = LosingCloud(cloud, outages)
    plan = make_plan(gate=f"entropy:{theta}", k=k)
    generation = skydraft.generate(PROMPT, edge=edge, cloud=losing, plan=plan, params=params, raw=True).run()
    token_ids = [*PROMPT_IDS, *generation.token_ids]
    for index, origin in enumerate(generation.origins):
        model = edge if origin in ("skipped", "edge-fallback") else target
        prefix = token_ids[: len(PROMPT_IDS) + index]
        assert token_ids[len(prefix)] == reference.next_token(model, prefix, len(PROMPT_IDS), params)
    num_fallback = sum(record.outcome == "fallback" for record in generation.records)
    assert num_fallback == outages[: generation.stats.num_escalated + num_fallback].count("gone")
    assert generation.stats.num_fallback_tokens == generation.origins.count("edge-fallback")
    cloud.close()


COMMITTED = {
    "other tokens": lambda ids: (*ids[:-2], (ids[-2] + 1) % VOCAB.size, ids[-1]),
    "fewer tokens": lambda ids: ids[:-1],
    "more tokens": lambda ids: (*ids, 1),
    "another prompt": lambda ids: ids,
    "a longer prompt": lambda ids: ids,
}


@pytest.mark.parametrize("held", COMMITTED)
def test_a_divergence_is_noticed_in_its_round_and_mended(server: Serving, held: str) -> None:
    """Somebody puts a session in the place of the edge's: of the same number and epoch, with something else in it."""
    params = DecodingParams(max_new_tokens=24, min_new_tokens=24)
    lines: list[str] = []
    stranger = Link(LinkOptions(server.address))
    with Relay(server.address) as relay:
        cloud = skydraft.connect(relay.address, notify=lines.append)
        generation = skydraft.generate(PROMPT, edge=toys.toy(SEED, 0.7), cloud=cloud, params=params, raw=True)
        rounds = generation.rounds()
        for _ in range(3):
            next(rounds)
        first: Any = asked(*relay.requests[0])  # a stream names its session once
        last: Any = asked(*[sent for sent in relay.requests if sent[0] == "Verify"][-1])
        own = tuple(PROMPT_IDS)
        prompt = {"another prompt": (own[1], own[0]), "a longer prompt": (*own, 1)}.get(held, own)
        fingerprint = codec.short_fingerprint(VOCAB.fingerprint)
        opening = Opening(fingerprint, Prompt(prompt), COMMITTED[held](generation.token_ids), params)
        stranger.call("Close", codec.encode_close(first.session), PATIENCE_S)
        call = codec.encode_session_call(SessionCall(first.session, last.epoch, opening))
        assert codec.decode_opened(stranger.call("Open", call, PATIENCE_S)).base == len(opening.committed_ids)
        num_asked = len(relay.requests)
        next(rounds)
        assert len(relay.requests) > num_asked + 1  # it was asked again, with an opening
        assert asked(*relay.requests[-1]).opening is not None
        for _ in rounds:
            pass
        cloud.close()
    stranger.close()
    assert (generation.token_ids, generation.finish_reason) == reference.plain(toys.toy(SEED), PROMPT_IDS, params)
    is_noticed_by_digest = held not in ("fewer tokens", "more tokens")
    assert [("different tokens" in line) for line in lines] == [True] * is_noticed_by_digest
