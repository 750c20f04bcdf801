"""The time of a round of n rows on vLLM, measured after its start; edges choose their block length by it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from skydraft.cloud.vllm.asking import Asking, params_text, read_answer
from skydraft.config import MAX_K, DecodingParams
from skydraft.types import DraftBlock

if TYPE_CHECKING:
    from skydraft.cloud.vllm.engine import VllmEngine

_TEXT_LEN = 48  # half a cache block of 32 is computed again, the average
_ROWS = (1, 2, 4, 8, 16, MAX_K + 1)
_NUM_TIMES = 3


async def forward_times(engine: VllmEngine) -> tuple[float, ...]:
    """Milliseconds of requests that judge 1, 2, 3, … rows behind a text in the cache: the best of three for some
    numbers of rows, and lines between them. Each computes its part of a cache block again, as every round does.
    """
    served = engine.served
    text_len = min(_TEXT_LEN, served.context_len // 2)
    rng = np.random.default_rng(0)
    text = rng.integers(0, served.vocab.size, text_len).astype(np.int32)
    params = params_text(DecodingParams())
    seen_len = text_len + 1  # the token of the last verdict is always new
    asking = Asking("profile", params, text_len, seen_len, 0, served.context_len - text_len, 0)
    await engine.pool(text, "profile", None)
    rows = [num for num in _ROWS if text_len + num <= served.context_len]
    best = []
    for num_rows in rows:
        times = []
        for _ in range(_NUM_TIMES):
            block = rng.integers(0, served.vocab.size, num_rows).astype(np.int32)
            began = time.perf_counter()
            pooled = await engine.pool(np.concatenate([text, block]), "profile", asking)
            times.append((time.perf_counter() - began) * 1e3)
            # A failed request has no time.
            read_answer(pooled.data, DraftBlock(1, tuple(block[1:].tolist())), (), served.vocab.size)
        best.append(min(times))
    # More rows never take less time: such a measurement is noise.
    return tuple(float(ms) for ms in np.maximum.accumulate(np.interp(np.arange(1, rows[-1] + 1), rows, best)))
