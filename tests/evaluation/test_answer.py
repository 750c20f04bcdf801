"""The first words of the report: computed from the figures, and other figures give other words."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from skydraft.evaluation.report.answer import Conclusion, answer

SUMMARY = json.loads((Path(__file__).parents[2] / "docs/report-zh-dev/summary.json").read_text(encoding="utf-8"))


@pytest.fixture
def summary() -> dict[str, Any]:
    """Figures of the committed report, to be changed."""
    return copy.deepcopy(SUMMARY)


def setting(summary: dict[str, Any], mode: str, link_ms: float | None = None) -> dict[str, Any]:
    (found,) = (s for s in summary["settings"] if s["mode"] == mode and s["link_ms"] == link_ms)
    return dict(found)


def figure(value: float, low: float | None = None, high: float | None = None) -> dict[str, float]:
    return {"value": value, "low": value if low is None else low, "high": value if high is None else high}


def answered(summary: dict[str, Any]) -> Conclusion:
    found = answer(summary)
    assert found is not None
    return found


def test_the_cheapest_gated_mode_that_keeps_the_agreement_is_named(summary: dict[str, Any]) -> None:
    assert answered(summary).mode == "auto"
    setting(summary, "auto")["measures"]["target_agreement"] = figure(0.949)
    assert answered(summary).mode == "gate=entropy:2;k=12;eager"
    setting(summary, "quality")["measures"]["target_agreement"] = figure(0.95)
    assert answered(summary).mode == "quality"


def test_where_none_keeps_it_the_closest_is_named_and_said_to_fall_short(summary: dict[str, Any]) -> None:
    for number, mode in enumerate(s["mode"] for s in summary["settings"]):
        for one in summary["settings"]:
            if one["mode"] == mode:
                one["measures"]["target_agreement"] = figure(0.5 + number / 1000)
    setting(summary, "fluency")["measures"]["target_agreement"] = figure(0.94)
    found = answered(summary)
    assert found.mode == "fluency" and "no gated mode kept 0.95" in found.kept


def test_each_link_has_its_line_with_the_prompts_it_rests_on(summary: dict[str, Any]) -> None:
    setting(summary, "auto", 20.0)["speed_over"]["cloud"] = figure(0.54, 0.36, 0.94)
    setting(summary, "lossless", 20.0)["speed_over"]["cloud"] = figure(0.4)
    twenty, eighty = answered(summary).links
    assert twenty.startswith("Over a link of 20 ms") and "auto 0.54 (0.36 to 0.94) and lossless 0.40" in twenty
    assert "80 ms" in eighty and "(12 prompts)" in eighty


def test_what_was_faster_than_the_target_is_no_warning(summary: dict[str, Any]) -> None:
    assert "speed, but for fluency without a link (agreement 0.72)" in answered(summary).avoid[0]
    setting(summary, "fluency")["speed_over"]["cloud"] = figure(1.2, 0.99, 1.4)
    assert answered(summary).avoid[0] == "speed: no mode that asks the target was faster than the target alone."
    setting(summary, "auto", 80.0)["speed_over"]["cloud"] = figure(1.5, 1.2, 1.9)
    setting(summary, "auto", 80.0)["measures"]["target_agreement"] = figure(0.98)
    assert "auto over 80 ms (agreement 0.98)" in answered(summary).avoid[0]


def test_a_poor_category_is_named_and_a_good_one_is_not(summary: dict[str, Any]) -> None:
    categories = setting(summary, "auto")["categories"]
    for name, found in categories.items():
        found["target_agreement"] = 0.85 if name == "code" else 0.97
    assert (
        "categories of prompts in which auto keeps less than 0.9: code (0.85 on 5 prompts)." in answered(summary).avoid
    )
    categories["code"]["target_agreement"] = 0.9
    assert not any("categories" in line for line in answered(summary).avoid)


def test_a_mode_that_writes_the_same_texts_is_not_warned_of(summary: dict[str, Any]) -> None:
    setting(summary, "auto")["measures"]["same_as_cloud"] = figure(0.42)
    assert any("42% of those of auto" in line for line in answered(summary).avoid)
    setting(summary, "auto")["measures"]["same_as_cloud"] = figure(1.0)
    setting(summary, "edge")["measures"]["target_agreement"] = figure(0.93)
    assert not any("whole" in line or "leaving the target out" in line for line in answered(summary).avoid)


@pytest.mark.parametrize("without", ["cloud", "scores", "gates"])
def test_without_what_it_needs_there_is_no_answer(summary: dict[str, Any], without: str) -> None:
    if without == "scores":
        for one in summary["settings"]:
            del one["measures"]["target_agreement"]
    else:
        left = {"cloud": {"cloud"}, "gates": {s["mode"] for s in summary["settings"]} - {"edge", "cloud", "lossless"}}
        summary["settings"] = [s for s in summary["settings"] if s["mode"] not in left[without]]
        summary["run"]["modes"] = [m for m in summary["run"]["modes"] if m["name"] not in left[without]]
    assert answer(summary) is None
