"""The arithmetic of speculation against sums over every outcome."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.decoding.cost_model import CostModel

from .. import reference
from ..toys import law

times = st.floats(0.1, 200)


profiles = st.lists(times, min_size=1, max_size=13).map(lambda times: tuple(sorted(times)))


@law(150)
@given(st.floats(0, 1), st.integers(0, 12), times, profiles, st.integers(1, 14), st.floats(0, 500), st.floats(0.1, 5))
def test_the_speed_is_what_every_outcome_gives_on_average(alpha, k, draft_ms, forward_ms, max_rows, wire_ms, slowdown):
    costs = CostModel(draft_ms, forward_ms, max_rows, wire_ms=wire_ms, slowdown=slowdown)
    slowed = tuple(slowdown * ms for ms in forward_ms)
    expected = reference.tokens_per_s(alpha, k, draft_ms, slowed, max_rows, wire_ms)
    assert costs.tokens_per_s(alpha, k) == pytest.approx(expected)
    streamed = CostModel(draft_ms, forward_ms, max_rows, wire_ms=wire_ms, slowdown=slowdown, streams=True)
    expected = reference.tokens_per_s(alpha, k, draft_ms, slowed, max_rows, wire_ms if k else 0.0)
    assert streamed.tokens_per_s(alpha, k) == pytest.approx(expected)
