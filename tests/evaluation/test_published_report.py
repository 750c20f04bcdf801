"""The report under docs/ says what the records beside it say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from skydraft.evaluation.findings import Findings
from skydraft.evaluation.records import Records, read_records
from skydraft.evaluation.report.page import render
from skydraft.evaluation.summary import summarize

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


def test_the_bars_that_the_notes_state_are_met(published: dict[str, Any]) -> None:
    settings = {s["mode"]: s["measures"] for s in published["settings"]}
    for mode, asked in (("auto", 0.95), ("auto;k=12;hand-back=0", 0.95), ("auto;gate=calibrated:0.9", 0.90)):
        assert settings[mode]["target_agreement"]["value"] == pytest.approx(asked, abs=0.02)
    assert settings["auto"]["cloud_calls_per_token"]["value"] <= 0.06
    assert settings["auto"]["target_written_per_token"]["value"] <= 0.6
    assert settings["lossless"]["target_agreement"]["value"] == 1.0 == settings["lossless"]["same_as_cloud"]["value"]
