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
from skydraft.errors import BaseMismatch
from skydraft.types import DraftBlock, FinishReason, Verdict, VerifyCost


class Verifier(Protocol):
    """The one seam between the edge and whatever judges its blocks."""

    def verify(self, block: DraftBlock, catch_up: Seq[int]) -> Verdict:
        """Judge `block`, which extends what was judged before by `catch_up`. Commits the verdict on its side."""

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
        self._extended: TokenIds = np.append(committed, np.array(block.token_ids, np.int32))
        self._seen_len = len(seen)
        self._fed_len = sequence.length
        self._block = block
        self._chooser = chooser
        self._stopping = stopping
        self._top = top
        self._num_accepted = 0
        self._token_id: int | None = None
        self._finish: FinishReason | None = None
        self._audit: list[bool] = []
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
        if position < self._block.base:
            self._audit.append(choice == drafted)
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
        return Verdict(self._block.base, self._num_accepted, self._token_id, self._finish, tuple(self._audit), cost)


class TargetVerifier:
    """The target in this process. Owns its own context and sequence, opened at the first verification.

    `max_rows` bounds the rows of one forward: `engine.invariant_rows` makes every verdict bit-exact, more is faster
    on hardware where rows are nearly free. `top` > 0 accepts drafts within the target's `top` best: lossy.
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
    ) -> None:
        self._engine = engine
        self._chooser = chooser
        self._stopping = stopping
        self.max_rows = max_rows or engine.invariant_rows
        self._top = top
        self._context = Context(prompt)
        self._sequence: Sequence | None = None

    def verify(self, block: DraftBlock, catch_up: Seq[int]) -> Verdict:
        """Raises BaseMismatch, and changes nothing, when the block extends another length."""
        if block.base != len(self._context) + len(catch_up):
            raise BaseMismatch(block.base - len(catch_up), len(self._context))
        began = time.perf_counter()
        if self._sequence is None:
            self._sequence = self._engine.open(self._context.token_ids)
        prefill_s = forward_s = time.perf_counter() - began
        job = Verification(
            self._context.token_ids, catch_up, block, self._sequence, self._chooser, self._stopping, self._top
        )
        num_passes = num_rows = 0
        while (token_ids := job.next_feed(self.max_rows)) is not None:
            began = time.perf_counter()
            rows = self._sequence.extend(token_ids)
            forward_s += time.perf_counter() - began
            job.absorb(rows)
            num_passes, num_rows = num_passes + 1, num_rows + len(token_ids)
        verdict = job.verdict(VerifyCost(num_passes, num_rows, forward_s * 1e3, prefill_s * 1e3))
        # Only now, so that a failed forward leaves nothing half done and the request can be repeated.
        self._context.commit_skip(DraftBlock(len(self._context), tuple(catch_up)), None)
        self._context.commit_verdict(block, verdict)
        return verdict

    def close(self) -> None:
        """Free the sequence; the engine stays open."""
        if self._sequence is not None:
            self._sequence.close()
