"""What rows cost decides how forwards are padded and feeds parted; never beyond the rows that keep their bits."""

import logging
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.engines.row_costs import RowCosts, RowProfile
from skydraft.files import log

from ..toys import law

IN_FOURS = (10.0, 18.0, 26.0, 14.0, 24.0, 32.0, 40.0, 27.0)
sizes = st.lists(st.integers(1, 6), min_size=1, max_size=5)
times = st.lists(st.floats(0.5, 50), min_size=1, max_size=16)


def costs_of(forward_ms: tuple[float, ...] = IN_FOURS, invariant_rows: int = 8) -> RowCosts:
    return RowCosts(RowProfile(invariant_rows, forward_ms), "toy")


def test_two_and_three_rows_are_padded_to_four_and_one_never() -> None:
    assert [costs_of().padded(num) for num in range(1, 10)] == [1, 4, 4, 4, 5, 8, 8, 8, 9]
    assert costs_of().forward_ms == (10.0, 14.0, 14.0, 14.0, 24.0, 27.0, 27.0, 27.0)
    few = costs_of(invariant_rows=3)  # four rows give other bits, and those of five are lost anyway
    assert [few.padded(num) for num in range(1, 9)] == [1, 2, 3, 4, 5, 8, 8, 8]
    assert [costs_of((10.0, 14.2, 14.0, 14.1)).padded(num) for num in (2, 3)] == [2, 3]  # what saves nothing


def test_sequences_with_few_rows_are_padded_where_another_forward_would_cost_more() -> None:
    assert costs_of().passes([1, 3]) == [((0, 1), 3)]  # 27 ms as 8 rows; 14 and 14 as two forwards of 4
    assert costs_of().passes([1, 1, 1]) == [((0, 1, 2), 1)]
    assert costs_of().passes([1, 7]) == [((0, 1), 1), ((1,), 6)]  # 14 rows would lose their bits


@law(200)
@given(times, st.integers(1, 16), sizes)
def test_passes_hold_each_row_once_and_keep_the_bits(forward_ms: list[float], exact: int, given: list[int]) -> None:
    costs = costs_of(tuple(forward_ms), min(exact, len(forward_ms)))
    done = 0
    for feeds, num_rows in costs.passes(given):
        assert feeds == tuple(index for index, size in enumerate(given) if size > done)
        done += num_rows
        assert sum(given) > costs.profile.invariant_rows or len(feeds) * num_rows <= costs.profile.invariant_rows
    assert done == max(given)
    for num_rows in range(1, len(forward_ms) + 1):
        assert num_rows <= costs.padded(num_rows) <= max(costs.profile.limit(num_rows), num_rows)


def test_medians_of_what_forwards_take_replace_a_profile_of_a_busy_moment(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, log.name)
    costs = costs_of((10.0, 18.0, 26.0, 60.0, 70.0, 80.0, 90.0, 100.0))
    assert costs.padded(3) == 3
    for number in count():
        costs.note(1, 20.0)  # the machine is half as fast, evenly
        costs.note(4, 28.0 if number % 3 else 400.0)
        if costs.padded(3) == 4:
            break
    assert 5 <= number < 16 and costs.forward_ms[:4] == (20.0, 28.0, 28.0, 28.0) and costs.forward_ms[7] == 200.0
    assert [each.message for each in caplog.records] == ["toy: 4 rows take 28 ms, 120 by the profile."]
    costs.note(99, 1.0)  # more than was probed says nothing
