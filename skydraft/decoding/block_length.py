"""How many tokens to draft, where that is not fixed: the k that the measured costs and acceptance make fastest."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from skydraft.decoding.cost_model import CostModel
from skydraft.types import StepRecord

MAX_AUTO_K = 8
PRIOR_ALPHA, _PRIOR_WEIGHT = 0.75, 8.0  # acceptance before anything was seen, in drafted tokens
_MIN_GAIN = 1.05  # drafting must promise this much over plain decoding, since only k = 0 cannot be slower
_SMOOTHING = 0.2
_LEAST_SLOWDOWN = 1e-3  # what the other side says of its times may be anything, nothing and less included


class KPolicy(Protocol):
    """Chooses the length of the next block and learns from finished rounds."""

    def next_k(self) -> int:
        """How many tokens to draft now; 0 lets the target go alone for a round."""

    def observe(self, record: StepRecord) -> None:
        """Take in a finished round."""


class AutoK:
    """The k from `min_k` to `max_k` with the best expected tokens per second.

    Starts from `costs`, then follows moving averages of what rounds really took.
    """

    def __init__(
        self, costs: CostModel, *, min_k: int = 0, max_k: int = MAX_AUTO_K, alpha: float = PRIOR_ALPHA
    ) -> None:
        self._costs = costs
        self._min_k = min_k
        self._max_k = min(max_k, MAX_AUTO_K)
        self._num_drafted = _PRIOR_WEIGHT
        self._num_accepted = alpha * _PRIOR_WEIGHT

    @property
    def alpha(self) -> float:
        """Acceptance per judged draft, the prior included."""
        return self._num_accepted / self._num_drafted

    def next_k(self) -> int:
        speed, best = self._costs.tokens_per_s, self._costs.best_k(self.alpha, self._min_k, self._max_k)
        if self._min_k == 0 and speed(self.alpha, best) < _MIN_GAIN * speed(self.alpha, 0):
            return 0
        return best

    def observe(self, record: StepRecord) -> None:
        # The first round holds the prefill and says nothing about steps.
        if record.outcome != "verified" or record.round == 0:
            return
        costs, target = self._costs, record.target
        if record.num_draft:
            # A block may hold the draft model's prefill, or its catch-up after rounds without it: no step is that slow.
            step_ms = min(record.draft.forward_ms / record.num_draft, 3 * costs.draft_ms)
            costs = replace(costs, draft_ms=_moved(costs.draft_ms, step_ms))
            # At the first difference judging ends, so one judged draft more than was accepted, if any is left.
            self._num_drafted += min(record.num_accepted + 1, record.num_draft)
            self._num_accepted += record.num_accepted
        if target.num_passes:
            rows_each = max(1, round(target.num_rows / target.num_passes))
            slowdown = (target.forward_ms - target.prefill_ms) / (
                target.num_passes * costs.pass_ms(rows_each) / costs.slowdown
            )
            costs = replace(costs, slowdown=max(_moved(costs.slowdown, slowdown), _LEAST_SLOWDOWN))
        if record.link.rtt_ms and not (record.num_draft == 0 and costs.streams):
            wire_ms = max(record.link.rtt_ms - target.forward_ms, 0.0)
            costs = replace(costs, wire_ms=_moved(costs.wire_ms, wire_ms))
        self._costs = costs


def _moved(old: float, new: float) -> float:
    return (1 - _SMOOTHING) * old + _SMOOTHING * new
