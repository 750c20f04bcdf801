"""How many tokens to draft: fixed, or the k that the measured costs and acceptance make fastest.

Notation of the field: alpha acceptance per token, t_d a draft step, t_v(n) a target forward of n rows, R the round
trip. A round of k drafts commits (1 - alpha^(k+1)) / (1 - alpha) tokens.
"""

from __future__ import annotations

from typing import Protocol

from skydraft.engines.base import RowProfile
from skydraft.types import StepRecord

MAX_AUTO_K = 8
PRIOR_ALPHA, _PRIOR_WEIGHT = 0.75, 8.0  # acceptance before anything was seen, in drafted tokens
_MIN_GAIN = 1.05  # drafting must promise this much over plain decoding, since only k = 0 cannot be slower
_SMOOTHING = 0.2


class KPolicy(Protocol):
    """Chooses the length of the next block and learns from finished rounds."""

    def next_k(self) -> int:
        """How many tokens to draft now; 0 lets the target go alone for a round."""

    def observe(self, record: StepRecord) -> None:
        """Take in a finished round."""


class FixedK:
    """Always the same k."""

    def __init__(self, k: int) -> None:
        self._k = k

    def next_k(self) -> int:
        return self._k

    def observe(self, record: StepRecord) -> None:
        return None


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens committed by a round of k drafts: (1 - alpha^(k+1)) / (1 - alpha)."""
    return float(k + 1) if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


class AutoK:
    """The k from `min_k` to `max_k` with the best expected tokens per second.

    Starts from the row profiles of both engines, then follows moving averages of what rounds really took. The
    target's rows run in passes of `max_rows`; a pass after the first difference is never run, and so costs only as
    often as it is reached. `wire_ms` is what a round takes beside forwards; a cloud that streams saves it at k = 0.
    """

    def __init__(
        self,
        draft: RowProfile,
        target: RowProfile,
        max_rows: int,
        *,
        min_k: int = 0,
        max_k: int = MAX_AUTO_K,
        alpha: float = PRIOR_ALPHA,
        wire_ms: float = 0.0,
        streams: bool = False,
    ) -> None:
        self._draft_ms = draft.forward_ms[0]
        self._profile_ms = target.forward_ms
        self._slowdown = 1.0  # measured time of a pass over the profile's
        self._wire_ms = wire_ms
        self._streams = streams
        self._max_rows = max_rows
        self._min_k = min_k
        self._max_k = min(max_k, MAX_AUTO_K)
        self._num_drafted = _PRIOR_WEIGHT
        self._num_accepted = alpha * _PRIOR_WEIGHT

    @property
    def alpha(self) -> float:
        """Acceptance per judged draft, the prior included."""
        return self._num_accepted / self._num_drafted

    def next_k(self) -> int:
        best = max(range(self._min_k, self._max_k + 1), key=self.tokens_per_ms)
        if self._min_k == 0 and self.tokens_per_ms(best) < _MIN_GAIN * self.tokens_per_ms(0):
            return 0
        return best

    def tokens_per_ms(self, k: int) -> float:
        """Expected speed with blocks of k."""
        verify_ms = 0.0
        for start in range(0, k + 1, self._max_rows):
            num_rows = min(self._max_rows, k + 1 - start)
            verify_ms += self.alpha**start * self._pass_ms(num_rows)
        wire_ms = 0.0 if k == 0 and self._streams else self._wire_ms
        return expected_tokens(self.alpha, k) / (k * self._draft_ms + wire_ms + verify_ms)

    def _pass_ms(self, num_rows: int) -> float:
        known = len(self._profile_ms)
        per_row = self._profile_ms[-1] / known
        return self._slowdown * (self._profile_ms[num_rows - 1] if num_rows <= known else num_rows * per_row)

    def observe(self, record: StepRecord) -> None:
        # The first round holds the prefill and says nothing about steps.
        if record.outcome != "verified" or record.round == 0:
            return
        if record.num_draft:
            # A block may hold the draft model's prefill, or its catch-up after rounds without it: no step is that slow.
            self._draft_ms = _moved(self._draft_ms, min(record.draft_ms / record.num_draft, 3 * self._draft_ms))
            # At the first difference judging ends, so one judged draft more than was accepted, if any is left.
            self._num_drafted += min(record.num_accepted + 1, record.num_draft)
            self._num_accepted += record.num_accepted
        cost = record.cost
        if cost.num_passes:
            rows_each = max(1, round(cost.num_rows / cost.num_passes))
            expected_ms = cost.num_passes * self._pass_ms(rows_each) / self._slowdown
            self._slowdown = _moved(self._slowdown, (cost.forward_ms - cost.prefill_ms) / expected_ms)
        if cost.rtt_ms and not (record.num_draft == 0 and self._streams):
            self._wire_ms = _moved(self._wire_ms, max(cost.rtt_ms - cost.forward_ms, 0.0))


def _moved(old: float, new: float) -> float:
    return (1 - _SMOOTHING) * old + _SMOOTHING * new
