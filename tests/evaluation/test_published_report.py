"""The report under docs/ says what the records beside it say."""

import json
import re
from pathlib import Path

import pytest

from skydraft.lab.evaluation.findings import Findings
from skydraft.lab.evaluation.records import read_records
from skydraft.lab.evaluation.report.page import write_report

FOLDER = Path(__file__).parents[2] / "docs" / "report-zh-dev"


def test_everything_beside_the_records_is_made_from_them(tmp_path: Path) -> None:
    published = json.loads((FOLDER / "summary.json").read_text(encoding="utf-8"))
    findings = Findings(read_records(FOLDER / "records.jsonl"))
    made = write_report(findings, tmp_path).model_dump(mode="json", by_alias=True)
    assert made["run"] == published["run"] and made["run"]["num_prompts"] == 62
    for mine, theirs in zip(made["settings"], published["settings"], strict=True):
        for of in ("measures", "differences", "speed_over"):
            assert mine[of].keys() == theirs[of].keys()
            for name, figure in mine[of].items():
                assert figure == pytest.approx(theirs[of][name], abs=2e-5), (mine["mode"], name)
    for name in ("report.html", "table.md"):
        ours, shown = ((folder / name).read_text(encoding="utf-8") for folder in (tmp_path, FOLDER))
        assert ours.count("<svg") == shown.count("<svg") == (name == "report.html")
        # Plots may differ with another version of matplotlib.
        assert len({re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL) for text in (ours, shown)}) == 1
