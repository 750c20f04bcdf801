"""Messages as any client may send them, a model that stands still when told to, and whether a server still serves."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

import skydraft
from skydraft import DecodingParams
from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.protocol import codec
from skydraft.protocol.values import OpenCall, Opening, VerifyCall
from skydraft.types import Prompt, Verdict

from .. import reference
from ..serving import PATIENCE_S, RawSession

TOY = open_toy("toy")
FINGERPRINT = codec.short_fingerprint(TOY.vocab.fingerprint)
PARAMS = DecodingParams(max_new_tokens=20, min_new_tokens=20)
LONG = DecodingParams(max_new_tokens=4000, min_new_tokens=4000)
ANN, BOB = "a-token-of-24-characters", "another-token-of-24-chars"
TOKENS = f"ann {ANN}\nbob {BOB}\n"


def opening(*prompt_ids: int, **changes: Any) -> Opening:
    given: dict[str, Any] = {"fingerprint": FINGERPRINT, "params": PARAMS} | changes
    return Opening(prompt=Prompt(prompt_ids or (1, 2, 3)), **given)


def open_message(session: int = 7, begun: Opening | None = None) -> bytes:
    return codec.encode_open(OpenCall(session, 0, begun or opening()))


def verify_message(session: int = 7, *generated: int, draft: tuple[int, ...] = (5, 6), **changes: Any) -> bytes:
    """A block after these generated tokens. It opens its session unless `opening` is None."""
    start = changes.pop("opening", opening(committed_ids=generated))
    known = start or opening()
    given: dict[str, Any] = {"epoch": 0, "base": len(known.committed_ids or generated), "catch_up_ids": ()}
    ids = (*known.prompt.token_ids, *(known.committed_ids or generated))
    given |= {"draft_ids": draft, "opening": start, "digest": codec.digest(np.array(ids, np.int32))}
    return codec.encode_verify(VerifyCall(session=session, **given | changes))


def long_text(write: int = 4000) -> bytes:
    """A session in which the target writes for long."""
    return verify_message(draft=(), opening=opening(params=LONG), write=write)


def later(*generated: int, session: int = 0, **changes: Any) -> bytes:
    """A block without an opening."""
    return verify_message(session, *generated, **{"opening": None, "draft": (9,)} | changes)


def verdict_of(reply: bytes, num_audited: int = 0) -> Verdict:
    return codec.decode_verdict(reply, num_audited)[0]


def tokens_written(stream: RawSession) -> tuple[int, ...]:
    """What the target writes after a verdict, to the reply that is marked."""
    token_ids: list[int] = []
    while True:
        written = codec.decode_written(stream.answer())
        token_ids += written.token_ids
        if written.is_last:
            return tuple(token_ids)


def text(params: DecodingParams = PARAMS) -> tuple[int, ...]:
    """What the target alone writes after the prompt of `opening`."""
    return reference.plain(TOY, opening().prompt.token_ids, params)[0]


def holding() -> tuple[ToyEngine, threading.Event, threading.Event]:
    """(a toy, an event that lets it compute, one that says that it was asked to)."""
    engine, go, was_asked = open_toy("toy", 4096, 40), threading.Event(), threading.Event()
    sound = engine.forward

    def forward(feeds: Any, *, want_logits: bool) -> Any:
        was_asked.set()
        assert go.wait(PATIENCE_S)
        return sound(feeds, want_logits=want_logits)

    engine.forward = forward  # type: ignore[method-assign]
    return engine, go, was_asked


def slow_toy(seconds: float = 0.002) -> ToyEngine:
    engine = open_toy("toy")
    sound = engine.forward

    def forward(feeds: Any, *, want_logits: bool) -> Any:
        time.sleep(seconds)
        return sound(feeds, want_logits=want_logits)

    engine.forward = forward  # type: ignore[method-assign]
    return engine


def assert_serves(address: str, **options: Any) -> None:
    """A whole generation, with the right tokens."""
    cloud = skydraft.connect(address, **options)
    got = skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, params=PARAMS).run()
    expected = skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=TOY, params=PARAMS).run()
    assert got.token_ids == expected.token_ids
    cloud.close()
