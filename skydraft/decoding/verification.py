"""Verification: the target says which drafted tokens it would have emitted itself, and what comes next.

Verifying is comparing. Nothing but the prefix decides a verdict, so the same request can be answered twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from skydraft.decoding.choose import Chooser
from skydraft.decoding.context import Context
from skydraft.decoding.drafting import roll_back
from skydraft.decoding.stopping import Stopping
from skydraft.engines.base import Engine, Rows, Sequence
from skydraft.engines.vocab import TokenIds
from skydraft.errors import BaseMismatch, LimitExceeded
from skydraft.types import DraftBlock, FinishReason, Media, Verdict, VerifyCost


class Verifier(Protocol):
    """The one seam between the edge and whatever judges its blocks."""

    def verify(self, block: DraftBlock, catch_up: Seq[int]) -> Verdict:
        """Judge `block`, which extends what was judged before by `catch_up`. Commits the verdict on its side."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of speech features that have left this device so far."""

    def close(self) -> None:
        """Free what the verifier holds."""


class Verification:
    """One block on its way through the target, a few rows at a time.

    Rows are asked for with `next_feed` and given back with `absorb`, so that a caller may put the rows of several
    verifications into one forward. It ends at the first difference: later rows are never computed.
    """

    def __init__(
        self,
        seen: TokenIds,
        catch_up: Seq[int],
        block: DraftBlock,
        sequence: Sequence,
        chooser: Chooser,
        stopping: Stopping,
        top: int,
    ) -> None:
        committed = np.append(seen, np.array(catch_up, np.int32))
        roll_back(sequence, seen)  # not further: every catch-up token is audited, after a failed forward too
        self.block = block
        self.catch_up = tuple(catch_up)
        self.sequence = sequence
        # What lies past the length limit can never be accepted, and may not even fit into the context.
        draft = np.array(block.token_ids, np.int32)[: stopping.max_len - block.base]
        self._extended: TokenIds = np.append(committed, draft)
        self._seen_len = len(seen)
        self._fed_len = sequence.length
        self._chooser = chooser
        self._stopping = stopping
        self._top = top
        self._num_accepted = 0
        self._token_id: int | None = None
        self._finish: FinishReason | None = None
        self._audit: list[bool] = []
        self._audit_ranks: list[int] = []
        self._done = False

    def next_feed(self, max_rows: int) -> TokenIds | None:
        """The next tokens to feed, at most `max_rows`; None when the verdict is known."""
        return None if self._done else self._extended[self._fed_len : self._fed_len + max_rows]

    def absorb(self, rows: Rows) -> None:
        """Take the logits [len(feed), vocab] of the tokens that `next_feed` gave."""
        for row in rows:
            self._fed_len += 1
            if not self._done and self._fed_len >= self._seen_len:
                self._judge(row, self._fed_len)

    def _judge(self, row: Rows, position: int) -> None:
        prefix = self._extended[:position]
        choice = self._chooser.choose(row, prefix)
        drafted = int(self._extended[position]) if position < len(self._extended) else None
        if drafted is not None and position < self.block.base:
            self._audit.append(choice == drafted)
            if choice != drafted:
                self._audit_ranks.append(self._chooser.rank(row, prefix, drafted))
        elif drafted is not None and (choice == drafted or self._in_top(row, prefix, drafted)):
            self._num_accepted += 1
            self._finish = self._stopping.finish(self._extended[: position + 1])
            self._done = self._finish is not None
        else:
            self._token_id = choice
            self._finish = self._stopping.finish(np.append(prefix, np.int32(choice)))
            self._done = True

    def _in_top(self, row: Rows, prefix: TokenIds, drafted: int) -> bool:
        return self._top > 0 and self._chooser.rank(row, prefix, drafted) < self._top

    def verdict(self, cost: VerifyCost) -> Verdict:
        """The verdict, once `next_feed` has given None."""
        audit, ranks = tuple(self._audit), tuple(self._audit_ranks)
        return Verdict(self.block.base, self._num_accepted, self._token_id, self._finish, audit, ranks, cost)


class TargetSession:
    """The target's side of one generation: what it has committed, and the sequence that follows it.

    `committed` are generated tokens that are final already. `top` > 0 accepts drafts within the target's `top` best:
    lossy. The sequence is given from outside, holding the prompt, because opening one takes long.
    """

    def __init__(
        self,
        prompt: Seq[int],
        chooser: Chooser,
        stopping: Stopping,
        *,
        top: int = 0,
        committed: Seq[int] = (),
        media: Media | None = None,
    ) -> None:
        self._chooser = chooser
        self._stopping = stopping
        self._top = top
        self._context = Context(prompt, media)
        self._context.commit_skip(DraftBlock(len(prompt), tuple(committed)), None)
        self.sequence: Sequence | None = None

    @property
    def token_ids(self) -> TokenIds:
        """Read-only view of prompt and committed tokens."""
        return self._context.token_ids

    @property
    def prompt_ids(self) -> TokenIds:
        """Read-only view of the prompt."""
        return self._context.token_ids[: self._context.prompt_len]

    @property
    def media(self) -> Media | None:
        """What the audio tokens of the prompt stand for."""
        return self._context.media

    @property
    def finish(self) -> FinishReason | None:
        """Why the generation ended, or None."""
        return self._context.finish

    def check(self, block: DraftBlock, catch_up: Seq[int]) -> None:
        """Raise BaseMismatch unless the block extends what is committed and `catch_up`; LimitExceeded at the end."""
        if block.base != len(self._context) + len(catch_up):
            raise BaseMismatch(block.base - len(catch_up), len(self._context))
        if self.finish or block.base >= self._stopping.max_len:
            raise LimitExceeded(f"This generation has ended, at {len(self._context)} tokens.")

    def begin(self, block: DraftBlock, catch_up: Seq[int]) -> Verification:
        """A verification of a block that passed `check`. Changes nothing that is committed."""
        assert self.sequence is not None  # the caller opens it
        seen = self._context.token_ids
        return Verification(seen, catch_up, block, self.sequence, self._chooser, self._stopping, self._top)

    def commit(self, done: Verification, verdict: Verdict) -> None:
        """Make a verdict final. Only now, so that a failed forward leaves nothing half done."""
        self._context.commit_skip(DraftBlock(len(self._context), done.catch_up), None)
        self._context.commit_verdict(done.block, verdict)

    def close(self) -> None:
        """Free the sequence."""
        if self.sequence is not None:
            self.sequence.close()
            self.sequence = None


class TargetVerifier:
    """The target in this process; its sequence is opened at the first verification.

    `max_rows` bounds the rows of one forward: `engine.invariant_rows` makes every verdict bit-exact, more is faster
    on hardware where rows are nearly free.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Seq[int],
        chooser: Chooser,
        stopping: Stopping,
        *,
        max_rows: int | None = None,
        top: int = 0,
        media: Media | None = None,
    ) -> None:
        self._engine = engine
        self.max_rows = max_rows or engine.invariant_rows
        self._session = TargetSession(prompt, chooser, stopping, top=top, media=media)

    def verify(self, block: DraftBlock, catch_up: Seq[int]) -> Verdict:
        """Raises BaseMismatch, and changes nothing, when the block extends another length."""
        self._session.check(block, catch_up)
        began, encode_ms = time.perf_counter(), 0.0
        if self._session.sequence is None:
            self._session.sequence = self._engine.open(self._session.prompt_ids, self._session.media)
            encode_ms = self._session.sequence.prefill_cost.encode_ms
        prefill_s = forward_s = time.perf_counter() - began
        job = self._session.begin(block, catch_up)
        num_passes = num_rows = 0
        while (token_ids := job.next_feed(self.max_rows)) is not None:
            began = time.perf_counter()
            rows = job.sequence.extend(token_ids)
            forward_s += time.perf_counter() - began
            job.absorb(rows)
            num_passes, num_rows = num_passes + 1, num_rows + len(token_ids)
        verdict = job.verdict(VerifyCost(num_passes, num_rows, forward_s * 1e3, prefill_s * 1e3, encode_ms=encode_ms))
        self._session.commit(job, verdict)
        return verdict

    @property
    def shared_bytes(self) -> int:
        """None: the target is here."""
        return 0

    def close(self) -> None:
        """Free the sequence; the engine stays open."""
        self._session.close()
