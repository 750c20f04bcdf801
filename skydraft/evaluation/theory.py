"""What arithmetic expects of speculation, to be shown beside what was measured.

Notation of the field: alpha acceptance per judged token, k drafted tokens, t_d a draft step, t_v(n) a target forward
of n rows, R the round trip, E(k) tokens a round. All times in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skydraft.decoding.adaptive import expected_tokens


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs of a pair. `verify_ms[n - 1]` is a verification of n rows, in as many passes as it takes."""

    draft_ms: float
    verify_ms: tuple[float, ...]

    @property
    def max_k(self) -> int:
        """The longest block that these costs say something about."""
        return len(self.verify_ms) - 1

    def round_ms(self, k: int, rtt_ms: float) -> float:
        """k·t_d + R + t_v(k + 1)."""
        return k * self.draft_ms + rtt_ms + self.verify_ms[k]

    def tokens_per_s(self, alpha: float, k: int, rtt_ms: float) -> float:
        """E(k) over the time of a round."""
        return 1e3 * expected_tokens(alpha, k) / self.round_ms(k, rtt_ms)

    def streamed_tokens_per_s(self) -> float:
        """The target alone: 1 / t_v(1); a stream hides the link but for its start."""
        return 1e3 / self.verify_ms[0]

    def break_even_ms(self, alpha: float, k: int) -> float:
        """The round trip below which speculation beats streaming: E·t_v(1) − t_v(k + 1) − k·t_d. May be negative.

        With rows that cost nothing, t_v(k + 1) = t_v(1), this is (E − 1)·t_v(1) − k·t_d.
        """
        return expected_tokens(alpha, k) * self.verify_ms[0] - self.verify_ms[k] - k * self.draft_ms


def acceptance_by_position(alpha: float, k: int) -> tuple[float, ...]:
    """Share of blocks whose first n drafts were all accepted, n = 1 to k, were acceptance the same everywhere."""
    return tuple(alpha**n for n in range(1, k + 1))


def measured_alpha(num_accepted: Sequence[int], k: int) -> float | None:
    """Accepted per judged draft in whole blocks of k: judging ends at the first difference."""
    judged = sum(min(accepted + 1, k) for accepted in num_accepted)
    return sum(num_accepted) / judged if judged else None


def split_verify_ms(forward_ms: Sequence[float], max_rows: int, alpha: float, max_k: int) -> tuple[float, ...]:
    """Expected time of verifying 1 to max_k + 1 rows in passes of `max_rows`, where a pass after the first difference
    is never run. `forward_ms[n - 1]` is a forward of n rows; longer ones are taken as proportional."""
    per_row = forward_ms[-1] / len(forward_ms)

    def one_pass(num_rows: int) -> float:
        return forward_ms[num_rows - 1] if num_rows <= len(forward_ms) else num_rows * per_row

    return tuple(
        sum(
            alpha**start * one_pass(min(max_rows, num_rows - start))
            for start in range(0, num_rows, max_rows)
        )
        for num_rows in range(1, max_k + 2)
    )  # fmt: skip


def oracle_calls(agreement: float, alone: float) -> float:
    """The fewest escalations per token that can raise agreement from `alone`: each mends one token, A − α."""
    return max(agreement - alone, 0.0)
