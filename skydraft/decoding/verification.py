"""Verification: the target says which drafted tokens it would have emitted itself, and what comes next.

Verifying is comparing. Nothing but the prefix decides a verdict, so the same request can be answered twice.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from skydraft.choosing.chooser import Chooser, Question, choose_all
from skydraft.choosing.picking import Picked
from skydraft.choosing.stopping import Stopping
from skydraft.config import DecodingParams
from skydraft.engines.base import Engine, Rows, Sequence, TokenBuffer
from skydraft.engines.rows import is_on_host
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.errors import BaseMismatch, EngineError, LimitExceeded
from skydraft.types import Cost, DraftBlock, FinishReason, LinkCost, Prompt, Verdict


class Verifier(Protocol):
    """The one seam between the edge and whatever judges its blocks."""

    def verify(self, block: DraftBlock, catch_up: Seq[int]) -> Verdict:
        """Judge `block`, which extends what was judged before by `catch_up`. Commits the verdict on its side."""

    def spent(self) -> LinkCost:
        """What went over a link since this was last asked, for whatever reason."""

    def cancel(self) -> None:
        """Do not wait any longer for what may take long: `verify` may raise then. From any thread."""

    def close(self) -> None:
        """Free what the verifier holds."""


class Verification:
    """One block on its way through the target, a few rows at a time.

    Rows are asked for with `next_feed` and given back with `absorb`, so that a caller may put the rows of several
    verifications into one forward (`absorb_all` takes them back together). It ends at the first difference: later rows
    are never computed. Of all its tokens, `seen` and what is judged, the first `fed_len` have been fed before.
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
        # What lies past the length limit can never be accepted, and may not even fit into the context.
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
        self._audit_ranks: list[int] = []
        self._done = False
        self._rows: Rows = ()  # of the last feed, not judged yet

    def next_feed(self, max_rows: int) -> TokenIds | None:
        """The next tokens to feed, at most `max_rows`; None when the verdict is known."""
        return None if self._done else self._extended[self._fed_len : self._fed_len + max_rows]

    def absorb(self, rows: Rows) -> None:
        """Take the logits [len(feed), vocab] of the tokens that `next_feed` gave."""
        (error,) = absorb_all([(self, rows)])
        if error:
            raise error

    def _take(self, rows: Rows) -> None:
        """Hold the logits of a feed until they are judged; those before what is to be judged are let go at once."""
        self._rows = rows[max(self._seen_len - self._fed_len - 1, 0) :]
        self._fed_len += len(rows)

    def _questions(self) -> list[Question]:
        """What has to be known to go on: which token follows the next row; none where all are judged.

        Rows on another device cost little and waiting for them much: there it is all rows, as if the draft were right.
        """
        if self._done or not len(self._rows):
            return []
        start = self._fed_len - len(self._rows) + 1
        asked = self._rows[:1] if is_on_host(self._rows) else self._rows
        return [Question(self._chooser, row, self._extended[: start + at]) for at, row in enumerate(asked)]

    def _answer(self, choices: Seq[Picked]) -> None:
        """Judge as many rows as were asked about. Raises what stands for a choice that is needed."""
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
            if choice != drafted:
                self._audit_ranks.append(self._chooser.rank(row, prefix, drafted))
        elif drafted is not None and (choice == drafted or self._in_top(row, prefix, drafted)):
            self._num_accepted += 1
            self._finish = self._stopping.finish(self._extended[self._prompt_len : length + 1])
            self._done = self._finish is not None
        else:
            self._token_id = choice
            self._finish = self._stopping.finish(np.append(prefix[self._prompt_len :], np.int32(choice)))
            self._done = True

    def _in_top(self, row: Rows, prefix: TokenIds, drafted: int) -> bool:
        return self._top > 0 and self._chooser.rank(row, prefix, drafted) < self._top

    def verdict(self, cost: Cost) -> Verdict:
        """The verdict, once `next_feed` has given None."""
        audit, ranks = tuple(self._audit), tuple(self._audit_ranks)
        return Verdict(self.block.base, self._num_accepted, self._token_id, self._finish, audit, ranks, cost)


class SequenceVerification(Verification):
    """One whose rows come from a sequence of an engine in this process."""

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
        sequence.align(seen)  # not further: every catch-up token is audited, after a failed forward too
        super().__init__(seen, prompt_len, catch_up, block, sequence.length, chooser, stopping, top)
        self.sequence = sequence


def absorb_all(fed: Seq[tuple[Verification, Rows]]) -> list[Exception | None]:
    """Let each verification take its rows of a forward; their tokens are chosen together.

    Returns what each raised, which ends it and none of the others.
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


class Judged(Protocol):
    """A block whose verdict is known, whoever found it."""

    block: DraftBlock
    catch_up: tuple[int, ...]

    def verdict(self, cost: Cost) -> Verdict:
        """The verdict, with what it cost."""


class TargetText:
    """What the target's side has of one generation, wherever its rows are computed: prompt, committed tokens, end.

    `committed` are generated tokens that are final already; `room` tokens fit after the prompt. `top` > 0 accepts
    drafts within the target's `top` best: lossy. Raises LimitExceeded when `committed` leaves nothing to generate.
    """

    def __init__(
        self, prompt: Prompt, params: DecodingParams, vocab: Vocab, room: int, *, top: int, committed: Seq[int]
    ) -> None:
        self._prompt = prompt
        self._chooser = Chooser(params, vocab, len(prompt.token_ids))
        self._stopping = Stopping(params, vocab, min(params.max_new_tokens, room))
        self._top = top
        self._tokens = TokenBuffer((*prompt.token_ids, *committed))
        self._finish: FinishReason | None = None
        if self.base >= self._stopping.max_new_tokens:
            raise LimitExceeded(f"A generation of {self.base} tokens has reached its end.")

    @property
    def base(self) -> int:
        """How many generated tokens are committed."""
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
    def guess(self) -> tuple[int, ...]:
        """What may come next, to be judged where nobody drafts: nothing, where a row more takes as long as a token."""
        return ()

    def check(self, block: DraftBlock, catch_up: Seq[int]) -> None:
        """Raise BaseMismatch unless the block extends what is committed and `catch_up`; LimitExceeded at the end."""
        if block.base != self.base + len(catch_up):
            raise BaseMismatch(block.base - len(catch_up), self.base)
        if self._finish or block.base >= self._stopping.max_new_tokens:
            raise LimitExceeded(f"This generation has ended, at {self.base} tokens.")

    def commit(self, done: Judged, cost: Cost) -> Verdict:
        """The verdict, made final. Only now, so that a failed forward leaves nothing half done.

        Raises BaseMismatch, and changes nothing, when something else was committed meanwhile.
        """
        self.check(done.block, done.catch_up)
        verdict = done.verdict(cost)
        self._tokens.extend((*done.catch_up, *verdict.commits(done.block)))
        self._finish = verdict.finish
        return verdict


class TargetSession(TargetText):
    """The target's side of one generation on an engine in this process, and the sequence that follows it.

    It owns its sequence from `adopt` to `release`, for which the prompt is fed by `prefill` in parts. Raises
    PromptError for a prompt that does not fit, and what `TargetText` raises.
    """

    def __init__(
        self, engine: Engine, prompt: Prompt, params: DecodingParams, *, top: int = 0, committed: Seq[int] = ()
    ) -> None:
        room = engine.room(prompt.token_ids, prompt.media)
        super().__init__(prompt, params, engine.vocab, room, top=top, committed=committed)
        self._engine = engine
        self._sequence: Sequence | None = None

    @property
    def is_seated(self) -> bool:
        """Whether it owns a sequence."""
        return self._sequence is not None

    @property
    def needs_prefill(self) -> bool:
        """Whether a part of the prompt is not in the KV cache yet; not so where there is no sequence to fill."""
        return self._sequence is not None and self._sequence.length < len(self._prompt.token_ids) - 1

    @property
    def num_in_cache(self) -> int:
        """How many tokens its KV cache holds."""
        return self._sequence.length if self._sequence else 0

    def adopt(self, sequence: Sequence) -> None:
        """Take a sequence for its own: an empty one, or one of a session with the same prompt.

        What its KV cache holds is compared with what is true before the first feed.
        """
        if self._sequence is not None:
            raise EngineError("This session has a sequence already.")
        self._sequence = sequence

    def release(self) -> Sequence:
        """Give the sequence away, to be closed or adopted."""
        sequence, self._sequence = self._own(), None
        return sequence

    def _own(self) -> Sequence:
        if self._sequence is None:
            raise EngineError("This session has no sequence.")
        return self._sequence

    def prefill(self) -> Cost:
        """Feed the next part of the prompt; returns what that took."""
        self._engine.prefill(self._own(), self._prompt.token_ids)
        return self.take_prefill_cost()

    def take_prefill_cost(self) -> Cost:
        """What the prompt has cost since this was last asked, or fed."""
        return self._sequence.take_prefill_cost() if self._sequence else Cost()

    def begin(self, block: DraftBlock, catch_up: Seq[int]) -> SequenceVerification:
        """A verification of a block that passed `check`. Changes nothing that is committed."""
        seen, prompt_len, sequence = self._tokens.view, len(self._prompt.token_ids), self._own()
        chooser, stopping = self._chooser, self._stopping
        return SequenceVerification(seen, prompt_len, catch_up, block, sequence, chooser, stopping, self._top)

    def close(self, *, failed: bool = False) -> None:
        """Free the sequence; one that `failed` may be half done, so that nothing of it is reused."""
        sequence, self._sequence = self._sequence, None  # at once: another thread may be closing it too
        if sequence is not None:
            sequence.discard() if failed else sequence.close()
