"""Drafting: the draft model continues the committed text by a block."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from skydraft.choosing.chooser import Chooser
from skydraft.choosing.stopping import Stopping
from skydraft.config import MAX_K, DecodingParams
from skydraft.decoding.context import Context
from skydraft.engines.base import Engine, Rows, Sequence, TokenBuffer
from skydraft.engines.vocab import TokenIds
from skydraft.gating.signals import CERTAIN, measure
from skydraft.types import Cost, DraftBlock, EndedBy, FinishReason, Prompt, Reuse, Signals


class _Step(NamedTuple):
    """One drafted token, how sure the draft model was of it, and what it took."""

    token_id: int
    signals: Signals
    cost: Cost
    is_forced: bool


class Drafter:
    """The draft model's side of one generation: `prompt` as it reads it, and the sequence, opened at the first block.

    A text ends after `max_new_tokens` at the latest. Where `ends_blocks` is given, a block ends right after the first
    token at which that says so of the signals so far. Signals are measured where `with_signals`, over what a grammar
    allows. A block has at most `longest` tokens, those that a grammar forces included, unless more were asked for.
    `reuse` is as in `Engine.begin`.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        params: DecodingParams,
        max_new_tokens: int,
        *,
        ends_blocks: Callable[[Seq[Signals]], bool] | None = None,
        with_signals: bool = False,
        longest: int = MAX_K,
        reuse: Reuse | None = None,
    ) -> None:
        self._engine = engine
        self._longest = longest
        self._reuse = reuse
        self._prompt = prompt
        self._chooser = Chooser(params, engine.vocab, len(prompt.token_ids))
        self._stopping = Stopping(params, engine.vocab, max_new_tokens)
        self._ends_blocks = ends_blocks
        self._with_signals = with_signals or ends_blocks is not None
        self._sequence: Sequence | None = None
        self._is_cancelled = False

    def room(self, context: Context) -> int:
        """How many tokens can be drafted after `context` before the draft model's own context is full; 0 if none."""
        prompt_len, context_len = len(self._prompt.token_ids), self._engine.context_len
        # A prompt that fills the context cannot even be opened.
        return max(context_len - prompt_len - context.base + 1, 0) if prompt_len < context_len else 0

    def draft(self, context: Context, k: int) -> DraftBlock:
        """A block of at most `k` tokens after `context`, each what the draft model alone would emit there.

        Tokens that a grammar forces are not counted, since they cost nothing: with them it may be longer.
        """
        sequence, cost = self._open()
        with self._engine.floor:
            return self._draft(sequence, cost, context, k)

    def _draft(self, sequence: Sequence, cost: Cost, context: Context, k: int) -> DraftBlock:
        sequence.align(context.token_ids)
        prefix = TokenBuffer()
        prefix.extend(context.token_ids)
        steps: list[_Step] = []
        free: list[Signals] = []
        ended_by: EndedBy = "k"
        finish: FinishReason | None = None
        longest = min(max(self._longest, k), self.room(context))
        while ended_by == "k" and len(steps) < longest:
            step = self._next(sequence, prefix.view, may_choose=len(free) < k)
            if step is None:
                break
            steps.append(step)
            cost += step.cost
            prefix.extend([step.token_id])
            free += [] if step.is_forced else [step.signals]
            finish = self._stopping.finish(prefix.view[len(self._prompt.token_ids) :])
            if finish:
                ended_by = "stop"
            elif self._ends_blocks and not step.is_forced and self._ends_blocks(free):
                ended_by = "gate"
        return DraftBlock(
            context.base,
            tuple(step.token_id for step in steps),
            tuple(step.signals for step in steps) if self._with_signals else (),
            ended_by,
            finish,
            cost,
            tuple(step.is_forced for step in steps) if self._chooser.has_grammar else (),
        )

    def _next(self, sequence: Sequence, prefix: TokenIds, *, may_choose: bool) -> _Step | None:
        """The token after `prefix`; None where it is to be chosen and may not be."""
        # A forced token needs no row; it is fed with the next one that does.
        if (token_id := self._chooser.forced(prefix)) is not None:
            return _Step(token_id, CERTAIN, Cost(), is_forced=True)
        if not may_choose:
            return None
        row, cost = self._row_after(sequence, prefix)
        token_id = self._chooser.choose(row, prefix)
        signals = measure(self._chooser.follow_grammar(row, prefix)) if self._with_signals else CERTAIN
        return _Step(token_id, signals, cost, is_forced=False)

    def _open(self) -> tuple[Sequence, Cost]:
        """The sequence, opened once, and what that took now."""
        if self._sequence is not None:
            return self._sequence, Cost()
        with self._engine.floor:
            sequence = self._sequence = self._engine.begin(self._prompt.token_ids, self._prompt.media, self._reuse)
        if self._is_cancelled:
            self.close()
        try:
            self._engine.fill(sequence, self._prompt.token_ids)
        except BaseException:
            self.close()  # another thread may have done so, to end this
            self._sequence = None
            raise
        return sequence, sequence.take_prefill_cost()

    def _row_after(self, sequence: Sequence, prefix: TokenIds) -> tuple[Rows, Cost]:
        """Feed what of `prefix` is not in the cache yet: (logits after it [vocab], what that took)."""
        began = time.perf_counter()
        pending, max_rows = prefix[sequence.length :], self._engine.invariant_rows
        starts = range(0, len(pending), max_rows)
        for start in starts:
            rows = sequence.extend(pending[start : start + max_rows])
        return rows[-1], Cost(len(starts), len(pending), forward_ms=(time.perf_counter() - began) * 1e3)

    def cancel(self) -> None:
        """End what is being read or drafted with an error. From any thread."""
        self._is_cancelled = True
        self.close()

    def close(self) -> None:
        """Free the sequence."""
        if self._sequence is not None:
            self._sequence.close()
