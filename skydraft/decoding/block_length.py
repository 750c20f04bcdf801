"""The length of a block, if it is not fixed: the block ends when one more token is not worth its time.

All n drafts of a block stand with the chance S = (1 - risk 1) ... (1 - risk n). Then m more drafts gain S alpha + ... +
S alpha^m tokens, and cost their steps and the time of judging their rows. They are worth it if that time gives fewer
tokens otherwise, by the tokens per millisecond of the rounds so far, or of the target alone. If all tokens have the
same risk, this gives the best fixed k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

from skydraft.decoding.cost_model import CostModel, expected_tokens
from skydraft.gating.calibration import Risk
from skydraft.types import Round, Signals, StepRecord

MAX_AUTO_K = 16
PRIOR_ALPHA, _PRIOR_WEIGHT = 0.75, 8.0  # assumed acceptance at first, and its weight in drafted tokens
_MEMORY = 200.0  # judged tokens after which older ones fade
_MIN_GAIN, _MIN_LEFT = 1.05, 0.97
_SMOOTHING, _ROUND_SMOOTHING = 0.2, 0.05  # of times; of the tokens of a round, which vary a lot
_LEAST_SLOWDOWN = 1e-3  # a server may report any times, even 0 or negative ones
_TRY_COST = 0.03  # share of the time of plain decoding that may be spent on trying drafts again
_FIRST_TRY = 16  # tokens without a draft before such a try, at least


class BlockLength(Protocol):
    """Decides the length of blocks and learns from finished rounds."""

    def longest(self) -> int:
        """The most tokens of the next block; 0 lets the target write alone for a round."""

    def is_enough(self, signals: Seq[Signals]) -> bool:
        """Whether to send a block with these signals rather than to continue it."""

    def observe(self, done: Round) -> None:
        """Learn from a finished round."""


class AutoK:
    """The length that promises the most tokens a second: by `costs` at first, then by the times of rounds.

    With `may_stream` the target writes alone while that is faster. Now and then a block is drafted all the same, if
    that costs little, to notice a changed link or text. The draft model must first read the tokens that were written
    without it, in `read_ms` each, and the first time the prompt, in `prompt_ms`.
    """

    def __init__(
        self, costs: CostModel, risk: Risk, *, may_stream: bool = True, max_k: int = MAX_AUTO_K,
        alpha: float = PRIOR_ALPHA, read_ms: float = 0.0, prompt_ms: float = 0.0,
    ) -> None:  # fmt: skip
        self._costs = costs
        self._risk = risk
        self._may_stream = may_stream
        self._max_k = max(min(max_k, MAX_AUTO_K), 1)
        self._num_judged = _PRIOR_WEIGHT
        self._num_accepted = alpha * _PRIOR_WEIGHT
        k = costs.best_k(alpha, 1, self._max_k)
        self._drafts, self._tokens = float(k), expected_tokens(alpha, k)  # a round, moving averages
        self._is_drafting = False
        self._num_streamed = 0
        self._lost_ms = 0.0  # lost by the last try, without reading
        self._read_ms = read_ms
        self._prompt_ms = prompt_ms

    @property
    def alpha(self) -> float:
        """Acceptance per judged draft, weighted with the assumed one."""
        return self._num_accepted / self._num_judged

    @property
    def _drafted_speed(self) -> float:
        """Tokens per millisecond of the recent rounds."""
        costs = self._costs
        return self._tokens / (self._drafts * costs.draft_ms + costs.wire_ms + self._verify_ms(self._drafts))

    @property
    def _plain_speed(self) -> float:
        return self._costs.tokens_per_s(self.alpha, 0) / 1e3

    def _verify_ms(self, num_drafts: float) -> float:
        """Time of judging a block; a fraction of a draft is interpolated."""
        below = math.floor(num_drafts)
        low, high = (self._costs.verify_ms(self.alpha, k) for k in (below, below + 1))
        return low + (num_drafts - below) * (high - low)

    def longest(self) -> int:
        """The most tokens of the next block; 0 if the target is faster alone, except for a try now and then."""
        # The averages are rough, so rounds that draft continue until drafting seems slower.
        gain = _MIN_LEFT if self._is_drafting else _MIN_GAIN
        if not self._may_stream or self._drafted_speed >= gain * self._plain_speed:
            return self._max_k
        return self._max_k if self._num_streamed >= self._patience() else 0

    def _patience(self) -> float:
        """Tokens without a draft before the next try, so that its loss is a small share of their time."""
        lost_ms = max(self._lost_ms, self._tokens / self._drafted_speed - self._tokens / self._plain_speed)
        spare_ms = _TRY_COST / self._plain_speed - self._read_ms
        return max((lost_ms + self._prompt_ms) / spare_ms, _FIRST_TRY) if spare_ms > 0 else math.inf

    def is_enough(self, signals: Seq[Signals]) -> bool:
        """Whether no number of further drafts is worth its time."""
        costs, alpha, num_drafts = self._costs, self.alpha, len(signals)
        speed = max(self._drafted_speed, self._plain_speed) if self._may_stream else self._drafted_speed
        chance = math.prod(1 - self._risk.of(each) for each in signals)
        gain, so_far_ms = 0.0, costs.verify_ms(alpha, num_drafts)
        for more in range(1, self._max_k - num_drafts + 1):
            chance *= alpha
            gain += chance
            if gain >= speed * (more * costs.draft_ms + costs.verify_ms(alpha, num_drafts + more) - so_far_ms):
                return False
        return True

    def observe(self, done: Round) -> None:
        """Learn from a verified round: its times, and the number of accepted drafts."""
        record = done.record
        if record.num_draft and not self._num_streamed:
            self._prompt_ms = 0.0
        # The first round includes the prefill, so its times tell nothing about steps.
        if record.outcome != "verified" or record.round == 0:
            return
        was_streaming, self._is_drafting = self._num_streamed > 0, record.num_draft > 0
        if record.num_draft:
            self._learn(done, record)
        else:
            self._num_streamed += record.num_committed
        self._follow_costs(record, 0.5 if was_streaming else _SMOOTHING, learns_steps=not was_streaming)
        if record.num_draft and was_streaming:
            self._tried(record)

    def _learn(self, done: Round, record: StepRecord) -> None:
        self._risk.observe(done.block.free_signals, record.num_accepted - record.num_forced)
        fading = min(1.0, _MEMORY / self._num_judged)
        # Judging ends at the first difference: one more draft is judged than accepted, if any is left.
        self._num_judged = self._num_judged * fading + min(record.num_accepted + 1, record.num_draft)
        self._num_accepted = self._num_accepted * fading + record.num_accepted
        self._drafts = _moved(self._drafts, record.num_draft, _ROUND_SMOOTHING)
        self._tokens = _moved(self._tokens, record.num_committed, _ROUND_SMOOTHING)

    def _tried(self, record: StepRecord) -> None:
        """Note the extra time of a block after rounds without drafts, perhaps for an opening over a link."""
        reading_ms = self._num_streamed * self._read_ms + self._prompt_ms
        self._lost_ms = record.wall_ms - record.num_committed / self._plain_speed - reading_ms
        self._num_streamed, self._prompt_ms = 0, 0.0

    def _follow_costs(self, record: StepRecord, weight: float, *, learns_steps: bool) -> None:
        costs, target = self._costs, record.target
        num_steps = record.num_draft - record.num_forced
        # The steps of a block after rounds without drafts include reading, so they are not counted.
        if learns_steps and num_steps > 0:
            # Such a slow step includes the draft model's prefill, or its catch-up after rounds without it.
            step_ms = min(record.draft.forward_ms / num_steps, 3 * costs.draft_ms)
            costs = replace(costs, draft_ms=_moved(costs.draft_ms, step_ms, weight))
        if target.num_passes:
            rows_each = max(1, round(target.num_rows / target.num_passes))
            slowdown = (target.forward_ms - target.prefill_ms) / (
                target.num_passes * costs.pass_ms(rows_each) / costs.slowdown
            )
            costs = replace(costs, slowdown=max(_moved(costs.slowdown, slowdown, weight), _LEAST_SLOWDOWN))
        if record.link.rtt_ms and not (record.num_draft == 0 and costs.streams):
            wire_ms = max(record.link.rtt_ms - target.forward_ms, 0.0)
            costs = replace(costs, wire_ms=_moved(costs.wire_ms, wire_ms, weight))
        self._costs = costs


def _moved(old: float, new: float, weight: float) -> float:
    return (1 - weight) * old + weight * new
