"""Keeps a promise of every engine: within `invariant_rows`, rows have the bits of one row at a time, at any length.

The probe at the load sees a short text only. Kernels may take another path for a longer KV cache (llama.cpp has one
from 512 cells on), so the first forward of a shape, with lengths up to a factor of two, is compared where it happens.
"""

from __future__ import annotations

import logging

import numpy as np

from skydraft.engines.model import Feeds, Model
from skydraft.engines.rows import Rows

log = logging.getLogger("skydraft")


class RowCheck:
    """Forwards of one engine. Shape: for each sequence its number of rows, and its length to the next power of two."""

    def __init__(self) -> None:
        self._is_equal: dict[tuple[tuple[int, int], ...], bool] = {}

    def forward(self, engine: Model, feeds: Feeds) -> list[Rows]:
        """Rows per feed, all fed and recorded; on failure every sequence is as before."""
        lengths = [sequence.length for sequence, _ in feeds]
        key = tuple(sorted((sequence.length.bit_length(), len(token_ids)) for sequence, token_ids in feeds))
        if self._is_equal.get(key):
            return engine.feed(feeds)
        try:
            if key in self._is_equal:
                return _singly(engine, feeds)
            together = [rows.copy() for rows in engine.feed(feeds)]  # valid until the next forward only
            _go_back(feeds, lengths)
            singly = _singly(engine, feeds)
        except BaseException:
            _go_back(feeds, lengths)
            raise
        self._is_equal[key] = all(map(np.array_equal, together, singly))
        if not self._is_equal[key]:
            log.warning(
                "%s: %d rows at once are not exact from %d tokens on; there they are computed one by one.",
                engine.name, sum(num for _, num in key), 1 << (key[-1][0] - 1),
            )  # fmt: skip
        return singly


def _singly(engine: Model, feeds: Feeds) -> list[Rows]:
    singly = []
    for sequence, token_ids in feeds:
        rows = [engine.feed([(sequence, [token_id])])[0].copy() for token_id in token_ids]
        singly.append(np.concatenate(rows))
    return singly


def _go_back(feeds: Feeds, lengths: list[int]) -> None:
    for (sequence, _), length in zip(feeds, lengths, strict=True):
        sequence.truncate(length)
