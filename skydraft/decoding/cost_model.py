"""The expected speed of speculation, for the adaptive block length, `skydraft doctor` and the report.

Notation of the field: alpha acceptance per judged token, k drafted tokens, t_d a draft step, t_v(n) a target forward
of n rows, R the round trip, E(k) tokens a round. All times in milliseconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass

_LEAST_MS = 1e-3


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens committed by a round of k drafts: (1 - alpha^(k+1)) / (1 - alpha)."""
    return float(k + 1) if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def measured_alpha(blocks: Iterable[tuple[int, int]]) -> float | None:
    """Accepted drafts per judged draft, from (accepted, drafted) of blocks: judging ends at the first difference."""
    known = list(blocks)
    num_judged = sum(min(accepted + 1, drafted) for accepted, drafted in known)
    return sum(accepted for accepted, _ in known) / num_judged if num_judged else None


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of a pair and of the link between them.

    `draft_ms` is t_d, `forward_ms[n - 1]` is t_v(n), extrapolated in proportion. Rows are verified in passes of at most
    `max_rows`; no pass runs after the first difference. `wire_ms` is R; if the target `streams`, a round without a
    draft does not wait for R. `slowdown` is the ratio of actual forward times to `forward_ms`.
    """

    draft_ms: float
    forward_ms: tuple[float, ...]
    max_rows: int
    wire_ms: float = 0.0
    streams: bool = False
    slowdown: float = 1.0

    def pass_ms(self, num_rows: int) -> float:
        """t_v(num_rows), times the slowdown; never 0, though a clock may have measured that."""
        known = self.forward_ms
        forward_ms = known[num_rows - 1] if num_rows <= len(known) else num_rows * known[-1] / len(known)
        return self.slowdown * max(forward_ms, _LEAST_MS)

    def verify_ms(self, alpha: float, k: int) -> float:
        """Expected time of judging k drafts: k + 1 rows."""
        starts = range(0, k + 1, self.max_rows)
        return sum(alpha**start * self.pass_ms(min(self.max_rows, k + 1 - start)) for start in starts)

    def tokens_per_s(self, alpha: float, k: int) -> float:
        """Tokens a second: E(k) over k·t_d + R + t_v(k + 1); k = 0 is the target alone."""
        wire_ms = 0.0 if k == 0 and self.streams else self.wire_ms
        return 1e3 * expected_tokens(alpha, k) / (k * self.draft_ms + wire_ms + self.verify_ms(alpha, k))

    def best_k(self, alpha: float, min_k: int, max_k: int) -> int:
        return max(range(min_k, max_k + 1), key=lambda k: self.tokens_per_s(alpha, k))

    def break_even_ms(self, alpha: float, k: int) -> float:
        """The round trip below which blocks of k beat streaming: E·t_v(1) − t_v(k + 1) − k·t_d. May be negative. If
        more rows cost no time, t_v(k + 1) = t_v(1), this is (E − 1)·t_v(1) − k·t_d."""
        return expected_tokens(alpha, k) * self.pass_ms(1) - self.verify_ms(alpha, k) - k * self.draft_ms
