"""Drafting: the draft model continues the committed text by a block."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from skydraft.choosing.chooser import Chooser
from skydraft.choosing.stopping import Stopping
from skydraft.config import MAX_K, DecodingParams
from skydraft.decoding.context import Context
from skydraft.engines.base import Engine, Sequence, TokenBuffer
from skydraft.engines.vocab import TokenIds
from skydraft.errors import EngineError
from skydraft.gating.signals import CERTAIN, measure
from skydraft.types import Ahead, Cost, DraftBlock, EndedBy, FinishReason, Prompt, Reuse, Signals

_MOST_READY = 48  # prepared tokens, each with its row of logits: 0.6 MB for a vocabulary of 150,000
_MANY_ROWS = 16  # more than a round leaves to be read


class _Step(NamedTuple):
    """One drafted token, how sure the draft model was, why the text ends there, if it does, and what it took."""

    token_id: int
    signals: Signals
    finish: FinishReason | None
    cost: Cost = Cost()
    is_forced: bool = False
    is_ready: bool = False  # it was prepared
    row: Any = None  # a copy of the logits it was chosen from, where what comes next is to be prepared


@dataclass
class _Growing:
    """A block while it is drafted: `k` chosen tokens after `prefix` at most, `longest` with those that are forced."""

    prefix: TokenBuffer
    k: int
    longest: int
    steps: list[_Step] = field(default_factory=list)
    chosen: list[Signals] = field(default_factory=list)
    ended_by: EndedBy = "k"
    is_over: bool = False
    is_aligned: bool = False  # what is in the cache is the beginning of `prefix`

    @property
    def may_choose(self) -> bool:
        """Whether the next token may be one that is not forced."""
        return len(self.chosen) < self.k

    def add(self, step: _Step | None, is_enough: Callable[[Seq[Signals]], bool] | None) -> None:
        """Put a token to it, or end it where there is none."""
        if step is None:
            self.is_over = True
            return
        self.steps.append(step)
        self.prefix.extend([step.token_id])
        self.chosen += [] if step.is_forced else [step.signals]
        if step.finish:
            self.ended_by = "stop"
        elif is_enough and not step.is_forced and is_enough(self.chosen):
            self.ended_by = "gate"
        self.is_over = self.ended_by != "k" or len(self.steps) >= self.longest


class Drafter:
    """The draft model's side of one generation: `prompt` as it reads it, and the sequence, opened at the first block.

    A text ends after `max_new_tokens` at the latest. Where `ends_blocks` is given, a block ends right after the first
    token at which that says so of the signals so far. Signals are measured where `with_signals`, over what a grammar
    allows. A block has at most `longest` tokens, those that a grammar forces included, unless more were asked for.
    `reuse` is as in `Engine.begin`. Where it `prepares`, tokens may be drafted before it is known that they are needed.
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
        prepares: bool = False,
    ) -> None:
        self._engine = engine
        self._longest = longest
        self._reuse = reuse
        self._prompt = prompt
        self._chooser = Chooser(params, engine.vocab, len(prompt.token_ids))
        self._stopping = Stopping(params, engine.vocab, max_new_tokens)
        self._ends_blocks = ends_blocks
        self._with_signals = with_signals or ends_blocks is not None or prepares
        self._prepares = prepares
        self._ready: dict[bytes, _Step] = {}  # by the text before them; whoever has the engine's floor adds to it
        self._num_prepared = 0
        self._drafted: list[_Step] = []  # the last block
        self._sequence: Sequence | None = None
        self._is_cancelled = False

    def room(self, context: Context) -> int:
        """How many tokens can be drafted after `context` before the draft model's own context is full; 0 if none."""
        return self._room_after(context.base)

    def _room_after(self, num_tokens: int) -> int:
        prompt_len, context_len = len(self._prompt.token_ids), self._engine.context_len
        # A prompt that fills the context cannot even be opened.
        return max(context_len - prompt_len - num_tokens + 1, 0) if prompt_len < context_len else 0

    def draft(self, context: Context, k: int) -> DraftBlock:
        """A block of at most `k` tokens after `context`, each what the draft model alone would emit there.

        Tokens that a grammar forces are not counted, since they cost nothing: with them it may be longer.
        """
        opening = self._open()
        block = self._block(context.token_ids, k)
        while not block.is_over and (step := self._prepared(block.prefix.view)):
            block.add(step if block.may_choose or step.is_forced else None, self._ends_blocks)
        if not block.is_over:
            opening += self._catch_up(block.prefix.view)
            with self._engine.floor:
                while not block.is_over:
                    block.add(self._next(block), self._ends_blocks)
        self._drafted = steps = block.steps
        num_prepared, self._num_prepared = self._num_prepared, 0
        used = [step for step in steps if step.is_ready and not step.is_forced]
        return DraftBlock(
            context.base,
            tuple(step.token_id for step in steps),
            tuple(step.signals for step in steps) if self._with_signals else (),
            block.ended_by,
            steps[-1].finish if steps else None,
            sum((step.cost for step in steps if not step.is_ready), opening),
            tuple(step.is_forced for step in steps) if self._chooser.has_grammar else (),
            Ahead(num_prepared, len(used), sum(step.cost.forward_ms for step in used)),
        )

    def _block(self, token_ids: TokenIds, k: int) -> _Growing:
        """An empty block after prompt and text."""
        prefix = TokenBuffer()
        prefix.extend(token_ids)
        room = self._room_after(len(token_ids) - len(self._prompt.token_ids))
        longest = max(self._longest, k) if self._chooser.has_grammar else k
        return _Growing(prefix, k, min(longest, room), is_over=not room)

    def _prepared(self, prefix: TokenIds) -> _Step | None:
        return self._ready.get(self._key(prefix)) if self._ready else None

    def _key(self, prefix: TokenIds) -> bytes:
        return prefix[len(self._prompt.token_ids) :].tobytes()

    def forget_prepared(self) -> None:
        """Let go of what was prepared and not needed."""
        self._ready.clear()

    def runner_up(self, token_ids: TokenIds, index: int) -> tuple[int, ...]:
        """The second choice in place of token `index` of the last block, after prompt and text; none without rivals."""
        with self._engine.floor.spare() as is_free:
            if not is_free or index >= len(self._drafted) or (step := self._drafted[index]).row is None:
                return ()
            second = self._chooser.runner_up(step.row, token_ids, step.token_id)
            return () if second == step.token_id else (second,)

    def prepare(self, token_ids: TokenIds, k: int, may_go_on: Callable[[], bool]) -> tuple[int, ...]:
        """Draft a block after a prompt and a text that may become ours, to be found ready by `draft`; returns it.

        Takes the floor for one token at a time, and ends where others want it.
        """
        block, is_new = self._block(token_ids, k), True
        while not block.is_over and len(self._ready) < _MOST_READY:
            with self._engine.floor.spare() as is_free:
                if not (is_free and may_go_on()):
                    break
                if is_new and self._stopping.finish(token_ids[len(self._prompt.token_ids) :]):
                    break
                is_new = False
                known = self._key(block.prefix.view)
                if (step := self._next(block)) and not step.is_ready:
                    self._ready[known] = step._replace(is_ready=True)
                    self._num_prepared += not step.is_forced
                block.add(step, self._ends_blocks)
        return tuple(step.token_id for step in block.steps)

    def _next(self, block: _Growing) -> _Step | None:
        """The token after what a block has; None where it is to be chosen and may not be. For who has the floor."""
        prefix = block.prefix.view
        step = self._prepared(prefix) or self._forced(block)
        if step is not None:
            return step if block.may_choose or step.is_forced else None
        if not block.may_choose:
            return None
        row, cost = self._row_after(block)
        token_id = self._chooser.choose(row, prefix)
        signals = measure(self._chooser.follow_grammar(row, prefix)) if self._with_signals else CERTAIN
        finish = self._finish(block.prefix, token_id)
        return _Step(token_id, signals, finish, cost, row=row + 0 if self._prepares else None)

    def _forced(self, block: _Growing) -> _Step | None:
        """A forced token needs no row; it is fed with the next one that does."""
        token_id = self._chooser.forced(block.prefix.view)
        if token_id is None:
            return None
        return _Step(token_id, CERTAIN, self._finish(block.prefix, token_id), is_forced=True)

    def _finish(self, prefix: TokenBuffer, token_id: int) -> FinishReason | None:
        """Why the text would end with a token after `prefix`."""
        before = len(prefix)
        prefix.extend([token_id])
        finish = self._stopping.finish(prefix.view[len(self._prompt.token_ids) :])
        prefix.truncate(before)
        return finish

    def _open(self) -> Cost:
        """Open the sequence, once; returns what that took now."""
        if self._sequence is not None:
            return Cost()
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
        return sequence.take_prefill_cost()

    def _catch_up(self, prefix: TokenIds) -> Cost:
        """Feed most of a text that somebody else has written meanwhile; between its parts others may have the floor."""
        cost = Cost()
        while self._sequence is not None and len(prefix) - self._sequence.length > _MANY_ROWS:
            with self._engine.floor:
                self._sequence.align(prefix)
                began, start = time.perf_counter(), self._sequence.length
                pending = prefix[start : start + self._engine.invariant_rows]
                self._sequence.extend(pending)
                cost += Cost(1, len(pending), forward_ms=(time.perf_counter() - began) * 1e3)
        return cost

    def _row_after(self, block: _Growing) -> tuple[Any, Cost]:
        """Feed what a block's prefix has beyond the cache: (logits after it [vocab], what that took)."""
        sequence = self._sequence
        if sequence is None:
            raise EngineError("The sequence was closed.")
        prefix = block.prefix.view
        if not block.is_aligned:
            sequence.align(prefix)
            block.is_aligned = True
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
        """Free the sequence, and what was drafted for it."""
        self._ready.clear()
        self._drafted = []
        if self._sequence is not None:
            self._sequence.close()
