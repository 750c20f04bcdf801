"""What a round of n rows takes on vLLM, measured when it has started, for edges that choose how much to draft by it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from skydraft.cloud.vllm.asking import Asking, params_text
from skydraft.config import MAX_K, DecodingParams

if TYPE_CHECKING:
    from skydraft.cloud.vllm.engine import VllmEngine

_PREFIX_LEN = 64
_ROWS = (1, 2, 4, 8, 16, MAX_K + 1)
_NUM_TIMES = 3


async def forward_times(engine: VllmEngine) -> tuple[float, ...]:
    """Milliseconds of requests that judge 1, 2, 3, … rows behind a text in the cache: the best of three for some
    numbers of rows, and lines between them. Each computes its part of a cache block again, as every round does.
    """
    served = engine.served
    prefix_len = min(_PREFIX_LEN, served.context_len // 2)
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, served.vocab.size, prefix_len).astype(np.int32)
    params = params_text(DecodingParams())
    asking = Asking("profile", params, prefix_len, prefix_len, 0, served.context_len - prefix_len, 0)
    await engine.pool(prefix[:-1], "profile", None)
    rows = [num for num in _ROWS if prefix_len + num - 1 <= served.context_len]
    best = []
    for num_rows in rows:
        times = []
        for _ in range(_NUM_TIMES):
            draft = rng.integers(0, served.vocab.size, num_rows - 1).astype(np.int32)
            began = time.perf_counter()
            await engine.pool(np.concatenate([prefix, draft]), "profile", asking)
            times.append((time.perf_counter() - began) * 1e3)
        best.append(min(times))
    return tuple(float(ms) for ms in np.interp(np.arange(1, rows[-1] + 1), rows, best))
