"""What each token may use up, and limits that nobody could keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.access.limits import Limits, RowBudget
from skydraft.errors import OptionError, RateLimited
from tests.toys import law

from .test_keys import Clock


def refused_for(budget: RowBudget, label: str, num_rows: int) -> float:
    """Spend; returns how long to wait if refused, 0 if not."""
    try:
        budget.spend(label, num_rows)
    except RateLimited as error:
        assert error.retry_after_s > 0 and "\n" not in str(error)
        return error.retry_after_s
    return 0.0


def test_each_label_has_a_bucket_which_never_overflows_and_rate_0_is_no_limit() -> None:
    budget, without = RowBudget(100, clock := Clock()), RowBudget(0, clock)
    for pause_s, label, num_rows, refused_s in (
        (0, "ann", 500, 0), (0, "ann", 1, 3.01), (0, "bob", 200, 0), (3600, "ann", 200, 0), (0, "ann", 1, 0.01)
    ):  # fmt: skip
        clock.now += pause_s
        assert refused_for(budget, label, num_rows) == pytest.approx(refused_s)
        assert not refused_for(without, label, 10**6)


pauses = st.tuples(st.floats(0, 3), st.integers(1, 300))


@law(50)
@given(st.sampled_from([1.0, 30.0, 500.0]), st.lists(pauses, min_size=1, max_size=40))
def test_the_rate_and_a_burst_get_through_as_does_who_waits(rate: float, requests: list[tuple[float, int]]) -> None:
    clock = Clock()
    budget, began, spent = RowBudget(rate, clock), clock.now, 0
    for pause, num_rows in requests:
        clock.now += pause
        allowed = max(2 * rate, 64) + rate * (clock.now - began)
        if wait := refused_for(budget, "ann", num_rows):
            assert wait <= 301 / rate  # one request below zero at most
            clock.now += wait
            assert not refused_for(budget, "ann", num_rows)
        else:
            assert spent < allowed + 1e-6  # before this one something was left
        spent += num_rows


@pytest.mark.parametrize("name", ["max_sessions", "max_prompt", "max_queue", "session_ttl_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_limits_that_nobody_could_keep_are_refused_by_the_name_of_their_option(name: str, value: float) -> None:
    with pytest.raises(OptionError, match=name) as raised:
        Limits(**{name: value})  # type: ignore[arg-type]
    assert "--" + name.removesuffix("_s").replace("_", "-") in raised.value.line
