"""A Session as any client may have it, messages to send there, and whether a server still serves."""

from __future__ import annotations

import queue
from typing import Any

import grpc
import numpy as np

import skydraft
from skydraft import DecodingParams
from skydraft.engines.toy import open_toy
from skydraft.protocol import codec
from skydraft.protocol.status import from_rpc
from skydraft.protocol.values import SERVICE, Opening, VerifyCall
from skydraft.types import Prompt

from ..serving import PATIENCE_S

TOY = open_toy("toy")
FINGERPRINT = codec.short_fingerprint(TOY.vocab.fingerprint)
PARAMS = DecodingParams(max_new_tokens=20, min_new_tokens=20)
TOKENS = "phone a-token-of-24-characters\nrobot another-token-of-24-chars\n"


def opening(**changes: Any) -> Opening:
    given: dict[str, Any] = {"fingerprint": FINGERPRINT, "prompt": Prompt((1, 2, 3)), "params": PARAMS}
    return Opening(**given | changes)


def verify_call(session: int = 7, **changes: Any) -> bytes:
    start = changes.pop("opening", opening())
    ids = np.array((*start.prompt.token_ids, *start.committed_ids), np.int32)
    given: dict[str, Any] = {"epoch": 0, "base": len(start.committed_ids), "catch_up_ids": (), "draft_ids": (5, 6)}
    given |= {"digest": codec.digest(ids), "opening": start}
    return codec.encode_verify_call(VerifyCall(session=session, **given | changes))


def later(base: int, **changes: Any) -> bytes:
    given: dict[str, Any] = {"session": 0, "epoch": 0, "catch_up_ids": (), "draft_ids": (9,), "digest": 0}
    return codec.encode_verify_call(VerifyCall(base=base, **given | changes))


class Stream:
    """A Session as any client may have it: what was sent, and what came."""

    def __init__(self, channel: grpc.Channel, token: str = "") -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        metadata = (("authorization", f"Bearer {token}"),) if token else None
        method: Any = channel.stream_stream(f"/{SERVICE}/Session")
        self.call = method(iter(self._requests.get, None), metadata=metadata, timeout=2 * PATIENCE_S)

    def send(self, *messages: bytes | None) -> None:
        for message in messages:
            self._requests.put(message)

    def ask(self, message: bytes) -> bytes:
        self.send(message)
        return self.answer()

    def answer(self) -> bytes:
        try:
            reply: bytes = next(self.call)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        return reply

    def end(self) -> None:
        self.send(None)
        self.call.cancel()


def assert_serves(address: str, **options: Any) -> None:
    """A whole generation, with the right tokens."""
    cloud = skydraft.connect(address, **options)
    got = skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, params=PARAMS).run()
    expected = skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=TOY, params=PARAMS).run()
    assert got.token_ids == expected.token_ids
    cloud.close()
