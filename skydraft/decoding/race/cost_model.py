"""The expected speed of speculation in rounds, in closed form.

Notation: alpha acceptance per judged token, k drafted tokens, t_d a draft step, t_v(n) a target forward of n rows,
E(k) tokens a round. All times in milliseconds.
"""

from dataclasses import dataclass

_LEAST_MS = 1e-3
_MAY_LOSE = 0.03  # of the target's time
_MOST_SAVED = 20.0  # tokens of the target; larger gains do not pay for later losses


def expected_tokens(alpha: float, k: int) -> float:
    """Return the expected tokens of a round with k drafts: (1 - alpha^(k+1)) / (1 - alpha)."""
    return float(k + 1) if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def row_ms(forward_ms: tuple[float, ...], num_rows: int) -> float:
    """Return t_v(num_rows), in proportion beyond the measured rows; never 0, even if a clock measured 0."""
    known = len(forward_ms)
    return max(forward_ms[num_rows - 1] if num_rows <= known else num_rows * forward_ms[-1] / known, _LEAST_MS)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of a pair: `draft_ms` is t_d, `forward_ms[n - 1]` is t_v(n). Rows are verified in passes of at most
    `max_rows`; no pass runs after the first difference."""

    draft_ms: float
    forward_ms: tuple[float, ...]
    max_rows: int

    @property
    def plain_ms(self) -> float:
        """Time of one token of the target alone."""
        return row_ms(self.forward_ms, 1)

    def verify_ms(self, alpha: float, k: int) -> float:
        """Return the expected time to judge k drafts: k + 1 rows."""
        starts = range(0, k + 1, self.max_rows)
        return sum(alpha**at * row_ms(self.forward_ms, min(self.max_rows, k + 1 - at)) for at in starts)

    def tokens_per_s(self, alpha: float, k: int) -> float:
        """Return tokens a second: E(k) / (k·t_d + t_v(k + 1)); k = 0 is the target alone."""
        return 1e3 * expected_tokens(alpha, k) / (k * self.draft_ms + self.verify_ms(alpha, k))

    def best(self, alpha: float, longest: int) -> tuple[int, float]:
        """Return (length, speed relative to the target alone) of the fastest block; (0, 1.0) if none is faster."""
        speeds = [self.tokens_per_s(alpha, k) for k in range(longest + 1)]
        k = max(range(len(speeds)), key=speeds.__getitem__)
        return k, speeds[k] / speeds[0]


class Losses:
    """Bounds the time lost by tries: the target's time for `free` tokens, and for a share of the tokens that it wrote
    alone."""

    def __init__(self, plain_ms: float, free: float) -> None:
        self._plain_ms, self._free = plain_ms, free
        self._ms, self._num_alone = 0.0, 0

    def wrote(self, num_tokens: int) -> None:
        self._num_alone += num_tokens

    def note(self, spent_ms: float, num_tokens: int = 0) -> None:
        """Record a try: its time, and the tokens that it brought."""
        self._ms = max(self._ms + spent_ms - num_tokens * self._plain_ms, -_MOST_SAVED * self._plain_ms)

    def allow(self, ms: float = 0.0, more: float = 0.0) -> bool:
        """Whether another try of `ms` may fail; `more` raises the number of free tokens."""
        return self._ms + ms <= self._plain_ms * (self._free + more + _MAY_LOSE * self._num_alone)
