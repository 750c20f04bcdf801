"""The report under docs/ says what the records beside it say, and its first words follow from the figures."""

import copy
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from skydraft.evaluation.findings import Findings
from skydraft.evaluation.records import Records, read_records
from skydraft.evaluation.report.answer import answer
from skydraft.evaluation.report.page import render
from skydraft.evaluation.summary import Summary, summarize

FOLDER = Path(__file__).parents[2] / "docs" / "report-zh-dev"


@pytest.fixture(scope="module")
def records() -> Records:
    return read_records(FOLDER / "records.jsonl")


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "summary.json").read_text(encoding="utf-8"))
    return found


def test_the_summary_is_made_from_the_records(records: Records, published: dict[str, Any]) -> None:
    made = summarize(Findings(records)).model_dump(mode="json", by_alias=True)
    assert made["run"] == published["run"] and made["run"]["num_prompts"] == 62
    for mine, theirs in zip(made["settings"], published["settings"], strict=True):
        assert mine["categories"] == theirs["categories"], mine["mode"]
        assert mine.keys() == theirs.keys() and mine["measures"].keys() == theirs["measures"].keys()
        for of in ("measures", "speed_over"):
            for name, figure in mine[of].items():
                assert figure == pytest.approx(theirs[of][name], abs=2e-5), (mine["mode"], name)


def test_the_page_shows_every_figure_of_the_summary(records: Records, published: dict[str, Any]) -> None:
    page = (FOLDER / "report.html").read_text(encoding="utf-8")
    findings = Findings(records)
    again = render(findings, summarize(findings))
    # Plots may differ in the last digit of a coordinate, and with another version of matplotlib.
    published_words, made_words = (re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL) for text in (page, again))
    assert published_words == made_words
    assert page.count("<svg") == again.count("<svg") == 1


def test_the_answer_comes_first_and_is_that_of_the_summary(records: Records, published: dict[str, Any]) -> None:
    mode, sentences = answered(records, published)
    page = html.unescape((FOLDER / "report.html").read_text(encoding="utf-8"))
    settings = {s["mode"]: s["measures"] for s in published["settings"] if s["link_ms"] is None}
    for name in ("target_agreement", "cloud_calls_per_token"):
        assert f"{settings[mode][name]['value']:.3f}" in sentences[0]
    places = [page.index(text) for text in (*sentences, "<svg", "<table")]
    assert places == sorted(places)


def test_the_bars_that_the_notes_state_are_met(published: dict[str, Any]) -> None:
    settings = {s["mode"]: s["measures"] for s in published["settings"] if s["link_ms"] is None}
    for mode, asked in (("auto", 0.95), ("auto;k=12;hand-back=0", 0.95), ("auto;gate=calibrated:0.9", 0.90)):
        assert settings[mode]["target_agreement"]["value"] == pytest.approx(asked, abs=0.02)
    assert settings["auto"]["cloud_calls_per_token"]["value"] <= 0.06
    assert settings["auto"]["target_written_per_token"]["value"] <= 0.6
    assert settings["lossless"]["target_agreement"]["value"] == 1.0 == settings["lossless"]["same_as_cloud"]["value"]


@pytest.fixture
def summary(published: dict[str, Any]) -> dict[str, Any]:
    """Figures of the committed report, to be changed: in these the answer is auto."""
    found = copy.deepcopy(published)
    auto = setting(found, "auto")
    auto["measures"]["target_agreement"], auto["speed_over"]["cloud"] = figure(0.95), figure(3.0, 0.9, 9.0)
    return found


def setting(summary: dict[str, Any], mode: str, link_ms: float | None = None) -> dict[str, Any]:
    (found,) = (s for s in summary["settings"] if s["mode"] == mode and s["link_ms"] == link_ms)
    return dict(found)


def figure(value: float, low: float | None = None, high: float | None = None) -> dict[str, float]:
    return {"value": value, "low": value if low is None else low, "high": value if high is None else high}


def answered(records: Records, summary: dict[str, Any]) -> tuple[str, list[str]]:
    found = answer(records.run, Summary.model_validate(summary))
    assert found is not None
    return found


def test_the_fastest_gated_mode_that_keeps_the_agreement_is_named(records: Records, summary: dict[str, Any]) -> None:
    # Calls do not decide: a mode in which the target writes the whole text on makes hardly any.
    setting(summary, "auto")["measures"]["cloud_calls_per_token"] = figure(0.9)
    setting(summary, "fluency")["measures"]["target_agreement"] = figure(0.949)
    setting(summary, "fluency")["speed_over"]["cloud"] = figure(9.0)
    setting(summary, "quality")["measures"]["target_agreement"] = figure(0.95)
    mode, sentences = answered(records, summary)
    assert mode == "auto" and "No gated mode that keeps 0.95 is clearly faster." in sentences[0]
    speed = setting(summary, "auto")["speed_over"]["cloud"]
    setting(summary, "quality")["measures"]["target_agreement"] = figure(1.0)
    setting(summary, "quality")["speed_over"]["cloud"] = speed | {"value": speed["value"] - 0.01}
    assert answered(records, summary)[0] == "quality"  # the speeds are not told apart, and it keeps more
    setting(summary, "quality")["speed_over"]["cloud"] = figure(3.1)
    assert answered(records, summary)[0] == "quality"
    del setting(summary, "quality")["speed_over"]["cloud"]  # not measured: it cannot be the fastest
    assert answered(records, summary)[0] == "auto"


def test_where_none_keeps_it_the_closest_is_named_and_said_to_fall_short(
    records: Records, summary: dict[str, Any]
) -> None:
    for one in summary["settings"]:
        one["measures"]["target_agreement"] = figure(0.94 if one["mode"] == "fluency" else 0.5)
    mode, sentences = answered(records, summary)
    assert mode == "fluency" and "No gated mode kept 0.95" in sentences[0]


def test_each_link_has_its_line_with_the_prompts_it_rests_on(records: Records, summary: dict[str, Any]) -> None:
    linked = {"link_ms": 80.0, "num_prompts": 6, "speed_over": {"cloud": figure(0.54, 0.36, 0.94)}}
    summary["settings"].append(setting(summary, "auto") | linked)
    records = records.model_copy(update={"run": records.run.model_copy(update={"links": (None, 80.0)})})
    sentences = answered(records, summary)[1]
    assert sentences[-1] == "Over a link of 80 ms: 0.54 (0.36 to 0.94) times (6 prompts)."


@pytest.mark.parametrize("without", ["cloud", "scores", "gates"])
def test_without_what_it_needs_there_is_no_answer(records: Records, summary: dict[str, Any], without: str) -> None:
    if without == "scores":
        for one in summary["settings"]:
            del one["measures"]["target_agreement"]
    left = {"cloud": {"cloud"}, "gates": {s["mode"] for s in summary["settings"]} - {"edge", "cloud", "lossless"}}
    summary["settings"] = [s for s in summary["settings"] if s["mode"] not in left.get(without, ())]
    assert answer(records.run, Summary.model_validate(summary)) is None
