"""What hand-backs cost: by hand where figures are round, and by laws where they are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.prices import Prices, parse_prices
from skydraft.errors import OptionError
from skydraft.evaluation.policies import Policy, policies, table
from skydraft.gating.calibration import Calibration, Curve, CurvePoint

from ..toys import law
from . import pairs

COSTS = CostModel(10.0, (40.0, 50.0, 60.0, 70.0), 4, wire_ms=100.0, streams=True)
NONE = CurvePoint(limit=9, agreement=0.5, calls_per_token=0, drafted_per_token=1)


def point(calls: float, written: float, rows: float, drafted: float, agreement: float = 0.96) -> CurvePoint:
    return CurvePoint(
        limit=1, agreement=agreement, calls_per_token=calls, written_per_token=written, rows_per_token=rows,
        drafted_per_token=drafted,
    )  # fmt: skip


def calibrated(**points: CurvePoint) -> Calibration:
    """A calibration with one curve for each hand-back, `agree_4` for agree:4."""
    curves = tuple(
        Curve(k=1, hand_back=name.strip("_").replace("_", ":"), points=(each, NONE)) for name, each in points.items()
    )
    return pairs.calibration(0.3).model_copy(update={"curves": curves})


def by_name(**points: CurvePoint) -> dict[str, Policy]:
    return {policy.name: policy for policy in policies(calibrated(**points), COSTS)}


def test_the_time_of_a_token_by_hand() -> None:
    found = by_name(
        _0=point(0.25, 0.25, 0.75, 1.0),  # 3 rows a call
        _8=point(0.05, 0.45, 0.5, 0.5),  # 2 rows a call, and 0.4 rows of what is written on
        agree_4=point(0.05, 0.45, 0.525, 0.5),  # 2.5 rows a call
    )
    assert list(found) == ["0", "8", "agree:4", "cloud"]
    assert found["0"].ms == pytest.approx(10 + 0.25 * (100 + 60))
    assert found["8"].ms == pytest.approx(5 + 0.05 * (100 + 50) + 0.4 * 40)
    assert found["agree:4"].ms == pytest.approx(5 + 0.05 * (100 + 55) + 0.4 * 40)  # reading hides behind writing
    a_text = 1 / pairs.NUM_TOKENS  # of a call
    assert (found["cloud"].calls, found["cloud"].written) == (a_text, 1)
    assert found["cloud"].ms == pytest.approx(40 + 100 * a_text)
    eight, length = found["8"], found["8"].length
    again = (0.05 * length - 1) * (500 + length / 2)
    assert eight.price(Prices(1.0, 0.0, 0.0)) == pytest.approx(max(again, 0) / 1e6)
    assert eight.price(Prices(0.0, 1.0, 0.0)) == pytest.approx((500 + 0.5 * length) / 1e6)
    assert eight.price(Prices(0.0, 0.0, 1.0)) == pytest.approx(0.5 * length / 1e6)


def test_reading_along_costs_its_time_where_it_cannot_hide() -> None:
    made = calibrated(_0=point(0.25, 0.25, 0.75, 1.0), agree_4=point(0.05, 0.45, 0.5, 0.5))
    here = {each.name: each.ms for each in policies(made, replace(COSTS, streams=False, wire_ms=0.0))}
    assert here["agree:4"] == pytest.approx(5 + 0.05 * 50 + 0.4 * (40 + 10))
    slow = {each.name: each.ms for each in policies(made, replace(COSTS, draft_ms=60.0))}
    assert slow["agree:4"] == pytest.approx(30 + 0.05 * 150 + 0.4 * 60)


def test_what_keeps_too_little_or_has_no_figures_is_left_out() -> None:
    low, old = point(0.1, 0.5, 0.6, 0.5, agreement=0.94), point(0.2, 0, 0, 0)
    assert list(by_name(_0=low, _8=point(0.1, 0.5, 0.6, 0.5))) == ["8", "cloud"]
    assert policies(calibrated(_0=low), COSTS) == policies(calibrated(_0=old), COSTS) == []
    assert list(by_name(_0=point(0, 0, 0, 1))) == ["0", "cloud"]  # the draft model alone keeps it


def test_a_hand_back_without_a_curve_for_auto_s_k_is_not_given_the_figures_of_another() -> None:
    made = calibrated(_0=point(0.25, 0.25, 0.75, 1.0), agree_4=point(0.05, 0.45, 0.5, 0.5))
    curves = (made.curves[0], made.curves[1].model_copy(update={"k": 12}))
    assert [each.name for each in policies(made.model_copy(update={"curves": curves}), COSTS)] == ["0", "cloud"]


shares = st.floats(0, 1)


@law(50)
@given(st.lists(st.tuples(*[shares] * 4), min_size=1, max_size=5), st.tuples(*[st.floats(0, 9)] * 3))
def test_the_fastest_and_the_cheapest_are_marked_once(figures: list[Any], given: tuple[float, float, float]) -> None:
    prices = Prices(*given)
    known = [Policy(f"p{at}", *each, 100) for at, each in enumerate(figures)]
    lines = list(table(known, prices))
    (fastest,) = (at for at, line in enumerate(lines) if "fastest" in line)
    (cheapest,) = (at for at, line in enumerate(lines) if "cheapest" in line)
    assert known[fastest].ms == min(each.ms for each in known)
    assert known[cheapest].price(prices) == min(each.price(prices) for each in known)
    assert not any("cheapest" in line or "a text" in line for line in table(known, None))


@law(50)
@given(shares, shares, st.floats(0, 300), st.floats(0, 300))
def test_a_slower_link_costs_its_round_trip_a_call(calls: float, more: float, wire_ms: float, more_ms: float) -> None:
    made = calibrated(_0=point(calls, calls + more, 2 * calls + more, 1.0))
    near, far = (policies(made, replace(COSTS, wire_ms=each_ms))[0].ms for each_ms in (wire_ms, wire_ms + more_ms))
    assert far - near == pytest.approx(calls * more_ms, abs=1e-6)


def test_prices_are_three_numbers() -> None:
    assert parse_prices("1, 0.5,2e-6") == Prices(1.0, 0.5, 2e-6)


def test_a_stream_that_costs_least_is_said() -> None:
    known = [Policy("0", 0.25, 0.5, 0.25, 1.0, 100), Policy("cloud", 0.01, 1.0, 1.0, 2.0, 100)]
    assert "Stream this one instead" in list(table(known, Prices(1.0, 1.0, 1.0)))[-1]
    assert "Stream" not in "".join(table(known, Prices(0.0, 0.0, 1.0)))


@pytest.mark.parametrize(
    "text", ["", "1", "1,2", "1,2,3,4", "1,2,-1", "1,nan,2", "inf,1,1", "1,1e308,1", "a,b,c", "1;2;3"]
)
def test_other_prices_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(OptionError, match="three numbers") as refused:
        parse_prices(text)
    assert "\n" not in refused.value.line
