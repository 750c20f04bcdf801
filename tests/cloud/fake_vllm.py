"""vLLM's engine as the judge sees it, over a toy: our pooler, requests in parts, a prefix cache, deaths."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from skydraft.cloud.seats import Served
from skydraft.cloud.vllm.asking import Asking
from skydraft.cloud.vllm.engine import Pooled
from skydraft.cloud.vllm.pooling import BlockPooler, Computed
from skydraft.engines.toy import ToyEngine
from skydraft.errors import EngineEnded

BLOCK = 4  # tokens whose KV is kept together


def rows_of(engine: ToyEngine, token_ids: Any) -> Any:
    """The logits after each of the tokens, [len, vocab]."""
    sequence = engine.open((int(token_ids[0]),))  # whose last token is still to be fed
    try:
        return np.array(sequence.extend([int(each) for each in token_ids]))
    finally:
        sequence.close()


class FakeVllm:
    """Its hidden states are logits. `dies_at` are the numbers of requests at which it ends; each takes `pause_s`."""

    cause = "it was told to"

    def __init__(self, toy: ToyEngine, *, dies_at: set[int] | None = None, pause_s: float = 0.0) -> None:
        self.served = Served(
            name="fake", weights=toy.fingerprint, vocab=toy.vocab, context_len=toy.context_len,
            execution="throughput", max_rows=64, invariant_rows=1, forward_ms=(1.0,), engine="vllm 0", dtype="float32",
        )  # fmt: skip
        self._toy = toy
        self._dies_at = dies_at or set()
        self._pause_s = pause_s
        self._cached: dict[str, list[tuple[int, ...]]] = {}
        self.has_ended = True
        self.num_starts = self.num_requests = self.num_stops = 0
        self.asked: list[Asking | None] = []
        self.may_start = threading.Event()  # a start takes until then
        self.may_start.set()

    def start(self) -> None:
        self.num_starts += 1
        self.may_start.wait(30)
        self.has_ended = False
        self._cached.clear()
        self._pooler = BlockPooler(self._toy.vocab, list)

    def stop(self) -> None:
        self.has_ended = True
        self.num_stops += 1

    def _num_cached(self, ids: tuple[int, ...], salt: str) -> int:
        shared = [np.cumprod(np.equal(ids[: len(one)], one[: len(ids)])).sum() for one in self._cached.get(salt, [])]
        return int(min(max(shared, default=0), len(ids) - 1)) // BLOCK * BLOCK

    async def pool(self, token_ids: Any, salt: str, asking: Asking | None, *, skip_cache: bool = False) -> Pooled:
        is_measured = salt == "profile"  # what the judge asks when it starts is not counted
        self.num_requests += not is_measured
        number = 0 if is_measured else self.num_requests
        if not is_measured:
            self.asked.append(asking)
        await asyncio.sleep(self._pause_s)
        if number in self._dies_at:
            self.has_ended = True
        if self.has_ended:
            raise EngineEnded("vLLM's engine has ended.")
        ids = tuple(int(each) for each in token_ids)
        num_cached = 0 if skip_cache else self._num_cached(ids, salt)
        rows = rows_of(self._toy, token_ids)
        states = SimpleNamespace()
        answer: bytes | None = None
        middle = (num_cached + len(ids)) // 2
        for first, last in ((num_cached, middle), (middle, len(ids))):
            sent = asking.sent() if asking else {}
            part = Computed(sent, np.array(ids, np.int32), first, rows[first:last], states, last == len(ids))
            (answer,) = self._pooler.pool([part])
        assert answer is not None
        self._cached.setdefault(salt, []).append(ids)
        return Pooled(answer, num_cached)
