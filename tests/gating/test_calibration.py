"""Calibrations: a limit follows the curve, and another pair's file is refused in one line."""

import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from skydraft.errors import OptionError, RecordsError
from skydraft.files import write_whole
from skydraft.gating.calibration import NUM_BINS, Calibration, find_calibration, read_calibration
from skydraft.gating.hand_back import HandBack, parse_hand_back

from ..evaluation.lines import assert_refused

NONE = HandBack()
SHIPPED = list(resources.files("skydraft.gating").joinpath("calibrations").iterdir())
CURVE = [(0.0, 1.0, 0.6), (0.5, 0.9, 0.3), (1.5, 0.9, 0.2), (2.0, 0.8, 0.1), (4.0, 0.6, 0.0)]


def written(workload: str = "w", points: Sequence[tuple[float, ...]] = CURVE, **changes: Any) -> dict[str, Any]:
    """A calibration as it stands in a file."""
    named = [dict(zip(("limit", "agreement", "calls_per_token"), point, strict=True)) for point in points]
    return {
        "kind": "skydraft-calibration", "schema": 3, "draft": {"name": "small", "fingerprint": "d" * 32},
        "target": {"name": "large", "fingerprint": "e" * 32}, "risks": [0.5] * NUM_BINS,
        "curves": [{"k": 5, "points": named}], "fitted": {"workload": workload, "num_tokens": 300}, **changes,
    }  # fmt: skip


def made(**changes: Any) -> Calibration:
    return Calibration.model_validate(written(**changes))


@pytest.mark.parametrize(("agreement", "limit"), [
    (0.7, 3.0), (0.61, 3.9), (0.8, 2.0), (0.85, 1.75), (0.9, 1.5), (0.95, 0.25), (1.0, 0.0),
    (0.6, 4.0), (0.59, 4.0), (0.0, 4.0),  # the draft model reaches as much alone
])  # fmt: skip
def test_a_limit_lies_between_those_of_the_curve(agreement: float, limit: float) -> None:
    assert made().limit(agreement, 5, NONE) == pytest.approx(limit)


@pytest.mark.parametrize("agreement", [1.01, float("nan")])
def test_an_agreement_that_the_curve_does_not_know_is_refused(agreement: float) -> None:
    with pytest.raises(OptionError, match=r"up to 1\.00.*mode lossless"):
        made().limit(agreement, 5, NONE)


FALLING = [(1.0, 1.0, 0.5), (0.5, 0.9, 0.3)], [(0.0, 0.9, 0.5), (0.5, 0.95, 0.3)]
BROKEN: dict[str, tuple[Any, str]] = {
    "not there": (None, "c.json cannot be read: No such file"),
    "another schema": (written(schema=2), "schema"), "an unknown field": (written(colour="red"), "colour"),
    "too few risks": (written(risks=[0.5, 0.2]), "risks"), "a curve of one point": (written(points=CURVE[:1]), "curve"),
    "limits that fall": (written(points=FALLING[0]), "low limit and a high agreement"),
    "agreements that rise": (written(points=FALLING[1]), "low limit and a high agreement"),
    "no number": (written(points=[(0.0, float("nan"), 0.5), (0.5, 0.9, 0.3)]), "agreement"),
    "a target without a name": (written(target={"name": "", "fingerprint": "e" * 32}), "target.name"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_one_clear_line(content: Any, says: str, tmp_path: Path) -> None:
    data = None if content is None else json.dumps(content).encode()
    assert_refused(read_calibration, tmp_path / "c.json", data, says, RecordsError)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    text = made().model_dump_json(by_alias=True, exclude_unset=True)
    (tmp_path / "c.json").write_text(text)
    assert read_calibration(tmp_path / "c.json") == made() and json.loads(text) == written()


@pytest.mark.parametrize(("draft", "target", "fits"), [
    ("d" * 32, "e" * 32, True),
    ("d" * 32, None, True),  # a target that cannot be asked
    ("d" * 32, "f" * 32, False),
    ("f" * 32, "e" * 32, False),
    ("e" * 32, "d" * 32, False),  # the other way round
    ("small", "large", False),  # names say nothing
    ("d" * 32, "name:large", True),  # a server that tells only its model's name
    ("d" * 32, "name:My-large-7B", False),
    ("d" * 32, "", False),  # a server that tells nothing
])  # fmt: skip
def test_a_calibration_belongs_to_the_weights_of_a_pair(draft: str, target: str | None, fits: bool) -> None:
    calibration = made()
    assert calibration.fits(draft, target) == fits
    if fits:
        assert find_calibration([], draft, target, "mine and yours", calibration) is calibration
    else:
        says = r"for small and large; it does not fit mine and yours.*skydraft (learn )?calibrate"
        with pytest.raises(OptionError, match=says):
            find_calibration([], draft, target, "mine and yours", calibration)


def found_in(folder: Path, *contents: Any) -> Callable[..., Any]:
    """What says which workload the calibration is of that is found among files with these contents, in this order."""
    for number, content in enumerate(contents):
        write_whole(folder / f"{number}.json", json.dumps(content).encode())
    return lambda *pair: find_calibration([folder / "none", folder], *pair, "mine and yours").fitted["workload"]


def test_the_first_that_fits_is_found(tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("no calibration")
    other = {"draft": {"name": "small", "fingerprint": "9" * 32}}
    found = found_in(tmp_path, written("other", **other), written("first"), written("second"))
    assert [found("d" * 32, "e" * 32), found("9" * 32, None)] == ["first", "other"]
    with pytest.raises(OptionError, match=r"no calibration for mine and yours.*skydraft calibrate"):
        found("8" * 32, None)
    for name in "12":  # a file counts until another takes its place
        found = found_in(tmp_path, written("other", **other), written(name))
        assert [found("d" * 32, "e" * 32) for _ in range(3)] == [name] * 3


def test_one_made_with_exactly_this_target_goes_before_one_of_the_same_name(tmp_path: Path) -> None:
    at_server = {"name": "large", "fingerprint": "name:large"}
    found = found_in(tmp_path, written("1"), written("2", target=at_server))
    assert [found("d" * 32, target) for target in ("name:large", "e" * 32)] == ["2", "1"]
    with pytest.raises(OptionError, match=r"skydraft learn calibrate.* runs large, start it under that name"):
        found("d" * 32, "name:other")


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_calibration_parses_and_is_found_by_its_pair(shipped: Any) -> None:
    text = shipped.read_text(encoding="utf-8")
    calibration = Calibration.model_validate_json(text)
    hand_backs = {curve.hand_back for curve in calibration.curves}
    assert len(text) < 200_000 and hand_backs == {"0", "agree:2", "agree:4", "agree:6", "8", "text"}
    for curve in calibration.curves:
        assert curve.points[0].agreement == 1 and curve.points[-1].calls_per_token == 0
    assert find_calibration([], calibration.draft.fingerprint, calibration.target.fingerprint, "") == calibration


def test_a_hand_back_without_curves_takes_those_without_one() -> None:
    every = [("0", 2), ("0", 4), ("0", 8), ("agree:4", 4), ("agree:4", 8)]
    found = made(curves=[{**written()["curves"][0], "k": k, "hand_back": name} for name, k in every])
    for name, k, expected in (
        ("agree:4", 8, ("agree:4", 8)), ("agree:4", 6, ("agree:4", 4)), ("agree:3", 8, ("0", 8)), ("text", 6, ("0", 4)),
        ("0", 99, ("0", 8)), ("0", 1, ("0", 2)),
        # the limit of a longer block would keep less than was asked for
        ("agree:4", 2, ("0", 2)), ("agree:4", 3, ("0", 2)),
    ):  # fmt: skip
        curve = found.curve(k, parse_hand_back(name))
        assert (curve.hand_back, curve.k) == expected
