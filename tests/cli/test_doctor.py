"""`skydraft doctor` on hand-backs: what each costs here and over a link, if the pair has a calibration."""

from __future__ import annotations

import re
from pathlib import Path

from skydraft.engines.toy import open_toy
from skydraft.gating.calibration import Curve, CurvePoint

from ..evaluation import pairs
from ..serving import serving
from .conftest import Invoke, Refused

EDGE = ["--edge-model", "toy:drift=0.3"]
LINE = re.compile(r"^  (0|agree:4|cloud) +(\d\.\d{3}) calls  (\d\.\d{3}) written +([\d.]+) ms(?:  (.*))?$")


def calibrated(home: Path, *, has_figures: bool = True) -> None:
    """Put a calibration of the pair into the user's folder: a call in four tokens, or in twenty where 8 are written."""

    def curve(hand_back: str, calls: float, written: float, rows: float) -> Curve:
        figures = {"written_per_token": written, "rows_per_token": rows, "drafted_per_token": 1 - written}
        point = CurvePoint(limit=1, agreement=0.96, calls_per_token=calls, **(figures if has_figures else {}))
        return Curve(k=12, hand_back=hand_back, points=(point, CurvePoint(limit=9, agreement=0.5, calls_per_token=0)))

    made = pairs.calibration(0.3)
    curves = (curve("0", 0.25, 0.25, 0.75), curve("agree:4", 0.05, 0.45, 0.5))
    (home / "calibrations").mkdir(parents=True)
    text = made.model_copy(update={"curves": curves}).model_dump_json(by_alias=True)
    (home / "calibrations" / "toy.json").write_text(text, encoding="utf-8")


def lines(out: str) -> dict[str, tuple[str, ...]]:
    """The figures of each policy by its name."""
    found = [match.groups() for line in out.splitlines() if (match := LINE.match(line))]
    return {each[0]: each[1:] for each in found}


def test_hand_backs_are_compared_over_a_link(invoke: Invoke, tmp_path: Path) -> None:
    calibrated(tmp_path / "home")
    with serving(open_toy("toy")) as server:
        status, out, err = invoke("doctor", "--cloud", server.address, *EDGE)
    assert (status, err) == (0, "") and "times that the device" in out
    found = lines(out)
    assert {name: row[:2] for name, row in found.items()} == {
        "0": ("0.250", "0.250"), "agree:4": ("0.050", "0.450"), "cloud": ("0.016", "1.000"),
    }  # fmt: skip
    assert sum("fastest" in (row[3] or "") for row in found.values()) == 1


def test_hand_backs_are_compared_in_one_process(invoke: Invoke, tmp_path: Path) -> None:
    calibrated(tmp_path / "home")
    _, out, _ = invoke("doctor", *EDGE, "--cloud-model", "toy")
    assert list(lines(out)) == ["0", "agree:4", "cloud"] and "cheapest" not in out
    assert "lossless     with --k auto it " in out


def test_without_figures_it_says_what_to_do(invoke: Invoke, tmp_path: Path) -> None:
    toys = [*EDGE, "--cloud-model", "toy"]
    _, out, _ = invoke("doctor", *toys)
    assert "hand-backs   not compared: There is no calibration for toy:drift=0.3 and toy." in out
    calibrated(tmp_path / "home", has_figures=False)
    _, out, _ = invoke("doctor", *toys)
    assert "hand-backs   not compared: make the calibration again" in out and not lines(out)


def test_devices_are_simulated_from_what_one_does(invoke: Invoke, tmp_path: Path) -> None:
    calibrated(tmp_path / "home")
    with serving(open_toy("toy"), max_sessions=3) as server:
        command = ["doctor", "--cloud", server.address, *EDGE, "--devices", "5"]
        _, out, _ = invoke(*command)
        status, other, _ = invoke(*command, "--forward-ms", "1:100,2:200")
    number, rows = r"([\d.]+) +\d+ ms +(\d+) %", []
    for text in (out, other):
        assert "devices      simulated with " in text and "Simulated: at least half the speed" in text
        found = [re.findall(number, line) for line in text.splitlines() if re.match(r"  \d+ +\d+\.\d ", line)]
        rows.append([[float(speed) for speed, _ in cells] for cells in found])
        assert len(found) == 4 and all(len(cells) == 4 for cells in found)  # of 1, 2, 4, 5 devices, in four modes
    assert "serve --max-sessions 5" in out and status == 0
    assert rows[1][0][0] <= 10 and rows[1][0][0] / 2 * 0.9 <= rows[1][1][0] <= rows[1][0][0]  # a row takes 100 ms


def test_devices_that_cannot_be_simulated_are_refused(refused: Refused) -> None:
    refused("doctor", "--devices", "4", says="--devices simulates devices on a server")
    refused("doctor", "--devices", "4", "--cloud", "localhost:1", "--no-measure", says="--no-measure leaves out")
    refused("doctor", "--forward-ms", "1:5", "--cloud", "localhost:1", says="--forward-ms is for the simulation")
    refused("doctor", "--devices", "4", "--forward-ms", "5", "--cloud", "localhost:1", says="no times of forwards")
