"""The arithmetic of speculation against sums over every outcome, and trying every round trip."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.decoding.cost_model import CostModel, expected_tokens, measured_alpha

from .. import reference
from ..toys import law

alphas, ks = st.floats(0, 1), st.integers(1, 12)
times = st.floats(0.1, 200)


profiles = st.lists(times, min_size=1, max_size=13).map(lambda times: tuple(sorted(times)))


@law(150)
@given(alphas, st.integers(0, 12), times, profiles, st.integers(1, 14), st.floats(0, 500), st.floats(0.1, 5))
def test_the_speed_is_what_every_outcome_gives_on_average(alpha, k, draft_ms, forward_ms, max_rows, wire_ms, slowdown):
    costs = CostModel(draft_ms, forward_ms, max_rows, wire_ms=wire_ms, slowdown=slowdown)
    slowed = tuple(slowdown * ms for ms in forward_ms)
    expected = reference.tokens_per_s(alpha, k, draft_ms, slowed, max_rows, wire_ms)
    assert costs.tokens_per_s(alpha, k) == pytest.approx(expected)
    streamed = CostModel(draft_ms, forward_ms, max_rows, wire_ms=wire_ms, slowdown=slowdown, streams=True)
    expected = reference.tokens_per_s(alpha, k, draft_ms, slowed, max_rows, wire_ms if k else 0.0)
    assert streamed.tokens_per_s(alpha, k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("accepted", "k", "alpha"),
    [
        ([], 4, None), ([0, 0], 0, None), ([0], 4, 0.0), ([4], 4, 1.0), ([2], 4, 2 / 3), ([4, 0], 4, 4 / 5),
        ([3, 4], 4, 7 / 8),
    ],
)  # fmt: skip
def test_acceptance_is_accepted_over_judged(accepted, k, alpha):
    found = measured_alpha([(num, k) for num in accepted])
    assert found == (None if alpha is None else pytest.approx(alpha))


@law(100)
@given(alphas, ks, times, st.lists(times, min_size=13, max_size=13), st.floats(0, 500))
def test_blocks_beat_streaming_below_the_break_even_round_trip_and_never_above(alpha, k, draft_ms, verify, wire_ms):
    costs = CostModel(draft_ms, tuple(verify), 13, wire_ms=wire_ms, streams=True)
    spent_ms = k * draft_ms + wire_ms + verify[k]
    assert costs.tokens_per_s(alpha, k) == pytest.approx(1e3 * expected_tokens(alpha, k) / spent_ms)
    assert costs.tokens_per_s(alpha, 0) == pytest.approx(1e3 / verify[0])
    even = costs.break_even_ms(alpha, k)
    if abs(wire_ms - even) > 1e-6 * (1 + abs(even)):
        assert (costs.tokens_per_s(alpha, k) > costs.tokens_per_s(alpha, 0)) == (wire_ms < even)
