"""The calibrated gate: risks add up, and a text keeps the agreement that was asked for."""

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.engines.base import Engine
from skydraft.engines.toy import ToyEngine
from skydraft.gating.allowance import Allowance
from skydraft.gating.calibration import Calibration
from skydraft.gating.gates import Gate, parse_gate
from skydraft.gating.hand_back import HandBack
from skydraft.types import DraftBlock, Round, Signals, StepRecord

from .. import toys
from ..toys import PROMPT, law
from .test_calibration import made

# 1 less the middle of each bin, so that the risk of a token is 1 less its top probability, from 0.1 to 0.995.
RISKS = (0.9, 0.725, 0.575, 0.425, 0.275, 0.15, 0.075, 0.03, 0.005)


def calibration(*pair: Engine) -> Calibration:
    """The limit for an agreement A is 2 × (1 − A)."""
    draft, target = ({"name": "toy", "fingerprint": engine.fingerprint} for engine in pair)
    return made(draft=draft, target=target, risks=RISKS, points=[(0, 1, 0.5), (2, 0, 0)])


def gate(agreement: float) -> Gate:
    made = calibration(toys.toy(1), toys.toy(2))
    return Gate(parse_gate(f"calibrated:{agreement}"), Allowance(made, agreement, made.limit(agreement, 5, HandBack())))


def risk(signals: Signals) -> float:
    return 1 - min(max(signals.top_prob, 0.1), 0.995)


agreements = st.floats(0.05, 0.99)


@law(60)
@given(toys.pairs(), agreements, st.integers(1, 12), st.booleans())
def test_every_decision_follows_from_its_block(
    pair: tuple[ToyEngine, ToyEngine], agreement: float, k: int, ends_early: bool
) -> None:
    """A block is unsure once the sum of its risks passes the limit, and may end right there."""
    plan, params = make_plan(gate=f"calibrated:{agreement}", k=k), DecodingParams(max_new_tokens=40, min_new_tokens=40)
    plan = replace(plan, ends_early=ends_early)
    sides = {"edge": pair[0], "cloud": pair[1], "calibration": calibration(*pair)}
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
    allowance, num_left = Allowance(calibration(toys.toy(1), toys.toy(2)), 0.95, 1.4), 0
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
    allowance = Allowance(calibration(toys.toy(1), toys.toy(2)), 0.95, 1.005)
    block = DraftBlock(0, (1, 2, 3, 4), signals=(UNSURE,) * 4, forced=forced)
    Gate(parse_gate("calibrated:0.95"), allowance).observe(Round(record, block, (1, 2, 3, 4), ()))
    small = Signals(0.1, 0.98, 0.99)  # a risk of 0.01
    longest = next(length for length in range(1000) if allowance.is_unsure([small] * length)) - 1
    assert np.sign(longest - 100) == moves
