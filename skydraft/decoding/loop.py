"""The loop. draft → gate → (skip | verify) → commit → stop? → yield, the same for every mode."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from skydraft.choosing.thinking import ThinkingAlong
from skydraft.decoding.context import Context
from skydraft.decoding.drafting import Drafter
from skydraft.decoding.race.ahead import Ahead
from skydraft.decoding.race.copying import Copies
from skydraft.decoding.turns import Turns
from skydraft.decoding.verification import Verifier
from skydraft.engines.base import Seats
from skydraft.engines.vocab import Vocab
from skydraft.errors import CloudError, EngineError
from skydraft.gating.gates import NO_PLACE, Gate, Reason, is_looping
from skydraft.types import WRITE_ALL, Cost, DraftBlock, LinkCost, Origin, Outcome, Round, StepRecord, Verdict

_AHEAD = 64  # tokens that a round may add to a sequence


@dataclass(eq=False)
class SpeculativeLoop:
    """One generation: a context that grows by verdicts and skips until it is finished.

    Without a drafter every block is empty and the target writes alone. Without a verifier the gate must skip every
    block. With `falls_back`, a block whose verifier is lost is committed as drafted, with the origin edge-fallback.
    With `breaks_loops` an unchecked draft model leaves a cycle. `copies` drafts without a model if the text repeats
    itself. With `ahead` the target writes, and gets drafts meanwhile.
    """

    context: Context
    drafter: Drafter | None
    gate: Gate
    verifier: Verifier | None
    turns: Turns
    vocab: Vocab
    falls_back: bool = False
    breaks_loops: bool = False
    thinking: ThinkingAlong | None = None
    copies: Copies | None = None
    ahead: Ahead | None = None
    seats: Seats = field(default_factory=lambda: Seats(()))
    _num_rounds: int = field(default=0, init=False)
    _started: float = field(default=0.0, init=False)  # the first round
    is_cancelled: bool = field(default=False, init=False)
    is_closed: bool = field(default=False, init=False)
    _is_alone: bool = field(default=False, init=False)  # since the target was lost

    def rounds(self) -> Iterator[Round]:
        """Yield committed rounds until the context is finished; another call continues with the next one. If the models
        have no room, wait in line, at first and when the text gets long. Raises EngineBusy."""
        room = 0.0
        while self.context.finish is None and not self.is_cancelled:
            if self.is_closed:
                raise EngineError("This generation is closed.")
            if (needed := self.context.length + _AHEAD) > room and not (room := self.seats.take(needed)):
                return
            began = time.perf_counter()
            self._started = self._started or began
            block = self._draft()
            reason = self._reason(block)
            yield self._verify(block, reason, began) if reason else self._commit(block, None, "skipped", "", began)

    def _reason(self, block: DraftBlock) -> Reason:
        generated, place = self.context.generated, NO_PLACE
        if self.thinking:
            place = self.thinking.at(np.append(generated, np.array(block.token_ids, np.int32)))
        return self.gate.reason(generated, self.context.num_seen, block, self.vocab, place)

    def _draft(self) -> DraftBlock:
        """Return a drafted block. While the target writes it is empty, with the drafter's agreement in `read`."""
        drafter, empty = self.drafter, DraftBlock(self.context.base, ())
        if self.ahead and not self.turns.longest():
            empty = self.ahead.go(self.context)
            self.turns.read(empty.read)
        if self.copies and self.verifier and not self._is_alone:
            token_ids = self.copies.draft(self.context.token_ids)
            if token_ids and self.verifier.stop():
                return replace(empty, token_ids=token_ids, is_copied=True)
        if drafter is None or not (room := drafter.room(self.context.length)):
            return empty
        if self.turns.reads and not self.ahead:
            empty = drafter.read(self.context.token_ids)
            self.turns.read(empty.read)
        k = min(self.turns.longest(), room)
        if not k or (self.verifier is not None and not self.verifier.stop()):  # commit the target's tokens first
            return empty
        block = drafter.draft(
            self.context.token_ids, k, begun=self.ahead.pause(self.context.base) if self.ahead else (),
            breaks_loops=self.breaks_loops and (self._is_alone or not self.verifier),
        )  # fmt: skip
        return replace(block, cost=empty.cost + block.cost, read=empty.read, num_unread=empty.num_unread)

    def _num_to_write(self) -> int:
        """Return how many tokens the target may write after its next verdict: all, if the draft model cannot go on."""
        if self.drafter is None or not self.drafter.room(self.context.length):
            return WRITE_ALL
        return self.turns.to_write()

    def _verify(self, block: DraftBlock, reason: Reason, began: float) -> Round:
        assert self.verifier is not None  # without one the gate never escalates
        try:
            verdict = self.verifier.verify(block, self.context.catch_up, self._num_to_write())
        except CloudError as error:
            if self.is_cancelled or not (error.is_outage and self.falls_back):
                raise
            return self._commit(self._block_without(block, error), None, "fallback", reason, began)
        if verdict.draft_ids and self.ahead:
            judged = self.ahead.judged(block.base, verdict.draft_ids)
            block = replace(judged, cost=block.cost, read=block.read, num_unread=block.num_unread)
        outcome: Outcome = "verified" if self.verifier.called else "written"
        return self._commit(block, verdict, outcome, reason, began)

    def _block_without(self, block: DraftBlock, error: CloudError) -> DraftBlock:
        """Return the block to commit without a verdict. If it is empty, copied or in a cycle, draft one now."""
        self._is_alone = True
        if not block.token_ids or block.is_copied or (self.breaks_loops and self._loops(block)):
            self.turns.hand_back()
            drafted = self._draft()
            block = replace(drafted, cost=block.cost + drafted.cost, read=block.read)
        if not block.token_ids:
            raise error
        return block

    def _loops(self, block: DraftBlock) -> bool:
        text = np.append(self.context.generated, np.array(block.token_ids, np.int32))
        return any(is_looping(text[:end], self.vocab) for end in range(block.base + 1, len(text) + 1))

    def _commit(
        self, block: DraftBlock, verdict: Verdict | None, outcome: Outcome, reason: Reason, began: float
    ) -> Round:
        """Commit the verdict's tokens, or the block as drafted, and close the round. Drafting ends a block at the first
        stop, so only its last token can finish the text."""
        num_thinking = self._count_thinking()
        if verdict:
            token_ids, origins = self.context.commit_verdict(block, verdict), _origins(block, verdict)
            self._is_alone = False
        else:
            token_ids = self.context.commit_skip(block, block.finish)
            origins = (("edge-fallback" if reason else "skipped" if self.verifier else "edge"),) * len(token_ids)
        audit, num_accepted = (verdict.audit, verdict.num_accepted) if verdict else ((), 0)
        now = time.perf_counter()
        record = StepRecord(
            round=self._num_rounds, base=block.base, outcome=outcome, reason=reason,
            num_draft=len(block.token_ids), num_accepted=num_accepted, num_committed=len(token_ids),
            wall_ms=(now - began) * 1e3, ended_ms=(now - self._started) * 1e3,
            link=self.verifier.take_cost() if self.verifier else LinkCost(),
            num_audited=len(audit), num_agreed=sum(audit), draft=block.cost, target=verdict.cost if verdict else Cost(),
            num_forced=sum(block.forced[: num_accepted if verdict else None]),
            num_reasoning=self._count_thinking() - num_thinking, num_broken=block.num_broken,
            num_copied=len(block.token_ids) if block.is_copied else 0,
        )  # fmt: skip
        self._num_rounds += 1
        done = Round(record, block, token_ids, origins, audit)
        self.turns.observe(done)
        if self.copies and record.num_copied:
            self.copies.observe(num_accepted, record.num_copied)
        self.gate.observe(done)
        return done

    def _count_thinking(self) -> int:
        return self.thinking.at(self.context.generated).num_thinking if self.thinking else 0

    def cancel(self) -> None:
        """Begin no further round, and end a long prefill or wait. Any thread may call this."""
        self.is_cancelled = True
        self.seats.end_wait()
        if self.ahead:
            self.ahead.close()
        for side in (self.drafter, self.verifier):
            if side is not None:
                side.cancel()

    def close(self) -> None:
        self.is_closed = True
        if self.ahead:
            self.ahead.close()
        try:  # no ExitStack: an interrupt in it would leave a reference cycle that keeps the sequences
            try:
                if self.drafter is not None:
                    self.drafter.close()
            finally:
                if self.verifier is not None:
                    self.verifier.close()
        finally:
            self.seats.give_back()


def _origins(block: DraftBlock, verdict: Verdict) -> tuple[Origin, ...]:
    accepted: list[Origin] = ["accepted"] * verdict.num_accepted
    if verdict.token_id is None:
        return tuple(accepted)
    if not block.token_ids:
        return ("cloud",)
    return (*accepted, "bonus" if verdict.num_accepted == len(block.token_ids) else "recovered")
