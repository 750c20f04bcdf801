"""Figures of the README and the notes that are taken from the committed report say what its summary says."""

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
NOTES = (ROOT / "NOTES.md").read_text(encoding="utf-8")
SUMMARY: dict[str, Any] = json.loads((ROOT / "docs/report-zh-dev/summary.json").read_text(encoding="utf-8"))
LINK_MS = 80.0
NAMES = {
    "lossless --k 5": "lossless;k=5",
    "auto --k 12 --hand-back 0": "auto;k=12;hand-back=0",
}  # as the README writes them, where the report has other names


def test_every_option_and_mode_that_the_readme_names_exists() -> None:
    help_text = generate.get_help(Context(generate))
    assert all(option in help_text for option in set(re.findall(r"`(--[a-z-]+)", README)) - {"--help"})
    assert set(re.findall(r"--mode ([a-z]+)", README)) <= set(MODES)


def value(mode: str, name: str, link_ms: float | None = None) -> float:
    """A measure of a mode; `speed` is that in units of cloud on the same link."""
    (setting,) = (s for s in SUMMARY["settings"] if s["mode"] == mode and s["link_ms"] == link_ms)
    figure = setting["speed_over"]["cloud"] if name == "speed" else setting["measures"][name]
    return float(figure["value"])


def rows() -> dict[str, list[str]]:
    """The table of presets: the other cells of a row by its mode."""
    table = README[README.index("| `--mode` | agreement") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    return {mode.strip("`"): rest for mode, *rest in cells}


def test_the_table_has_every_preset() -> None:
    assert set(rows()) == {*MODES, *NAMES}


@pytest.mark.parametrize("mode", [*MODES, *NAMES])
def test_a_row_of_the_table_is_that_of_the_summary(mode: str) -> None:
    columns = [("target_agreement", None), ("cloud_calls_per_token", None), ("target_written_per_token", None),
               ("target_rows_per_token", None), ("speed", None), ("speed", LINK_MS)]  # fmt: skip
    for shown, (name, link_ms) in zip(rows()[mode], columns, strict=True):
        if shown == "needs no link":
            assert mode == "edge"
            continue
        number = shown.partition(",")[0]
        digits = len(number.partition(".")[2])
        assert float(number) == pytest.approx(round(value(NAMES.get(mode, mode), name, link_ms), digits)), (
            name,
            link_ms,
        )


def test_the_conditions_beside_the_table_are_those_of_the_run() -> None:
    text = " ".join(README[README.index("Speed relative to") : README.index("## Try it")].split())
    run = SUMMARY["run"]
    tokens = run["modes"][0]["params"]["max_new_tokens"]
    assert f"{run['num_prompts']} prompts of the Chinese dev set, greedy, up to {tokens} tokens" in text
    assert run["machine"].split(",")[0] in text
    assert f"over the emulated link it ran {run['link_prompts']} of them" in text and LINK_MS in run["links"]


def test_the_notes_have_the_gates_of_the_summary() -> None:
    for mode in ("auto", "auto;k=12;hand-back=0", "auto;gate=calibrated:0.9", "quality", "lossless;k=5", "fluency"):
        (row,) = re.findall(rf"^\| `{re.escape(mode)}`[^|]*\| ([^|]*)\| ([^|]*)\| ([^|]*)\|$", NOTES, re.M)
        names = ("target_agreement", "cloud_calls_per_token", "target_written_per_token")
        assert [float(cell.split()[0]) for cell in row] == [round(value(mode, name), 3) for name in names], mode
