import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from skydraft.choosing.chooser import Chooser
from skydraft.choosing.stopping import Stopping
from skydraft.config import MAX_K, DecodingParams, Execution
from skydraft.decoding.accounts.scoring import Scores
from skydraft.engines.base import Engine, Sequence
from skydraft.engines.vocab import Rows, TokenIds
from skydraft.gating.gates import CERTAIN, is_looping, measure
from skydraft.types import Cost, DraftBlock, EndedBy, FinishReason, Prompt, Reuse, Signals

_MANY_ROWS = 16  # more than one round leaves to read


class Step(NamedTuple):
    """A drafted token."""

    token_id: int
    signals: Signals = CERTAIN
    finish: FinishReason | None = None
    is_forced: bool = False
    is_other: bool = False  # drawn in place of a token that repeats a cycle
    is_copied: bool = False  # copied from earlier text, not drafted by a model


class Drafter:
    """The draft model's side of one generation; its sequence is opened at the first block.

    A text has at most `max_new_tokens`. If `ends_blocks` is given, a block ends after the first token at which it
    returns True for the signals so far. `with_signals` measures signals, over the tokens that a grammar allows. With
    a grammar a block has at most `MAX_K` tokens. `reuse` is as in `Engine.begin`. `scores` get all rows that are read.
    """

    def __init__(
        self, engine: Engine, prompt: Prompt, params: DecodingParams, max_new_tokens: int, *,
        ends_blocks: Callable[[Seq[Signals]], bool] | None = None, with_signals: bool = False,
        reuse: Reuse | None = None, scores: Scores | None = None, execution: Execution | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._max_rows = engine, min(engine.max_rows(execution), _MANY_ROWS)
        self._prompt, self._reuse, self._scores = prompt, reuse, scores
        self._chooser = Chooser(params, engine.vocab, len(prompt.token_ids))
        self._stopping = Stopping(params, engine.vocab, max_new_tokens)
        self._ends_blocks = ends_blocks
        self._with_signals = with_signals or ends_blocks is not None
        self._sequence: Sequence | None = None
        self._is_closed = False
        self.compares: Callable[[int, bool | None], None] | None = None  # called with each place that is read
        self._agrees: list[bool | None] = []  # for the tokens read so far, until all are read
        self._cost = Cost()  # not yet reported in a block

    def room(self, length: int) -> int:
        """Return how many tokens the draft model's context can take after `length` tokens, prompt included."""
        # A sequence cannot be opened with a prompt that fills the context.
        has_opened = len(self._prompt.token_ids) < self._engine.context_len
        return max(self._engine.context_len - length + 1, 0) if has_opened else 0

    def draft(self, prefix: TokenIds, k: int, *, begun: Seq[Step] = (), breaks_loops: bool = False) -> DraftBlock:
        """Draft the next tokens: at most `k`, not counting tokens that a grammar forces.

        The drafts `begun` come first. With `breaks_loops` a token that would continue a cycle is replaced.
        """
        steps, ended_by, cost = self.steps(prefix, k, () if breaks_loops else begun, breaks_loops=breaks_loops)
        token_ids, forced = tuple(step.token_id for step in steps), tuple(step.is_forced for step in steps)
        forced = forced if self._chooser.has_grammar or any(forced) else ()  # a budget of thinking forces its end tag
        signals = tuple(step.signals for step in steps) if self._with_signals else ()
        finish, num_broken = steps[-1].finish if steps else None, sum(step.is_other for step in steps)
        base = self._chooser.position(prefix)
        return DraftBlock(base, token_ids, signals, ended_by, finish, cost, forced, num_broken=num_broken)

    def steps(
        self, prefix: TokenIds, k: int, begun: Seq[Step] = (), *, breaks_loops: bool = False
    ) -> tuple[list[Step], EndedBy, Cost]:
        """Draft as `draft` does; returns (steps, why they ended, cost)."""
        sequence, steps, known = self._open(), list[Step](), deque(begun)
        self._agrees.clear()  # an unfinished `read` ends here
        longest = min(MAX_K if self._chooser.has_grammar else k, self.room(len(prefix)))
        text = np.append(prefix, np.zeros(longest, np.int32))
        ended_by: EndedBy = "k"
        num_free = 0  # chosen tokens, not forced ones
        self._catch_up(sequence, prefix)
        with self._engine.floor:
            sequence.align(prefix)
            while ended_by == "k" and len(steps) < longest:
                may_choose, before = num_free < k, text[: len(prefix) + len(steps)]
                if known and (may_choose or known[0].is_forced):
                    step: Step | None = known.popleft()
                else:
                    step = self._next(sequence, before, may_choose=may_choose, breaks_loops=breaks_loops)
                if step is None:
                    break
                text[len(before)] = step.token_id
                finish = self._stopping.finish(text[len(self._prompt.token_ids) : len(before) + 1])
                steps.append(step._replace(finish=finish))
                ended_by, num_free = self._ended_by(steps), num_free + (not step.is_forced)
        return steps, ended_by, self._take_cost(sequence)

    def _ended_by(self, steps: list[Step]) -> EndedBy:
        if steps[-1].finish:
            return "stop"
        if self._ends_blocks is None or steps[-1].is_forced:
            return "k"
        return "gate" if self._ends_blocks([step.signals for step in steps if not step.is_forced]) else "k"

    def read(self, prefix: TokenIds) -> DraftBlock:
        """Read the target's last tokens; returns an empty block with this model's agreement for each new token.

        This makes one forward, so a stream never waits long. The agreement is empty until all tokens but the last are
        read; the next block feeds that one.
        """
        sequence = self._open()
        sequence.align(prefix)
        # At least two rows, since the target writes another token meanwhile.
        end = min(sequence.length + max(self._max_rows, 2), len(prefix) - 1)
        while (length := sequence.length) < end:
            with self._engine.floor:  # another forward would overwrite the rows
                rows = self._feed(sequence, prefix[:end])
                self._agrees += [self._agrees_with(prefix[: length + 2 + i], row) for i, row in enumerate(rows)]
        agrees = tuple(self._agrees) if sequence.length == len(prefix) - 1 else ()
        self._agrees = [] if agrees else self._agrees
        return DraftBlock(self._chooser.position(prefix), (), cost=self._take_cost(sequence), read=agrees)

    def _agrees_with(self, text: TokenIds, row: Rows) -> bool | None:
        prefix = text[:-1]
        if self._chooser.forced(prefix) is not None:
            return None
        return self._chooser.choose(row, prefix) == int(text[-1])

    def _next(self, sequence: Sequence, prefix: TokenIds, *, may_choose: bool, breaks_loops: bool) -> Step | None:
        """Return the next token, or None if it is not forced and `may_choose` is False. A forced token needs no forward
        unless it is scored."""
        chooser, signals, forced = self._chooser, CERTAIN, self._chooser.forced(prefix)
        if forced is None and not may_choose:
            return None
        if forced is None or self._scores:
            while sequence.length < len(prefix):
                row = self._feed(sequence, prefix)[-1]  # the logits after it, [vocab]
        if self._scores:
            self._scores.drafted(chooser.position(prefix), row)
        if forced is not None:
            return Step(forced, is_forced=True)
        usual = token_id = chooser.choose(row, prefix)
        if self._with_signals:
            signals = measure(chooser.follow_grammar(row, prefix))
        generated = prefix[len(self._prompt.token_ids) :]
        if breaks_loops and is_looping(np.append(generated, token_id), self._engine.vocab):
            token_id = chooser.other(row, prefix, usual)
        return Step(token_id, signals, is_other=token_id != usual)

    def _open(self) -> Sequence:
        if self._sequence is None:
            self._sequence = self._engine.begin(self._prompt.token_ids, self._prompt.media, self._reuse)
            if self._is_closed:  # meanwhile
                self.close()
            self._engine.fill(self._sequence, self._prompt.token_ids)
        return self._sequence

    def _catch_up(self, sequence: Sequence, prefix: TokenIds) -> None:
        """Feed most of the text that the target wrote, in parts; other generations may compute between them."""
        while len(prefix) - sequence.length > _MANY_ROWS:
            with self._engine.floor:
                sequence.align(prefix)
                self._feed(sequence, prefix)

    def _feed(self, sequence: Sequence, prefix: TokenIds) -> Rows:
        """Run one forward over the next uncached tokens of a prefix, at most `max_rows`; returns its rows."""
        began, start = time.perf_counter(), sequence.length
        pending = prefix[start : start + self._max_rows]
        rows = sequence.extend(pending)
        for row, after in zip(rows, range(start + 1, len(prefix)), strict=False):
            place = self._chooser.position(prefix[:after])
            if self._scores:
                self._scores.read(place, row, int(prefix[after]))
            if self.compares:
                self.compares(place, self._agrees_with(prefix[: after + 1], row))
        self._cost += Cost(1, len(pending), forward_ms=(time.perf_counter() - began) * 1e3)
        return rows

    def _take_cost(self, sequence: Sequence) -> Cost:
        cost, self._cost = sequence.take_prefill_cost() + self._cost, Cost()
        return cost

    def close(self) -> None:
        """Close for good: a running prefill or draft ends with an error. Any thread may call this."""
        self._is_closed = True
        if self._sequence is not None:
            self._sequence.close()

    cancel = close
