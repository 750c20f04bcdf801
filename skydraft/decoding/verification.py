"""Verification: the target accepts the drafted tokens that it would have written itself, and adds the next token.

A verdict depends only on the prefix, so the same request can be answered twice.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from skydraft.choosing.chooser import Chooser, Picked, Question, choose_all
from skydraft.choosing.stopping import Stopping
from skydraft.config import DecodingParams
from skydraft.decoding.receipt import Sent
from skydraft.decoding.scoring import Scores
from skydraft.engines.base import Engine, Sequence, TokenBuffer
from skydraft.engines.rows import Rows, is_on_host
from skydraft.engines.vocab import TokenIds
from skydraft.errors import BaseMismatch, EngineError, LimitExceeded
from skydraft.types import Cost, DraftBlock, FinishReason, LinkCost, Prompt, Verdict


class Verifier(Protocol):
    """The interface between the loop on the edge and the target."""

    def verify(self, block: DraftBlock, catch_up: Seq[int], write: int = 0) -> Verdict:
        """Judge `block`, which follows the judged tokens and `catch_up`. The target's side commits the verdict.

        If it corrects the block, or the block is empty, the target may write `write` more tokens after it; they are the
        verdicts on the next empty blocks.
        """

    @property
    def asked(self) -> bool:
        """Whether the last `verify` asked the target, and did not only take a token that it wrote."""

    def stop(self) -> bool:
        """Stop the target's writing. False while empty blocks must still take written tokens."""

    def spent(self) -> LinkCost:
        """Cost of the link since the last call of this method."""

    @property
    def sent(self) -> Sent:
        """What left this device of the text."""

    @property
    def link(self) -> LinkCost:
        """Cost of the link in all."""

    def cancel(self) -> None:
        """End a long wait; `verify` may raise then. Any thread may call this."""

    def close(self) -> None:
        """Free the verifier's resources."""


class Verification:
    """Judges one block, a few rows at a time.

    `next_feed` gives the tokens to feed and `absorb` takes their logits, so a caller may put the rows of several
    verifications into one forward (and return them with `absorb_all`). It ends at the first difference: later rows
    are never computed. Of all its tokens, `seen` and judged ones, the first `fed_len` have been fed before.
    """

    def __init__(
        self,
        seen: TokenIds,
        prompt_len: int,
        catch_up: Seq[int],
        block: DraftBlock,
        fed_len: int,
        chooser: Chooser,
        stopping: Stopping,
        top: int,
    ) -> None:
        self.block = block
        self.catch_up = tuple(catch_up)
        self.scores: Scores | None = None  # of the tokens that the verdict commits
        # Tokens past the length limit can never be accepted, and may not fit into the context.
        draft = block.token_ids[: stopping.max_new_tokens - block.base]
        self._extended: TokenIds = np.concatenate([seen, np.array([*catch_up, *draft], np.int32)])
        self._seen_len = len(seen)
        self._fed_len = fed_len
        self._prompt_len = prompt_len
        self._chooser = chooser
        self._stopping = stopping
        self._top = top
        self._num_accepted = 0
        self._token_id: int | None = None
        self._finish: FinishReason | None = None
        self._audit: list[bool] = []
        self._done = False
        self._rows: Rows = ()  # rows of the last feed, not judged yet

    def next_feed(self, max_rows: int) -> TokenIds | None:
        """The next tokens to feed, at most `max_rows`; None when the verdict is known."""
        return None if self._done else self._extended[self._fed_len : self._fed_len + max_rows]

    def absorb(self, rows: Rows) -> None:
        """Take the logits [len(feed), vocab] of the tokens that `next_feed` gave."""
        (error,) = absorb_all([(self, rows)])
        if error:
            raise error

    def _take(self, rows: Rows) -> None:
        """Keep the logits of a feed until they are judged; rows before the first judged token are dropped at once."""
        self._rows = rows[max(self._seen_len - self._fed_len - 1, 0) :]
        self._fed_len += len(rows)

    def _questions(self) -> list[Question]:
        """The next choice to make, after the next row; none if all rows are judged.

        Rows on another device are cheap and waiting for them is slow: there it asks for all rows, as if all drafts fit.
        """
        if self._done or not len(self._rows):
            return []
        start = self._fed_len - len(self._rows) + 1
        asked = self._rows[:1] if is_on_host(self._rows) else self._rows
        return [Question(self._chooser, row, self._extended[: start + at]) for at, row in enumerate(asked)]

    def _answer(self, choices: Seq[Picked]) -> None:
        """Judge the rows of these choices. Raises an error that stands in place of a needed choice."""
        for choice in choices:
            if isinstance(choice, Exception):
                raise choice
            row, self._rows = self._rows[0], self._rows[1:]
            self._judge(row, self._fed_len - len(self._rows), choice)
            if self._done:
                self._rows = ()
                return

    def _judge(self, row: Rows, length: int, choice: int) -> None:
        prefix = self._extended[:length]
        drafted = int(self._extended[length]) if length < len(self._extended) else None
        if drafted is not None and length - self._prompt_len < self.block.base:
            self._audit.append(choice == drafted)
        elif drafted is not None and (choice == drafted or self._in_top(row, prefix, drafted)):
            self._num_accepted += 1
            self._score(row, length, drafted)
            self._finish = self._stopping.finish(self._extended[self._prompt_len : length + 1])
            self._done = self._finish is not None
        else:
            self._token_id = choice
            self._score(row, length, choice)
            self._finish = self._stopping.finish(np.append(prefix[self._prompt_len :], np.int32(choice)))
            self._done = True

    def _score(self, row: Rows, length: int, token_id: int) -> None:
        if self.scores:
            self.scores.note(length - self._prompt_len, row, token_id)

    def _in_top(self, row: Rows, prefix: TokenIds, drafted: int) -> bool:
        return self._top > 0 and self._chooser.rank(row, prefix, drafted) < self._top

    def verdict(self, cost: Cost) -> Verdict:
        """The verdict, after `next_feed` returned None."""
        return Verdict(self.block.base, self._num_accepted, self._token_id, self._finish, tuple(self._audit), cost=cost)


class SequenceVerification(Verification):
    """A verification whose rows come from a sequence of an engine in this process."""

    def __init__(
        self,
        seen: TokenIds,
        prompt_len: int,
        catch_up: Seq[int],
        block: DraftBlock,
        sequence: Sequence,
        chooser: Chooser,
        stopping: Stopping,
        top: int,
    ) -> None:
        sequence.align(seen)  # not further: every catch-up token is audited, even after a failed forward
        super().__init__(seen, prompt_len, catch_up, block, sequence.length, chooser, stopping, top)
        self.sequence = sequence


def absorb_all(fed: Seq[tuple[Verification, Rows]]) -> list[Exception | None]:
    """Give each verification its rows of a forward; all tokens are chosen together.

    Returns the error of each verification, or None. An error ends only its own verification.
    """
    errors: list[Exception | None] = [None] * len(fed)
    for work, rows in fed:
        work._take(rows)
    while True:
        asked = [work._questions() if error is None else [] for (work, _), error in zip(fed, errors, strict=True)]
        if not any(asked):
            return errors
        choices = iter(choose_all([question for questions in asked for question in questions]))
        for index, questions in enumerate(asked):
            try:
                fed[index][0]._answer([next(choices) for _ in questions])
            except Exception as error:
                errors[index] = error


class TargetSession:
    """The target's side of one generation: prompt, committed tokens, end, and a sequence of the engine.

    It owns its sequence from `adopt` to `release`; `prefill` feeds the prompt in parts. `committed` are generated
    tokens that are final already. `top` > 0 accepts drafts within the target's `top` best, which is lossy. Raises
    PromptError for a prompt that does not fit, and LimitExceeded if `committed` fills the text.
    """

    def __init__(
        self, engine: Engine, prompt: Prompt, params: DecodingParams, *, top: int = 0, committed: Seq[int] = ()
    ) -> None:
        room = engine.room(prompt.token_ids, prompt.media)
        self._prompt = prompt
        self._chooser = Chooser(params, engine.vocab, len(prompt.token_ids))
        self._stopping = Stopping(params, engine.vocab, min(params.max_new_tokens, room))
        self._top = top
        self._tokens = TokenBuffer((*prompt.token_ids, *committed))
        self._finish: FinishReason | None = None
        if self.base >= self._stopping.max_new_tokens:
            raise LimitExceeded(f"A generation of {self.base} tokens has reached its end.")
        self._engine = engine
        self._sequence: Sequence | None = None

    @property
    def base(self) -> int:
        """Number of committed generated tokens."""
        return len(self._tokens) - len(self._prompt.token_ids)

    @property
    def token_ids(self) -> TokenIds:
        """Read-only view of prompt and committed tokens."""
        return self._tokens.view

    @property
    def finish(self) -> FinishReason | None:
        """Why the generation ended, or None."""
        return self._finish

    @property
    def is_seated(self) -> bool:
        """Whether it owns a sequence."""
        return self._sequence is not None

    @property
    def needs_prefill(self) -> bool:
        """Whether some of the prompt is not in the KV cache yet; False without a sequence."""
        return self._sequence is not None and self._sequence.length < len(self._prompt.token_ids) - 1

    @property
    def num_in_cache(self) -> int:
        """Number of tokens in its KV cache."""
        return self._sequence.length if self._sequence else 0

    def adopt(self, sequence: Sequence) -> None:
        """Take ownership of a sequence: an empty one, or one of a session with the same prompt.

        The first feed compares its KV cache with the committed tokens.
        """
        if self._sequence is not None:
            raise EngineError("This session has a sequence already.")
        self._sequence = sequence

    def release(self) -> Sequence:
        """Return the sequence, which the caller must close or adopt."""
        sequence, self._sequence = self._own(), None
        return sequence

    def _own(self) -> Sequence:
        if self._sequence is None:
            raise EngineError("This session has no sequence.")
        return self._sequence

    def prefill(self) -> Cost:
        """Feed the next part of the prompt; returns the cost."""
        self._engine.prefill(self._own(), self._prompt.token_ids)
        return self.take_prefill_cost()

    def take_prefill_cost(self) -> Cost:
        """Cost of the prompt since the last call of this method or of `prefill`."""
        return self._sequence.take_prefill_cost() if self._sequence else Cost()

    def begin(self, block: DraftBlock, catch_up: Seq[int]) -> SequenceVerification:
        """The verification of a block that passed `check`. Committed tokens do not change."""
        seen, prompt_len, sequence = self._tokens.view, len(self._prompt.token_ids), self._own()
        chooser, stopping = self._chooser, self._stopping
        return SequenceVerification(seen, prompt_len, catch_up, block, sequence, chooser, stopping, self._top)

    def check(self, block: DraftBlock, catch_up: Seq[int]) -> None:
        """Raise BaseMismatch unless the block extends the committed tokens and `catch_up`; LimitExceeded at the end."""
        if block.base != self.base + len(catch_up):
            raise BaseMismatch(block.base - len(catch_up), self.base)
        if self._finish or block.base >= self._stopping.max_new_tokens:
            raise LimitExceeded(f"This generation has ended, at {self.base} tokens.")

    def commit(self, done: SequenceVerification, cost: Cost) -> Verdict:
        """Commit the judged block and return its verdict. A failed forward before this has changed nothing.

        Raises BaseMismatch, and changes nothing, if other tokens were committed meanwhile.
        """
        self.check(done.block, done.catch_up)
        verdict = done.verdict(cost)
        self._tokens.extend((*done.catch_up, *verdict.commits(done.block)))
        self._finish = verdict.finish
        return verdict

    def close(self, *, failed: bool = False) -> None:
        """Free the sequence. The KV of a `failed` sequence may be wrong, so it is not reused."""
        sequence, self._sequence = self._sequence, None  # at once: another thread may be closing it too
        if sequence is not None:
            sequence.discard() if failed else sequence.close()
