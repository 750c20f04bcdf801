"""A draft model whose rows are computed once, so that each of many devices drafts at its own speed on one machine."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from skydraft.engines.base import Engine, Sequence
from skydraft.engines.options import RowProfile
from skydraft.engines.rows import Rows
from skydraft.engines.vocab import TokenIds


@dataclass(slots=True)
class _Slot:
    token_ids: list[int] = field(default_factory=list)
    real: Sequence | None = None  # where a row was computed


class KeptRows:
    """The rows of a model after every text that was asked for; all devices share them."""

    def __init__(self, real: Engine) -> None:
        self.real, self.num_computed = real, 0
        self._rows: dict[bytes, npt.NDArray[np.float16]] = {}

    def after(self, slot: _Slot) -> npt.NDArray[np.float32]:
        """Logits [vocab.size] after the tokens of a slot. They are rounded to 16 bits, the first time too."""
        ids = np.array(slot.token_ids, np.int32)
        if (key := ids.tobytes()) not in self._rows:
            with self.real.floor:
                if slot.real is None:
                    slot.real = self.real.open(ids)
                slot.real.align(ids)
                rows = slot.real.extend(ids[slot.real.length :])
                self._rows[key] = np.asarray(rows[-1], np.float32).astype(np.float16)
            self.num_computed += 1
        return self._rows[key].astype(np.float32)


class KeptDraft(Engine):
    """The model behind `kept`, on a device of its own: each forward takes `step_ms`, a prompt's as well."""

    has_kernels = False

    def __init__(self, kept: KeptRows, step_ms: float) -> None:
        real = kept.real
        super().__init__(real.name)
        self.vocab, self.context_len, self.fingerprint = real.vocab, real.context_len, real.fingerprint
        self._kept, self._step_s = kept, step_ms / 1e3
        self._profile = RowProfile(invariant_rows=real.invariant_rows, forward_ms=(step_ms,))

    def allocate(self) -> _Slot:
        return _Slot()

    def forward(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]], *, want_logits: bool) -> list[Rows]:
        until, found = time.perf_counter() + self._step_s, list[Rows]()
        for sequence, token_ids in feeds:
            slot: _Slot = sequence.slot
            rows: list[Any] = []
            for token_id in token_ids:
                slot.token_ids.append(int(token_id))
                rows += [self._kept.after(slot)] if want_logits else []
            found.append(np.stack(rows) if want_logits else None)
        time.sleep(max(until - time.perf_counter(), 0.0))
        return found

    def roll_back(self, sequence: Sequence, length: int) -> None:
        del sequence.slot.token_ids[length:]

    def release(self, sequence: Sequence) -> None:
        slot: _Slot = sequence.slot
        slot.token_ids.clear()
        if slot.real is not None:
            slot.real.close()

    def kv_length(self, sequence: Sequence) -> int:
        return len(sequence.slot.token_ids)
