"""The expected speed of speculation, for the adaptive block length.

Notation of the field: alpha acceptance per judged token, k drafted tokens, t_d a draft step, t_v(n) a target forward
of n rows, R the round trip, E(k) tokens a round. All times in milliseconds.
"""

from dataclasses import dataclass

_LEAST_MS = 1e-3


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens committed by a round of k drafts: (1 - alpha^(k+1)) / (1 - alpha)."""
    return float(k + 1) if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


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
