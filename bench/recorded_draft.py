"""The draft models of many clients in one process: what each says was recorded, and a step takes what is stated.

A draft model computes each of its rows once, for all clients and before they are measured; later a step only takes its
time. So one machine can stand for many devices. The server, the link and all requests are real.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from skydraft.engines.base import Engine, Sequence
from skydraft.engines.row_costs import RowProfile
from skydraft.engines.toy import ListEngine
from skydraft.engines.vocab import Rows, TokenIds, num_shared

_FAR = 8  # tokens; a text that differs in more is read from its beginning
_NUM_KEPT = 4096  # tokens of a row: enough for what a schema forbids, and for the entropy to some hundredths of a nat
_NO_WEIGHT = -200.0


@dataclass(frozen=True, slots=True)
class KeptRow:
    """The best tokens of a row and their log-probabilities; all others have `rest`, as one row has no room for more."""

    token_ids: TokenIds
    logprobs: Rows
    rest: float

    @classmethod
    def of(cls, row: Rows) -> KeptRow:
        """Of a row of logits [vocab]."""
        num = min(_NUM_KEPT, len(row))
        best = np.argpartition(row, len(row) - num)[len(row) - num :].astype(np.int32)
        weights = np.exp(np.maximum(row.astype(np.float64) - row.max(), _NO_WEIGHT))
        weights /= weights.sum()
        others = (1 - weights[best].sum()) / max(len(row) - num, 1)
        return cls(best, np.log(weights[best]).astype(np.float32), float(np.log(max(others, np.exp(_NO_WEIGHT)))))

    def write(self, row: Rows) -> None:
        row[:] = self.rest
        row[self.token_ids] = self.logprobs


class KeptRows:
    """The rows of a draft model after any text, each computed once. Any thread may ask."""

    def __init__(self, real: Engine) -> None:
        self.real, self.num_computed = real, 0
        self._known: dict[bytes, KeptRow] = {}
        self._open = list[Sequence]()

    def after(self, token_ids: TokenIds) -> KeptRow:
        """The row that follows these tokens."""
        key = token_ids.tobytes()
        if key not in self._known:
            with self.real.floor:
                if key not in self._known:  # another device may have asked for it meanwhile
                    self._known[key] = KeptRow.of(self._read(token_ids))
                    self.num_computed += 1
        return self._known[key]

    def _read(self, token_ids: TokenIds) -> Rows:
        near = max(self._open, key=lambda each: num_shared(each.token_ids, token_ids), default=None)
        if near is not None and len(token_ids) - num_shared(near.token_ids, token_ids) <= _FAR:
            self._open.remove(near)
            near.align(token_ids)
        else:
            if len(self._open) == self.real.max_sequences:
                self._open.pop(0).close()  # the one whose last row is oldest
            near = self.real.open(token_ids)
        self._open.append(near)
        row: Rows = near.extend(token_ids[near.length :])[-1]
        return row

    def close(self) -> None:
        while self._open:
            self._open.pop().close()


class Kept(Protocol):
    """What a draft model says after any text; `real` is the model."""

    real: Engine

    def after(self, token_ids: TokenIds) -> KeptRow: ...


class RecordedDraft(ListEngine):
    """The draft model of one device: what was recorded, with `step_ms` for each forward, a prompt's too. Each further
    row takes `row_ms` more, each further token of a prompt `prompt_ms`."""

    def __init__(self, kept: Kept, step_ms: float, row_ms: float = 0.0, prompt_ms: float = 0.0) -> None:
        real = kept.real
        super().__init__(real.name)
        self.vocab, self.context_len, self.fingerprint = real.vocab, real.context_len, real.fingerprint
        self._kept, self._step_ms, self._row_ms, self._prompt_ms = kept, step_ms, row_ms, prompt_ms
        self.profile = RowProfile(invariant_rows=real.invariant_rows, forward_ms=(step_ms,))

    def forward(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]], *, want_logits: bool) -> list[Rows]:
        num_more = sum(len(token_ids) for _, token_ids in feeds) - 1
        took_ms = self._step_ms + num_more * (self._row_ms if want_logits else self._prompt_ms)
        until, found = time.perf_counter() + took_ms / 1e3, list[Rows]()
        for sequence, token_ids in feeds:
            rows = np.empty((len(token_ids) if want_logits else 0, self.vocab.size), np.float32)
            for index, token_id in enumerate(token_ids):
                sequence.slot.append(int(token_id))
                if want_logits:
                    self._kept.after(np.array(sequence.slot, np.int32)).write(rows[index])
            found.append(rows)
        time.sleep(max(until - time.perf_counter(), 0.0))
        return found
