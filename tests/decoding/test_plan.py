"""Plans: modes, overrides, and options that cannot apply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skydraft.config import MAX_K, MODES
from skydraft.decoding.plan import Plan, make_plan
from skydraft.errors import OptionError
from skydraft.gating.gates import GateSpec, parse_gate
from skydraft.gating.hand_back import HandBack
from skydraft.types import WRITE_ALL

ALWAYS, NEVER = GateSpec("always"), GateSpec("never")
FLUENCY, QUALITY = GateSpec("entropy", 5.5), GateSpec("entropy", 3.25)
CALIBRATED = GateSpec("calibrated", 0.95)
RULES = ("start", "digits", "values")
AGREE = HandBack(WRITE_ALL, 4)
LOSSLESS = ({}, {"mode": "lossless"}, {"k": "auto"}, {"mode": "lossless", "gate": "always", "accept": "exact"})


@pytest.mark.parametrize(
    ("options", "plan", "verifies"),
    [
        *((given, Plan(ALWAYS, None, True, mode="lossless", hand_back=None), True) for given in LOSSLESS),
        ({"mode": "edge"}, Plan(NEVER, 1, True, mode="edge"), False),
        ({"mode": "cloud"}, Plan(ALWAYS, 1, False, mode="cloud"), True),
        ({"mode": "fluency"}, Plan(FLUENCY, 4, True, mode="fluency", hand_back=AGREE), True),
        ({"mode": "quality"}, Plan(QUALITY, 6, True, mode="quality", hand_back=AGREE), True),
        ({"mode": "quality", "k": 2}, Plan(QUALITY, 2, True, mode="quality", hand_back=AGREE), True),
        ({"mode": "quality", "k": "auto"}, Plan(QUALITY, None, True, mode="quality", hand_back=AGREE), True),
        ({"mode": "quality", "gate": "never"}, Plan(NEVER, 6, True, mode="quality"), False),
        (
            {"mode": "answers"},
            Plan(GateSpec("entropy", 3.25, RULES), 16, True, eager=True, mode="answers", hand_back=AGREE),
            True,
        ),
        ({"mode": "auto"}, Plan(CALIBRATED, 6, True, eager=True, mode="auto", hand_back=AGREE), True),
        (
            {"mode": "auto", "gate": "calibrated:0.9", "k": 8},
            Plan(GateSpec("calibrated", 0.9), 8, True, eager=True, mode="auto", hand_back=AGREE),
            True,
        ),
        (
            {"mode": "quality", "gate": "prob:0.5"},
            Plan(GateSpec("prob", 0.5), 6, True, mode="quality", hand_back=AGREE),
            True,
        ),
        ({"mode": "quality", "accept": "top:3"}, Plan(QUALITY, 6, True, top=3, mode="quality", hand_back=AGREE), True),
        ({"mode": "auto", "hand_back": "0"}, Plan(CALIBRATED, 6, True, eager=True, mode="auto"), True),
        (
            {"mode": "lossless", "hand_back": "text"},
            Plan(ALWAYS, None, mode="lossless", hand_back=HandBack(WRITE_ALL)),
            True,
        ),
        ({"k": 3, "hand_back": 8}, Plan(ALWAYS, 3, mode="lossless", hand_back=HandBack(8)), True),
        ({"gate": "prob:0.3", "hand_back": "agree:4"}, Plan(GateSpec("prob", 0.3), 5, hand_back=AGREE), True),
        ({"mode": "fluency", "eager": True}, Plan(FLUENCY, 4, True, eager=True, mode="fluency", hand_back=AGREE), True),
        ({"k": "7"}, Plan(ALWAYS, 7, True, mode="lossless"), True),
        *(({"k": k}, Plan(ALWAYS, k, True, mode="lossless"), True) for k in (1, MAX_K)),
        ({"gate": "never"}, Plan(NEVER, 5, True), False),
        ({"gate": "margin:0.2", "k": 3}, Plan(GateSpec("margin", 0.2), 3, True), True),
        ({"gate": "always", "accept": "top:2"}, Plan(ALWAYS, 5, True, top=2), True),
        ({"mode": "edge", "accept": "exact"}, Plan(NEVER, 1, True, mode="edge"), False),
    ],
)
def test_plans(options, plan, verifies):
    found = make_plan(**options)
    assert found == plan and found.mode == plan.mode
    assert found.verifies == verifies
    assert found.is_gated == (verifies and plan.gate != ALWAYS)


CONFLICTS: dict[str, list[dict[str, Any]]] = {
    "no mode 'turbo'": [{"mode": "turbo"}],
    "k does not apply": [{"mode": "edge", "k": 3}, {"mode": "cloud", "k": "auto"}],
    "gate does not apply": [{"mode": "edge", "gate": "always"}, {"mode": "cloud", "gate": "never"}],
    "eager does not apply": [{"mode": "edge", "eager": True}],
    "top does not apply": [{"mode": "cloud", "accept": "top:2"}],
    "lossy": [{"mode": "lossless", **more} for more in ({"gate": "never"}, {"gate": "entropy:3"}, {"accept": "top:1"})],
    "how unsure": [{**given, "eager": True} for given in ({"mode": "lossless"}, {"gate": "always"}, {"gate": "never"})],
    "checks nothing": [
        {"gate": "never", **mode, **more}
        for mode in ({}, {"mode": "quality"})
        for more in ({"k": "auto"}, {"accept": "top:5"})
    ],
    "from 1 to": [{"k": k} for k in (0, MAX_K + 1, -1, "many", "", "４")],
    "no hand-back": [
        {"hand_back": given, **more} for given in ("", "soon", True) for more in ({}, {"gate": "entropy:1"})
    ],
    "hand_back must be from 0 to": [{"hand_back": 2**31}],
    "no gate": [{"gate": "maybe"}],
    "accept rule": [
        {"gate": "always", "accept": rule}
        for rule in ("top:0", "top", "top:-1", "top:²", "top:٤", "top:" + "9" * 5000, "exact:1", "")
    ],
}


@pytest.mark.parametrize(("options", "says"), [(each, says) for says, found in CONFLICTS.items() for each in found])
def test_conflicts_are_refused_with_a_reason(options, says):
    with pytest.raises(OptionError, match=says) as raised:
        make_plan(**options)
    assert raised.value.exit_status == 2


def test_the_hint_for_an_accept_rule_alone_works():
    with pytest.raises(OptionError) as raised:
        make_plan(accept="top:5")
    assert "gate" in raised.value.hint


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_a_plan_and_some_model_works(mode):
    plan = make_plan(mode)
    assert plan.drafts or plan.verifies
    assert (plan.verifies, plan.mode) == (plan.gate.kind != "never", mode)


@pytest.mark.parametrize(
    ("gate", "parts", "says"),
    [
        *(("always", {"k": k}, "from 1 to") for k in (0, -3, MAX_K + 1)),
        ("always", {"top": -1}, "at least 1"),
        *((gate, {"drafts": False}, "nothing to decide") for gate in ("never", "entropy:3", "calibrated:0.9")),
        *((gate, {"eager": True}, f"gate {gate}, which does not look") for gate in ("always", "never")),
        *(("never", parts, "never, which checks nothing") for parts in ({"top": 5}, {"k": None})),
    ],
)
def test_a_plan_is_valid_or_not_there(gate, parts, says):
    with pytest.raises(OptionError, match=says) as raised:
        Plan(parse_gate(gate), **parts)
    assert raised.value.exit_status == 2
    with pytest.raises(OptionError, match=says):  # nor can a good one be turned into it
        replace(Plan(parse_gate(gate)), **parts)


@pytest.mark.parametrize(
    ("mode", "gate", "found"),
    [
        ("auto", None, "calibrated:0.95+start"),
        ("quality", "entropy:2+digits", "entropy:2+start+digits"),
        ("answers", None, "entropy:3.25+start+digits+values"),
        ("edge", None, "never"),
        ("lossless", None, "always"),
        ("cloud", None, "always"),
    ],
)
def test_the_start_is_checked_as_well_where_blocks_may_be_skipped(mode, gate, found):
    plan = make_plan(mode, gate=gate)
    assert str(plan.checking_start().gate) == found
    assert plan.checking_start().checking_start() == plan.checking_start()
