"""The formulae of PEERS.md, by sums, by simulation and by trying every round trip."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.decoding.adaptive import expected_tokens
from skydraft.evaluation.theory import (
    Costs,
    acceptance_by_position,
    measured_alpha,
    oracle_calls,
    split_verify_ms,
)

from ..decoding.toys import law

alphas = st.floats(0, 1)
ks = st.integers(1, 12)


@law(200)
@given(st.floats(0, 0.999), ks)
def test_tokens_of_a_round(alpha: float, k: int) -> None:
    found = expected_tokens(alpha, k)
    assert found == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    # The recovered or bonus token, and each draft as often as all up to it were accepted.
    assert found == pytest.approx(1 + sum(acceptance_by_position(alpha, k)))
    assert expected_tokens(1.0, k) == k + 1


def simulated(alpha: float, k: int, num_rounds: int = 20_000) -> list[int]:
    """Accepted drafts of rounds whose drafts are right by chance alpha each."""
    right = np.random.default_rng(1).random((num_rounds, k)) < alpha
    return np.cumprod(right, axis=1).sum(axis=1).tolist()


@pytest.mark.parametrize(("alpha", "k"), [(0.3, 4), (0.8, 5), (0.95, 8)])
def test_acceptance_as_simulated(alpha: float, k: int) -> None:
    accepted = simulated(alpha, k)
    assert measured_alpha(accepted, k) == pytest.approx(alpha, abs=0.01)
    shares = [sum(n >= at for n in accepted) / len(accepted) for at in range(1, k + 1)]
    assert shares == pytest.approx(acceptance_by_position(alpha, k), abs=0.015)
    assert sum(accepted) / len(accepted) + 1 == pytest.approx(expected_tokens(alpha, k), rel=0.02)


@pytest.mark.parametrize(
    ("accepted", "k", "alpha"),
    [([], 4, None), ([0], 4, 0.0), ([4], 4, 1.0), ([2], 4, 2 / 3), ([4, 0], 4, 4 / 5), ([3, 4], 4, 7 / 8)],
)
def test_acceptance_is_accepted_over_judged(accepted: list[int], k: int, alpha: float | None) -> None:
    assert measured_alpha(accepted, k) == (None if alpha is None else pytest.approx(alpha))


times = st.floats(0.1, 200)


@law(200)
@given(alphas, ks, times, st.lists(times, min_size=13, max_size=13), st.floats(0, 500))
def test_the_time_of_a_round_and_the_break_even_round_trip(
    alpha: float, k: int, draft_ms: float, verify: list[float], rtt_ms: float
) -> None:
    costs = Costs(draft_ms, tuple(verify))
    assert costs.max_k == 12
    assert costs.round_ms(k, rtt_ms) == pytest.approx(k * draft_ms + rtt_ms + verify[k])
    speed = costs.tokens_per_s(alpha, k, rtt_ms)
    assert speed == pytest.approx(1e3 * expected_tokens(alpha, k) / (k * draft_ms + rtt_ms + verify[k]))
    even = costs.break_even_ms(alpha, k)
    if abs(rtt_ms - even) > 1e-6 * (1 + abs(even)):
        assert (speed > costs.streamed_tokens_per_s()) == (rtt_ms < even)


def test_the_break_even_by_trying_every_round_trip() -> None:
    costs = Costs(5.0, (30.0, 31.0, 32.0, 33.0, 34.0, 35.0))
    alpha, k = 0.8, 5
    better = [rtt for rtt in range(300) if costs.tokens_per_s(alpha, k, rtt) > costs.streamed_tokens_per_s()]
    assert max(better) < costs.break_even_ms(alpha, k) <= max(better) + 1
    free_rows = Costs(5.0, (30.0,) * 6)
    assert free_rows.break_even_ms(alpha, k) == pytest.approx((expected_tokens(alpha, k) - 1) * 30 - k * 5)


@law(100)
@given(st.floats(0.05, 0.99), st.integers(1, 9), st.integers(1, 9), st.lists(times, min_size=9, max_size=9))
def test_passes_are_paid_as_often_as_they_are_reached(
    alpha: float, max_rows: int, num_rows: int, forward: list[float]
) -> None:
    found = split_verify_ms(forward, max_rows, alpha, 8)
    assert len(found) == 9
    expected, fed = 0.0, 0
    while fed < num_rows:
        rows = min(max_rows, num_rows - fed)
        expected += alpha**fed * forward[rows - 1]  # all drafts before it were right
        fed += rows
    assert found[num_rows - 1] == pytest.approx(expected)


def test_forwards_longer_than_were_probed_are_proportional() -> None:
    assert split_verify_ms((10.0, 12.0), 64, 0.5, 5) == pytest.approx((10, 12, 18, 24, 30, 36))


@pytest.mark.parametrize(("agreement", "alone", "calls"), [(0.95, 0.8, 0.15), (0.8, 0.8, 0), (0.7, 0.8, 0), (1, 0, 1)])
def test_an_oracle_calls_once_for_each_token_it_mends(agreement: float, alone: float, calls: float) -> None:
    assert oracle_calls(agreement, alone) == pytest.approx(calls)
