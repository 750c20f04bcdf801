"""Whatever happens to single messages, no token is lost and none is doubled.

The streams below lose requests, lose replies after the server has acted on them, send twice, and send old requests
again later: everything that a network between two programs can do.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.decoding.plan import Plan
from skydraft.edge.channel import Channel, SessionStream, Waiting
from skydraft.errors import CloudLost, CloudTimeout, SkydraftError
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import OpenCall, Opening
from skydraft.types import Prompt, Round

from .. import reference, toys
from ..serving import RawSession, Serving, serving
from ..toys import PROMPT, PROMPT_IDS, VOCAB, law
from .test_remote import RACE

SEED, FINGERPRINT = 4, codec.short_fingerprint(VOCAB.fingerprint)
FATES = ["pass", "pass", "pass", "lose request", "lose reply", "late reply", "twice", "old again", "forget", "restart"]
FATES += ["another"]


class Network:
    """What becomes of the messages of a cloud: each request, and each reply that follows a verdict, meets a fate."""

    def __init__(self, address: str, fates: list[str]) -> None:
        self._channel = grpc.insecure_channel(address)
        self._fates = iter(fates)
        self._sent: list[bytes] = []
        self._sessions: set[int] = set()
        self.num_asked = 0

    def next_fate(self, request: pb.SessionRequest | None = None) -> str:
        """What becomes of a request, or of a reply; what others do meanwhile is done."""
        fate = next(self._fates, "pass")
        if request is not None:
            self.num_asked += 1
            self._sessions.add(request.session)
            if fate == "old again" and self._sent:
                self._quietly(self._sent[0])
            if request.action == pb.ACTION_VERIFY:
                self._sent.append(request.SerializeToString())
                if fate == "twice":
                    self._quietly(self._sent[-1])
            if fate == "another" and request.action == pb.ACTION_VERIFY:  # a session of its number, with other tokens
                self._quietly(codec.encode_close(request.session))
                committed = (1,) * (request.base - len(request.catch_up_ids))
                begun = Opening(FINGERPRINT, Prompt(PROMPT_IDS[::-1]), committed)
                self._quietly(codec.encode_open(OpenCall(request.session, request.epoch, begun)))
        if fate in ("forget", "restart"):  # nothing is left on the server of any session, verdicts included
            for session in self._sessions:
                self._quietly(codec.encode_close(session))
        return {"restart": "lose request", "forget": "pass", "another": "pass"}.get(fate, fate)

    def _quietly(self, request: bytes) -> None:
        stream = RawSession(self._channel)
        try:
            stream.send(request, None)
            stream.answer()
        except (SkydraftError, StopIteration):
            pass
        stream.end()

    def close(self) -> None:
        self._channel.close()


class UnreliableStream:
    def __init__(self, stream: SessionStream, network: Network) -> None:
        self._stream = stream
        self._network = network
        self._session = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def receive(self, waiting: Waiting, request: bytes | None = None) -> bytes:
        message = pb.SessionRequest.FromString(request) if request is not None else None
        if message is not None:
            self._session = message.session = message.session or self._session
        fate = self._network.next_fate(message) if message is not None else self._network.next_fate()
        if fate == "lose request":
            self._stream.cancel()
            raise CloudLost("lost on the way up")
        reply = await self._stream.receive(waiting, request)
        if fate in ("lose reply", "late reply"):
            self._stream.cancel()
            raise CloudLost("lost on the way down") if fate == "lose reply" else CloudTimeout("too late")
        return reply

    async def finish(self, last: bytes) -> None:
        self._stream.cancel()  # that it is over never arrives


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(toys.toy(SEED)) as running:
        yield running


def decode(
    server: Serving, plan: Plan, params: DecodingParams, edge: Any, fates: list[str]
) -> tuple[Generation, list[Round]]:
    sound = Channel.stream
    with (
        pytest.MonkeyPatch.context() as patch,
        closing(skydraft.connect(server.address, require=True)) as cloud,
        closing(Network(server.address, fates)) as network,
    ):
        patch.setattr(Channel, "stream", lambda self: UnreliableStream(sound(self), network))
        generation = skydraft.generate(PROMPT, edge=edge, cloud=cloud, plan=plan, params=params, raw=True)
        rounds = [done for done, _ in generation.rounds()]
        assert (network.num_asked > 0) == any(done.record.link.bytes_up for done in rounds)
        return generation, rounds


fates = st.lists(st.sampled_from(FATES), max_size=12)


lossless = st.builds(
    lambda k, hand_back: make_plan("lossless", k=k, hand_back=hand_back),
    st.integers(1, 8), st.sampled_from(["0", "2", "agree:1", "agree:2", "text"]),
)  # fmt: skip


@law(140)
@given(toys.params(), fates, st.sampled_from(toys.DRAFTERS), lossless | st.sampled_from([make_plan("cloud"), RACE]))
def test_lossless_is_the_target(server: Serving, params: DecodingParams, fates: Any, drafter: Any, plan: Plan) -> None:
    """Also what it writes alone or while drafts come, where the stream breaks as it writes on."""
    edge = toys.toy(SEED, drafter[0], sign=drafter[1])
    generation, _ = decode(server, plan, params, edge, fates)
    assert (generation.token_ids, generation.finish_reason) == reference.plain(toys.toy(SEED), PROMPT_IDS, params)


@law(60)
@given(toys.params(), st.floats(0, 3), st.integers(1, 8), st.sampled_from(["0", "1", "4", "text"]), fates)
def test_gated(server: Serving, params: DecodingParams, theta: float, k: int, hand_back: str, fates: list[str]) -> None:
    """A gated run that requires the cloud is the undisturbed one."""
    plan = make_plan(gate=f"entropy:{theta}", k=k, hand_back=hand_back)
    edge = toys.toy(SEED, 0.7)
    disturbed, rounds = decode(server, plan, params, edge, fates)
    calm, undisturbed = decode(server, plan, params, edge, [])
    assert disturbed.token_ids == calm.token_ids
    checked, others = (
        [(each.token_ids, each.audit, each.origins) for each in some if each.record.outcome != "written"]
        for some in (rounds, undisturbed)
    )
    assert hand_back != "0" or checked == others
