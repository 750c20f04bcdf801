"""Figures in the README, docs/modes.md and the notes that come from the committed report are those of its summary."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from click import Context

from skydraft.cli.generate import generate
from skydraft.config import MODES

from .blocks import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/modes.md").read_text(encoding="utf-8")
NOTES = (ROOT / "NOTES.md").read_text(encoding="utf-8")
SUMMARY: dict[str, Any] = json.loads((ROOT / "docs/report-zh-dev/summary.json").read_text(encoding="utf-8"))
LINK_MS = 80.0
# As the page writes them, where the report has other names.
NAMES = {"lossless --k 5": "lossless;k=5", "auto --k 12 --hand-back 0": "auto;k=12;hand-back=0"}
COLUMNS = {
    "README.md": ("target_agreement", "cloud_calls_per_token", "target_written_per_token", "speed"),
    "docs/modes.md": ("target_agreement", "cloud_calls_per_token", "target_written_per_token",
                      "target_rows_per_token", "speed", "speed over a link"),
}  # fmt: skip


@pytest.mark.parametrize("text", [README, PAGE], ids=list(COLUMNS))
def test_every_option_and_mode_that_a_page_names_exists(text: str) -> None:
    help_text = generate.get_help(Context(generate))
    assert all(option in help_text for option in set(re.findall(r"`(--[a-z-]+)", text)) - {"--help"})
    assert set(re.findall(r"--mode ([a-z]+)", text)) <= set(MODES)


def value(mode: str, name: str) -> float:
    """A measure of a mode; `speed` is that in units of cloud on the same link."""
    link_ms = LINK_MS if name == "speed over a link" else None
    (setting,) = (s for s in SUMMARY["settings"] if s["mode"] == mode and s["link_ms"] == link_ms)
    figure = setting["speed_over"]["cloud"] if name.startswith("speed") else setting["measures"][name]
    return float(figure["value"])


def rows(text: str) -> dict[str, list[str]]:
    table = text[text.index("| `--mode` | agreement") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    return {mode.split("`")[1]: rest for mode, *rest in cells}


@pytest.mark.parametrize("page", COLUMNS)
def test_the_table_has_every_preset_as_the_summary_has_it(page: str) -> None:
    measured = set(MODES) & {each["mode"] for each in SUMMARY["settings"]}
    table = rows((ROOT / page).read_text(encoding="utf-8"))
    assert set(table) == measured | set(NAMES if page == "docs/modes.md" else ())
    cells = [(mode, *cell) for mode, row in table.items() for cell in zip(row, COLUMNS[page], strict=True)]
    assert ("edge", "needs no link", "speed over a link") in cells or page == "README.md"
    for mode, shown, name in cells:
        if shown != "needs no link":
            digits = len(shown.partition(".")[2])
            assert float(shown) == pytest.approx(round(value(NAMES.get(mode, mode), name), digits)), (mode, name)


def test_the_presets_are_those_of_the_page() -> None:
    table = PAGE[PAGE.index("| `--mode` | gate") :].split("\n\n")[0].splitlines()[2:]
    shown = {row.split("`")[1]: [cell.strip() for cell in row.split("|")[2:4]] for row in table}
    assert {mode: gate for mode, (gate, _) in shown.items()} == {mode: spec.gate for mode, spec in MODES.items()}
    for mode, spec in MODES.items():
        assert shown[mode][1].removeprefix("up to ") == ("–" if spec.k is None else str(spec.k)), mode


def test_the_notes_have_the_gates_of_the_summary() -> None:
    for mode in ("auto", "auto;k=12;hand-back=0", "auto;gate=calibrated:0.9", "quality", "lossless;k=5", "fluency"):
        (row,) = re.findall(rf"^\| `{re.escape(mode)}`[^|]*\| ([^|]*)\| ([^|]*)\| ([^|]*)\|$", NOTES, re.M)
        names = ("target_agreement", "cloud_calls_per_token", "target_written_per_token")
        assert [float(cell.split()[0]) for cell in row] == [round(value(mode, name), 3) for name in names], mode


def test_what_learning_brings_is_as_measured() -> None:
    page = (ROOT / "docs/learning.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "docs/learned/figures.json").read_text(encoding="utf-8"))["arithmetic"]
    for mode in ("edge", "quality", "auto"):
        before, after = found[mode], found[f"{mode}-learned"]
        assert before["tasks"] == after["tasks"]
        cells = [str(before["tasks"])]
        for name, digits in (("right", 2), ("calls", 3), ("written", 2)):
            old, new = (f"{each[name]['value']:.{digits}f}" for each in (before, after))
            cells.append(f"{old} → {new}" if float(new) else "0")
        assert f"| `{mode}` | {' | '.join(cells)} |" in page
    assert f"| `cloud` | {found['cloud']['tasks']} | {found['cloud']['right']['value']:.2f} |" in page
