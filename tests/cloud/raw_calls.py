"""Calls as any client may send them, and whether a server still serves."""

from __future__ import annotations

from typing import Any

import numpy as np

import skydraft
from skydraft import DecodingParams
from skydraft.edge.link import Link, LinkOptions
from skydraft.engines.toy import open_toy
from skydraft.protocol import codec
from skydraft.protocol.values import Opening, VerifyCall
from skydraft.types import Prompt

from ..serving import PATIENCE_S, Serving

TOY = open_toy("toy")
FINGERPRINT = codec.short_fingerprint(TOY.vocab.fingerprint)
PARAMS = DecodingParams(max_new_tokens=20, min_new_tokens=20)


def opening(*prompt_ids: int, **changes: Any) -> Opening:
    return Opening(changes.pop("fingerprint", FINGERPRINT), Prompt(prompt_ids or (1, 2, 3)), **changes)


def verify_call(session: int = 7, draft: tuple[int, ...] = (5, 6), **changes: Any) -> bytes:
    start = changes.pop("opening", opening())
    ids = (*start.prompt.token_ids, *start.committed_ids)
    given: dict[str, Any] = {"epoch": 0, "base": len(start.committed_ids), "catch_up_ids": (), "opening": start}
    given["digest"] = codec.digest(np.array(ids, np.int32))
    return codec.encode_verify_call(VerifyCall(session=session, draft_ids=draft, **(given | changes)))


def later(base: int, **changes: Any) -> bytes:
    """A verification without an opening."""
    given: dict[str, Any] = {"session": 7, "epoch": 0, "catch_up_ids": (), "draft_ids": (9,), "digest": 0}
    return codec.encode_verify_call(VerifyCall(base=base, **(given | changes)))


def link_to(server: Serving, **options: Any) -> Link:
    return Link(LinkOptions(server.address, **options))


def assert_serves(server: Serving, timeout_s: float = PATIENCE_S) -> None:
    """A whole generation, with the right tokens, each of them had with this patience."""
    cloud = skydraft.connect(server.address, timeout_s=timeout_s)
    got = skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, params=PARAMS).run()
    expected = skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=TOY, params=PARAMS).run()
    assert got.token_ids == expected.token_ids
    cloud.close()
