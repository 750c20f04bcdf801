"""The loop. draft → gate → (skip | verify) → commit → stop? → yield, the same for every mode."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from skydraft.decoding.adaptive import KPolicy
from skydraft.decoding.context import Context
from skydraft.decoding.drafting import Drafter
from skydraft.decoding.gates import GatePolicy, Reason
from skydraft.decoding.stopping import Stopping
from skydraft.decoding.verification import Verifier
from skydraft.engines.vocab import Vocab
from skydraft.errors import CloudError
from skydraft.types import DraftBlock, Origin, Round, StepRecord, Verdict, VerifyCost


class SpeculativeLoop:
    """One generation: a context that grows by verdicts and skips until it is finished.

    Without a drafter every block is empty and the target goes alone; without a verifier the gate must be `never`
    and every block is committed as the draft model wrote it. Where `falls_back`, a block whose verifier is lost is
    committed as it is, with the origin edge-fallback. Nothing here knows which mode it is in.
    """

    def __init__(
        self,
        context: Context,
        drafter: Drafter | None,
        gate: GatePolicy,
        verifier: Verifier | None,
        k_policy: KPolicy,
        stopping: Stopping,
        vocab: Vocab,
        *,
        falls_back: bool = False,
    ) -> None:
        if verifier is None and gate.kind != "never":
            raise ValueError(f"the gate {gate.kind} needs a verifier")
        self._context = context
        self._drafter = drafter
        self._gate = gate
        self._verifier = verifier
        self._k_policy = k_policy
        self._stopping = stopping
        self._vocab = vocab
        self._falls_back = falls_back
        self._num_rounds = 0
        self._started = time.perf_counter()

    def rounds(self) -> Iterator[Round]:
        """Decode until the context is finished; yields each round as soon as it is committed."""
        self._started = time.perf_counter()
        while self._context.finish is None:
            began = time.perf_counter()
            block = self._draft()
            reason = self._gate.reason(self._context, block, self._vocab)
            yield self._verify(block, reason, began) if reason else self._skip(block, began)

    def _draft(self) -> DraftBlock:
        """A block of the drafter; an empty one, which the target continues alone, where it has nothing to add."""
        k = min(self._k_policy.next_k(), self._drafter.room(self._context)) if self._drafter else 0
        if self._drafter is None or k == 0:
            return DraftBlock(len(self._context), ())
        return self._drafter.draft(self._context, k)

    def _skip(self, block: DraftBlock, began: float) -> Round:
        """Commit the block unverified."""
        return self._commit_draft(block, "edge" if self._verifier is None else "skipped", "", began)

    def _verify(self, block: DraftBlock, reason: Reason, began: float) -> Round:
        assert self._verifier is not None  # refused in the constructor
        try:
            verdict = self._verifier.verify(block, self._context.catch_up)
        except CloudError:
            if not (self._falls_back and block.token_ids):
                raise
            return self._commit_draft(block, "edge-fallback", reason, began)
        token_ids = self._context.commit_verdict(block, verdict)
        return self._close_round(block, token_ids, _origins(block, verdict), verdict, reason, began)

    def _commit_draft(self, block: DraftBlock, origin: Origin, reason: Reason, began: float) -> Round:
        """Commit the block as it is. Drafting ended it at the first stop, so only its last token can finish."""
        finish = self._stopping.finish(np.append(self._context.token_ids, np.array(block.token_ids, np.int32)))
        token_ids = self._context.commit_skip(block, finish)
        return self._close_round(block, token_ids, (origin,) * len(token_ids), None, reason, began)

    def _close_round(
        self,
        block: DraftBlock,
        token_ids: tuple[int, ...],
        origins: tuple[Origin, ...],
        verdict: Verdict | None,
        reason: Reason,
        began: float,
    ) -> Round:
        cost, audit = (verdict.cost, verdict.audit) if verdict else (VerifyCost(), ())
        record = StepRecord(
            round=self._num_rounds,
            base=block.base,
            num_draft=len(block.token_ids),
            num_accepted=verdict.num_accepted if verdict else 0,
            num_committed=len(token_ids),
            outcome="verified" if verdict else "fallback" if reason else "skipped",
            reason=reason,
            draft_ms=block.draft_ms,
            wall_ms=(took := time.perf_counter() - began) * 1e3,
            ended_ms=(began + took - self._started) * 1e3,
            cost=cost,
            num_audited=len(audit),
            num_agreed=sum(audit),
            draft_prefill_ms=block.prefill_ms,
            draft_encode_ms=block.encode_ms,
        )
        self._num_rounds += 1
        done = Round(record, block, token_ids, origins, audit, verdict.audit_ranks if verdict else ())
        self._k_policy.observe(record)
        self._gate.observe(done)
        return done

    @property
    def shared_bytes(self) -> int:
        """Bytes of speech features that have left this device so far."""
        return self._verifier.shared_bytes if self._verifier else 0

    def close(self) -> None:
        """Free both sides' sequences; the engines stay open."""
        for side in (self._drafter, self._verifier):
            if side is not None:
                side.close()


def _origins(block: DraftBlock, verdict: Verdict) -> tuple[Origin, ...]:
    accepted: list[Origin] = ["accepted"] * verdict.num_accepted
    if verdict.token_id is None:
        return tuple(accepted)
    if not block.token_ids:
        return ("cloud",)
    return (*accepted, "bonus" if verdict.num_accepted == len(block.token_ids) else "recovered")
