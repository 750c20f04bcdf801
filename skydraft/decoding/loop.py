"""The loop. draft → gate → (skip | verify) → commit → stop? → yield, the same for every mode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

from skydraft.decoding.context import Context
from skydraft.decoding.drafting import Drafter
from skydraft.decoding.turns import Turns
from skydraft.decoding.verification import Verifier
from skydraft.engines.vocab import Vocab
from skydraft.errors import CloudError
from skydraft.gating.gates import Gate, Reason
from skydraft.types import WRITE_ALL, Cost, DraftBlock, LinkCost, Origin, Outcome, Round, StepRecord, Verdict


class SpeculativeLoop:
    """One generation: a context that grows by verdicts and skips until it is finished.

    Without a drafter every block is empty and the target writes alone. Without a verifier the gate must skip every
    block, and each is committed as drafted. With `falls_back`, a block whose verifier is lost is committed as drafted,
    with the origin edge-fallback. `turns` says how long blocks are, and when the target writes on. The loop is the same
    for every mode.
    """

    def __init__(
        self,
        context: Context,
        drafter: Drafter | None,
        gate: Gate,
        verifier: Verifier | None,
        turns: Turns,
        vocab: Vocab,
        *,
        falls_back: bool = False,
    ) -> None:
        self.context = context
        self._drafter = drafter
        self._gate = gate
        self.verifier = verifier
        self._turns = turns
        self.vocab = vocab
        self._falls_back = falls_back
        self._num_rounds = 0
        self._is_cancelled = False
        self._started = time.perf_counter()

    def rounds(self) -> Iterator[Round]:
        """Decode until the context is finished; yields each round as soon as it is committed.

        Another call continues with the next round; times count from the first call.
        """
        if not self._num_rounds:
            self._started = time.perf_counter()
        while self.context.finish is None and not self._is_cancelled:
            began = time.perf_counter()
            block = self._draft()
            reason = self._gate.reason(self.context.generated, self.context.num_seen, block, self.vocab)
            yield self._verify(block, reason, began) if reason else self._skip(block, began)

    def _draft(self) -> DraftBlock:
        """A block of the drafter; an empty block in the target's turn, which the drafter may read along."""
        drafter, nothing = self._drafter, DraftBlock(self.context.base, ())
        if drafter is None or not (room := drafter.room(self.context)):
            return nothing
        if self._turns.reads:
            nothing = drafter.read(self.context)
            self._turns.read(nothing.read)
        k = min(self._turns.longest(), room)
        if not k or not self._has_stopped():
            return nothing
        block = drafter.draft(self.context, k)
        return replace(block, cost=nothing.cost + block.cost, read=nothing.read) if nothing.read else block

    def _has_stopped(self) -> bool:
        """Whether the target writes no more and all that it wrote is committed; it is stopped first."""
        return self.verifier is None or self.verifier.stop()

    def _num_to_write(self) -> int:
        """How many tokens the target may write after its next verdict; all, if the draft model cannot go on."""
        if self._drafter is None or not self._drafter.room(self.context):
            return WRITE_ALL
        return self._turns.to_write()

    def _skip(self, block: DraftBlock, began: float) -> Round:
        """Commit the block unverified."""
        return self._commit_draft(block, "skipped" if self.verifier else "edge", "", began)

    def _verify(self, block: DraftBlock, reason: Reason, began: float) -> Round:
        if self.verifier is None:
            raise ValueError(f"this gate escalates ({reason}), and there is no verifier")
        try:
            verdict = self.verifier.verify(block, self.context.catch_up, self._num_to_write())
        except CloudError as error:
            if not (error.is_outage and self._falls_back):
                raise
            return self._commit_draft(self._block_without(block, error), "edge-fallback", reason, began)
        token_ids = self.context.commit_verdict(block, verdict)
        outcome: Outcome = "verified" if self.verifier.asked else "written"
        return self._close_round(block, token_ids, _origins(block, verdict), outcome, verdict, reason, began)

    def _block_without(self, block: DraftBlock, error: CloudError) -> DraftBlock:
        """The block to commit after the loss of the target: if the target was to write, the draft model writes."""
        if not block.token_ids:
            self._turns.hand_back()
            drafted = self._draft()
            block = replace(drafted, cost=block.cost + drafted.cost, read=block.read)
        if not block.token_ids:
            raise error
        return block

    def _commit_draft(self, block: DraftBlock, origin: Origin, reason: Reason, began: float) -> Round:
        """Commit the block as drafted. Drafting ends a block at the first stop, so only its last token can finish."""
        token_ids = self.context.commit_skip(block, block.finish)
        outcome: Outcome = "fallback" if reason else "skipped"
        return self._close_round(block, token_ids, (origin,) * len(token_ids), outcome, None, reason, began)

    def _close_round(
        self,
        block: DraftBlock,
        token_ids: tuple[int, ...],
        origins: tuple[Origin, ...],
        outcome: Outcome,
        verdict: Verdict | None,
        reason: Reason,
        began: float,
    ) -> Round:
        audit = verdict.audit if verdict else ()
        now = time.perf_counter()
        record = StepRecord(
            round=self._num_rounds,
            base=block.base,
            num_draft=len(block.token_ids),
            num_accepted=verdict.num_accepted if verdict else 0,
            num_committed=len(token_ids),
            outcome=outcome,
            reason=reason,
            wall_ms=(now - began) * 1e3,
            ended_ms=(now - self._started) * 1e3,
            draft=block.cost,
            target=verdict.cost if verdict else Cost(),
            link=self.verifier.spent() if self.verifier else LinkCost(),
            num_audited=len(audit),
            num_agreed=sum(audit),
            num_forced=sum(block.forced[: verdict.num_accepted if verdict else len(token_ids)]),
        )
        self._num_rounds += 1
        done = Round(record, block, token_ids, origins, audit)
        self._turns.observe(done)
        return done

    @property
    def started(self) -> float:
        """Start of the first round by `time.perf_counter`; before that, the time of creation."""
        return self._started

    def cancel(self) -> None:
        """Begin no other round, and end a long prefill or wait. Any thread may call this."""
        self._is_cancelled = True
        for side in (self._drafter, self.verifier):
            if side is not None:
                side.cancel()

    def close(self) -> None:
        """Free both sides' sequences; the engines stay open."""
        with ExitStack() as sides:  # each side, even if the other one raises
            for side in (self.verifier, self._drafter):
                if side is not None:
                    sides.callback(side.close)


def _origins(block: DraftBlock, verdict: Verdict) -> tuple[Origin, ...]:
    accepted: list[Origin] = ["accepted"] * verdict.num_accepted
    if verdict.token_id is None:
        return tuple(accepted)
    if not block.token_ids:
        return ("cloud",)
    return (*accepted, "bonus" if verdict.num_accepted == len(block.token_ids) else "recovered")
