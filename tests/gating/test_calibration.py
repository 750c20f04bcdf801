"""Calibrations: a limit follows the curve, another pair's file is refused in one line, and a gate that goes by one
keeps the agreement that was asked for.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.engines.base import Engine
from skydraft.engines.toy import ToyEngine
from skydraft.errors import OptionError, RecordsError
from skydraft.files import write_whole
from skydraft.gating.allowance import Allowance
from skydraft.gating.calibration import NUM_BINS, Calibration, find_calibration, read_calibration
from skydraft.gating.gates import Gate, parse_gate
from skydraft.gating.hand_back import HandBack, parse_hand_back
from skydraft.types import DraftBlock, Round, Signals, StepRecord

from .. import toys
from ..evaluation.lines import assert_refused
from ..toys import PROMPT, law

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


# 1 less the middle of each bin, so that the risk of a token is 1 less its top probability, from 0.1 to 0.995.
RISKS = (0.9, 0.725, 0.575, 0.425, 0.275, 0.15, 0.075, 0.03, 0.005)


def calibration_of(*pair: Engine) -> Calibration:
    """The limit for an agreement A is 2 × (1 − A)."""
    draft, target = ({"name": "toy", "fingerprint": engine.fingerprint} for engine in pair)
    return made(draft=draft, target=target, risks=RISKS, points=[(0, 1, 0.5), (2, 0, 0)])


def gate(agreement: float) -> Gate:
    made = calibration_of(toys.toy(1), toys.toy(2))
    return Gate(parse_gate(f"calibrated:{agreement}"), Allowance(made, agreement, made.limit(agreement, 5, HandBack())))


def risk(signals: Signals) -> float:
    return 1 - min(max(signals.top_prob, 0.1), 0.995)


agreements = st.floats(0.05, 0.99)


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


@law(60)
@given(toys.pairs(), agreements, st.integers(1, 12), st.booleans())
def test_every_decision_follows_from_its_block(
    pair: tuple[ToyEngine, ToyEngine], agreement: float, k: int, ends_early: bool
) -> None:
    """A block is unsure once the sum of its risks passes the limit, and may end right there."""
    plan, params = make_plan(gate=f"calibrated:{agreement}", k=k), DecodingParams(max_new_tokens=40, min_new_tokens=40)
    plan = replace(plan, ends_early=ends_early)
    sides = {"edge": pair[0], "cloud": pair[1], "calibration": calibration_of(*pair)}
    limit = 2 * (1 - agreement)
    for done, _ in skydraft.generate(PROMPT, **sides, plan=plan, params=params, raw=True).rounds():
        *sums, of_block = accumulate(map(risk, done.block.signals), initial=0.0)
        assert not (ends_early and any(each > limit for each in sums))
        assert (done.block.ended_by == "gate") <= (ends_early and of_block > limit)
        assert len(sums) == k or done.block.ended_by != "k"
        expected = "uncertain" if of_block > limit else ""
        assert done.record.reason == expected or (done.record.reason in ("density", "repetition") and not expected)
        unchecked = of_block if done.record.outcome == "skipped" else 0
        limit *= math.exp(0.5 * ((1 - agreement) * done.record.num_committed - unchecked))
        limit = min(limit, 3 * 2 * (1 - agreement))


def test_a_sure_stretch_does_not_switch_the_gate_off() -> None:
    """Of tokens that are wrong more often than not, few are left unchecked, however much came before."""
    allowance, num_left = Allowance(calibration_of(toys.toy(1), toys.toy(2)), 0.95, 1.4), 0
    for _ in range(500):
        allowance.observe(6, [Signals(0.0, 1.0, 0.9999)] * 6)
    while not allowance.is_unsure(hard := [Signals(2.0, 0.1, 0.4)] * 6):
        allowance.observe(6, hard)
        num_left += 6
    assert num_left <= 6


UNSURE = Signals(1.0, 0.3, 0.6)
LAST = StepRecord(0, 0, 4, 0, 4, "skipped", "", 1.0, 1.0)


@pytest.mark.parametrize(("record", "forced", "moves"), [
    (LAST, (), -1), (replace(LAST, num_forced=4), (True,) * 4, 0),
    (replace(LAST, num_forced=3), (True, True, True, False), -1),
    (replace(LAST, outcome="fallback", reason="uncertain"), (), 0),
    (replace(LAST, outcome="verified", reason="uncertain", num_accepted=4), (), 1),
    (replace(LAST, outcome="verified", reason="content", num_accepted=4), (), 0),
], ids=["skipped", "forced", "forced-but-one", "fallback", "checked", "by-a-rule"])  # fmt: skip
def test_what_a_round_tells_a_calibrated_gate(record: StepRecord, forced: tuple[bool, ...], moves: int) -> None:
    """Risks of 0.4 a token, one in twenty allowed: a skipped block makes it stricter, a checked one looser."""
    allowance = Allowance(calibration_of(toys.toy(1), toys.toy(2)), 0.95, 1.005)
    block = DraftBlock(0, (1, 2, 3, 4), signals=(UNSURE,) * 4, forced=forced)
    Gate(parse_gate("calibrated:0.95"), allowance).observe(Round(record, block, (1, 2, 3, 4), ()))
    small = Signals(0.1, 0.98, 0.99)  # a risk of 0.01
    longest = next(length for length in range(1000) if allowance.is_unsure([small] * length)) - 1
    assert np.sign(longest - 100) == moves
