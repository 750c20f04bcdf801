"""Drafting: the draft model continues the committed text by a block."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import numpy as np

from skydraft.decoding.choose import Chooser
from skydraft.decoding.context import Context
from skydraft.decoding.gates import GatePolicy
from skydraft.decoding.signals import measure
from skydraft.decoding.stopping import Stopping
from skydraft.engines.base import Engine, PrefillCost, Rows, Sequence
from skydraft.engines.vocab import TokenIds
from skydraft.types import DraftBlock, EndedBy, Signals


def roll_back(sequence: Sequence, token_ids: TokenIds) -> None:
    """Cut `sequence` to the longest prefix it shares with `token_ids`, but leave at least one token to feed.

    What the KV cache holds is compared with what is true, so no bookkeeping of rejections can go wrong (F1 to F3).
    """
    shared = min(sequence.length, len(token_ids) - 1)
    differs = np.flatnonzero(sequence.token_ids[:shared] != token_ids[:shared])
    sequence.truncate(int(differs[0]) if len(differs) else shared)


def feed(sequence: Sequence, token_ids: Seq[int] | TokenIds, max_rows: int) -> Rows:
    """Feed tokens, at most `max_rows` in a forward; returns the logits of the last one, [vocab]."""
    for start in range(0, len(token_ids), max_rows):
        rows = sequence.extend(token_ids[start : start + max_rows])
    return rows[-1]


class Drafter:
    """The draft model's side of one generation. Owns its sequence; opened at the first block.

    Where `ends_blocks` is given, a block ends right after the first token that makes it pass that gate. Signals are
    measured where `with_signals`.
    """

    def __init__(
        self,
        engine: Engine,
        chooser: Chooser,
        stopping: Stopping,
        *,
        ends_blocks: GatePolicy | None = None,
        with_signals: bool = False,
    ) -> None:
        self._engine = engine
        self._chooser = chooser
        self._stopping = stopping
        self._ends_blocks = ends_blocks
        self._with_signals = with_signals or ends_blocks is not None
        self._sequence: Sequence | None = None

    def room(self, context: Context) -> int:
        """How many tokens can be drafted after `context` before the draft model's own context is full; 0 if none."""
        if context.prompt_len >= self._engine.context_len:
            return 0  # such a prompt cannot even be opened
        return max(self._engine.context_len - len(context) + 1, 0)

    def draft(self, context: Context, k: int) -> DraftBlock:
        """A block of at most `k` tokens after `context`, each what the draft model alone would emit there."""
        token_ids: list[int] = []
        signals: list[Signals] = []
        ended_by: EndedBy = "k"
        began = time.perf_counter()
        prefill = self._open(context)
        sequence, row = self._catch_up(context)
        forward_s = time.perf_counter() - began
        while True:
            token_ids.append(self._chooser.choose(row, sequence.token_ids))
            if self._with_signals:
                signals.append(measure(row))
            if self._stopping.finish(np.append(sequence.token_ids, np.int32(token_ids[-1]))):
                ended_by = "stop"
            elif self._ends_blocks and self._ends_blocks.is_unsure(signals):
                ended_by = "gate"
            if ended_by != "k" or len(token_ids) == k:
                break
            began = time.perf_counter()
            row = sequence.extend(token_ids[-1:])[0]
            forward_s += time.perf_counter() - began
        return DraftBlock(
            len(context),
            tuple(token_ids),
            tuple(signals),
            ended_by,
            draft_ms=forward_s * 1e3,
            prefill_ms=prefill.prefill_ms,
            encode_ms=prefill.encode_ms,
        )

    def _open(self, context: Context) -> PrefillCost:
        """Open the sequence, once; returns what that took now."""
        if self._sequence is not None:
            return PrefillCost()
        self._sequence = self._engine.open(context.token_ids[: context.prompt_len], context.media)
        return self._sequence.prefill_cost

    def _catch_up(self, context: Context) -> tuple[Sequence, Rows]:
        assert self._sequence is not None  # `_open` comes first
        roll_back(self._sequence, context.token_ids)
        pending = context.token_ids[self._sequence.length :]
        return self._sequence, feed(self._sequence, pending, self._engine.invariant_rows)

    def close(self) -> None:
        """Free the sequence."""
        if self._sequence is not None:
            self._sequence.close()
