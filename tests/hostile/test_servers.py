"""The edge does not trust the server: what no verdict can say is a failure of the cloud, and is not committed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.edge.link import SessionStream
from skydraft.edge.token_stream import TokenStream
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudFailure
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import Emission
from skydraft.types import Verdict
from tests.serving import serving

PARAMS = DecodingParams(max_new_tokens=24)
LIES: dict[str, Callable[[Verdict], Verdict]] = {
    "an id beyond the vocabulary": lambda verdict: replace(verdict, token_id=10**6),
    "never an end": lambda verdict: replace(verdict, finish=None, token_id=verdict.token_id or 3),
    "another base": lambda verdict: replace(verdict, base=verdict.base + 1),
    "more accepted than drafted": lambda verdict: replace(verdict, num_accepted=verdict.num_accepted + 40),
}


def lying(cloud: Any, lie: Callable[[Verdict], Verdict], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A connection to a server that lies."""
    soundly_send, soundly_receive = SessionStream.send, SessionStream.receive
    sent: list[bytes] = []

    def send(self: SessionStream, request: bytes) -> None:
        sent.append(request)
        soundly_send(self, request)

    def receive(self: SessionStream, *waits: float) -> bytes | None:
        reply = soundly_receive(self, *waits)
        message = pb.VerifyRequest.FromString(sent[-1])
        if message.action or reply is None:
            return reply
        return codec.encode_verdict(lie(codec.decode_verdict(reply, len(message.catch_up_ids))))

    def altered(sound: Callable[..., bytes]) -> Callable[..., bytes]:
        def call(method: str, request: bytes, *args: Any) -> bytes:
            reply = sound(method, request, *args)
            if method != "Verify":
                return reply
            num_audited = len(codec.decode_verify_call(request).catch_up_ids)
            return codec.encode_verdict(lie(codec.decode_verdict(reply, num_audited)))

        return call

    cloud.link.call, cloud.link.call_watched = altered(cloud.link.call), altered(cloud.link.call_watched)
    monkeypatch.setattr(SessionStream, "send", send)
    monkeypatch.setattr(SessionStream, "receive", receive)
    return cloud


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("mode", ["lossless", "gated"])
@pytest.mark.parametrize("unary", [False, True])
def test_a_lie_is_a_failure_of_the_cloud(lie: str, mode: str, unary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(k=4) if mode == "lossless" else make_plan(gate="entropy:0.3", k=4)
    with (
        serving(open_toy("toy")) as server,
        closing(skydraft.connect(server.address, timeout_s=2.0, unary=unary)) as honest,
    ):
        cloud = lying(honest, LIES[lie], monkeypatch)
        generation = skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, plan=plan, params=PARAMS)
        if mode == "lossless":
            with pytest.raises(CloudFailure):
                generation.run()
        else:
            assert "edge-fallback" in generation.run().origins  # it goes on alone
            assert generation.finish_reason is not None
        assert len(generation.token_ids) <= 24
        assert all(token_id < open_toy("toy").vocab.size for token_id in generation.token_ids)


@pytest.mark.parametrize(
    "lie",
    [
        lambda emission: replace(emission, token_ids=tuple(10**6 for _ in emission.token_ids)),
        lambda emission: replace(emission, finish=None),
        lambda emission: replace(emission, token_ids=(*emission.token_ids, *range(30))),
    ],
)
def test_so_is_a_lie_in_a_stream(lie: Callable[[Emission], Emission], monkeypatch: pytest.MonkeyPatch) -> None:
    sound = TokenStream.messages

    def messages(self: Any, *args: Any) -> Any:
        for message in sound(self, *args):
            yield codec.encode_emission(lie(codec.decode_emission(message)))

    monkeypatch.setattr(TokenStream, "messages", messages)
    with serving(open_toy("toy")) as server, closing(skydraft.connect(server.address, timeout_s=2.0)) as cloud:
        plan = make_plan("cloud")
        generation = skydraft.generate("语速", edge=open_toy("toy"), cloud=cloud, plan=plan, params=PARAMS)
        with pytest.raises(CloudFailure):
            generation.run()
        assert len(generation.token_ids) <= 24
