import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from skydraft.decoding.accounts.prices import Prices
from skydraft.types import Cost, LinkCost, StepRecord


@dataclass(frozen=True, slots=True)
class CachedTokens:
    edge: int
    cloud: int


@dataclass(frozen=True, slots=True)
class AuditFigures:
    """`agreement` is the share of tokens that the target would have written too: the mean over the newest audited
    answers with this adapter and gate. `asked` is the requested agreement, if any."""

    adapter: str | None
    gate: str
    asked: float | None
    agreement: float
    num_answers: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of one generation, from its records; None if the divisor is 0.

    acceptance_rate: accepted / drafted, over judged blocks. mean_acceptance_length: tokens committed per judged round,
    bonus or recovered token included. cloud_calls_per_token: calls to the target / tokens; a stream is one call.
    target_written_per_token: tokens that the target chose itself / tokens. audited_agreement: share of the skipped,
    later audited tokens that the target would have written too. num_fallback_tokens: committed without a verdict
    because the cloud was lost. num_forced_tokens: committed drafts that a grammar forced. num_reasoning_tokens: tokens
    of thinking, tags included. num_broken_loops: tokens drawn to end a cycle. num_copied_tokens: drafts copied without
    a model; num_right_copies: the accepted ones. target passes and rows: after its prefill. ttft_ms: start to first
    committed round. itl_ms: gap between rounds, shared evenly by the tokens of a round. draft_ms, target_ms: time in
    forwards; prefill_ms: the prompt's part of it. overhead_ms: the rest, without queue and wire. shared_bytes: the part
    of bytes_up for features of speech. cached_tokens: prompt tokens found in the KV cache. exact: whether the text is
    the target's own, to the bit: all of it was checked, and other work in the target's forwards changed no token. Over
    all requests to a server: tokens_in, tokens that it read; tokens_hit, the cached part; tokens_out, tokens written.
    Without skydraft there also num_requests, and cost, if prices are known. adapter: the draft model's adapter for this
    text, by name. audits: figures of answers drafted and checked like this one.
    """

    num_tokens: int
    num_rounds: int
    num_escalated: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    cloud_calls_per_token: float | None
    target_written_per_token: float | None
    target_passes_per_token: float | None
    target_rows_per_token: float | None
    ttft_ms: float | None
    itl_ms_p50: float | None
    itl_ms_p95: float | None
    tokens_per_s: float | None
    draft_ms: float
    target_ms: float
    overhead_ms: float
    bytes_up: int
    bytes_down: int
    shared_bytes: int
    audited_agreement: float | None
    num_fallback_tokens: int
    num_forced_tokens: int
    num_reasoning_tokens: int
    num_broken_loops: int
    num_copied_tokens: int
    num_right_copies: int
    draft_prefill_ms: float
    target_prefill_ms: float
    cached_tokens: CachedTokens
    exact: bool
    num_requests: int
    tokens_in: int
    tokens_hit: int
    tokens_out: int
    cost: float | None
    adapter: str | None
    audits: AuditFigures | None = None


def stats_of(
    records: Seq[StepRecord], *, is_exact: bool = True, prices: Prices | None = None, adapter: str | None = None
) -> Stats:
    escalated = [record for record in records if record.outcome == "verified"]
    judged = [r for r in records if r.outcome == "verified" or (r.outcome == "written" and r.num_draft)]
    num_draft, num_accepted = (sum(getattr(r, name) for r in judged) for name in ("num_draft", "num_accepted"))
    num_tokens, gaps = sum(record.num_committed for record in records), token_gaps(records)
    draft, target = sum((r.draft for r in records), Cost()), sum((r.target for r in records), Cost())
    link = sum((r.link for r in records), LinkCost())

    def total(name: str) -> Any:
        return sum(getattr(record, name) for record in records)

    return Stats(
        num_tokens=num_tokens, num_rounds=len(records), num_escalated=len(escalated),
        num_draft_tokens=num_draft, num_accepted_tokens=num_accepted, acceptance_rate=_ratio(num_accepted, num_draft),
        mean_acceptance_length=_ratio(sum(record.num_committed for record in judged), len(judged)),
        cloud_calls_per_token=_ratio(len(escalated), num_tokens),
        target_written_per_token=_ratio(total("num_written"), num_tokens),
        target_passes_per_token=_ratio(target.num_passes, num_tokens),
        target_rows_per_token=_ratio(target.num_rows, num_tokens),
        ttft_ms=round(records[0].ended_ms, 3) if records else None,
        itl_ms_p50=percentile(gaps, 50), itl_ms_p95=percentile(gaps, 95),
        tokens_per_s=_ratio(num_tokens * 1e3, records[-1].ended_ms) if records else None,
        draft_ms=round(draft.forward_ms, 3), target_ms=round(target.forward_ms, 3),
        overhead_ms=round(total("overhead_ms"), 3),
        bytes_up=link.bytes_up, bytes_down=link.bytes_down, shared_bytes=link.shared_bytes,
        num_fallback_tokens=sum(record.num_committed for record in records if record.outcome == "fallback"),
        num_forced_tokens=total("num_forced"), num_reasoning_tokens=total("num_reasoning"),
        num_broken_loops=total("num_broken"), audited_agreement=_ratio(total("num_agreed"), total("num_audited")),
        num_copied_tokens=sum(record.num_copied for record in judged),
        num_right_copies=sum(min(record.num_accepted, record.num_copied) for record in judged),
        draft_prefill_ms=round(draft.prefill_ms, 3), target_prefill_ms=round(target.prefill_ms, 3),
        cached_tokens=CachedTokens(draft.num_cached, target.num_cached),
        exact=is_exact and all(record.outcome in ("verified", "written") for record in records),
        num_requests=link.num_requests, tokens_in=link.tokens_in, tokens_hit=link.tokens_hit,
        tokens_out=link.tokens_out, cost=prices.of(link) if prices else None, adapter=adapter,
    )  # fmt: skip


def percentile(values: Seq[float], percent: int) -> float | None:
    """Return a percentile by linear interpolation; None without values."""
    return round(float(np.percentile(values, percent)), 3) if values else None


def token_gaps(records: Seq[StepRecord]) -> list[float]:
    gaps: list[float] = []
    for before, record in itertools.pairwise(records):
        gaps += [(record.ended_ms - before.ended_ms) / record.num_committed] * record.num_committed
    return gaps


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
