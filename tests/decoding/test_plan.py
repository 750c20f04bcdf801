"""Plans: modes, overrides, and options that cannot apply."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skydraft.config import MAX_K, MODES
from skydraft.decoding.plan import Plan, make_plan
from skydraft.errors import OptionError
from skydraft.gating.gates import GateSpec, parse_gate

ALWAYS, NEVER = GateSpec("always"), GateSpec("never")
FLUENCY, QUALITY = GateSpec("entropy", 5.5), GateSpec("entropy", 3.25)
CALIBRATED = GateSpec("calibrated", 0.95)


@pytest.mark.parametrize(
    ("options", "plan", "verifies"),
    [
        ({}, Plan(ALWAYS, None, True, mode="lossless"), True),
        ({"mode": "lossless"}, Plan(ALWAYS, None, True, mode="lossless"), True),
        ({"mode": "edge"}, Plan(NEVER, 1, True, mode="edge"), False),
        ({"mode": "cloud"}, Plan(ALWAYS, 1, False, mode="cloud"), True),
        ({"mode": "fluency"}, Plan(FLUENCY, 4, True, mode="fluency"), True),
        ({"mode": "quality"}, Plan(QUALITY, 6, True, mode="quality"), True),
        ({"mode": "quality", "k": 2}, Plan(QUALITY, 2, True, mode="quality"), True),
        ({"mode": "quality", "k": "auto"}, Plan(QUALITY, None, True, mode="quality"), True),
        ({"mode": "quality", "gate": "never"}, Plan(NEVER, 6, True, mode="quality"), False),
        ({"mode": "auto"}, Plan(CALIBRATED, 12, True, eager=True, mode="auto"), True),
        (
            {"mode": "auto", "gate": "calibrated:0.9", "k": 8},
            Plan(GateSpec("calibrated", 0.9), 8, True, eager=True, mode="auto"),
            True,
        ),
        ({"mode": "quality", "gate": "prob:0.5"}, Plan(GateSpec("prob", 0.5), 6, True, mode="quality"), True),
        ({"mode": "quality", "accept": "top:3"}, Plan(QUALITY, 6, True, top=3, mode="quality"), True),
        ({"mode": "fluency", "eager": True}, Plan(FLUENCY, 4, True, eager=True, mode="fluency"), True),
        ({"k": "7"}, Plan(ALWAYS, 7, True, mode="lossless"), True),
        ({"k": "auto"}, Plan(ALWAYS, None, True, mode="lossless"), True),
        ({"k": 1}, Plan(ALWAYS, 1, True, mode="lossless"), True),
        ({"k": MAX_K}, Plan(ALWAYS, MAX_K, True, mode="lossless"), True),
        ({"gate": "never"}, Plan(NEVER, 5, True), False),
        ({"gate": "margin:0.2", "k": 3}, Plan(GateSpec("margin", 0.2), 3, True), True),
        ({"gate": "always", "accept": "top:2"}, Plan(ALWAYS, 5, True, top=2), True),
        ({"mode": "lossless", "gate": "always", "accept": "exact"}, Plan(ALWAYS, None, True, mode="lossless"), True),
        ({"mode": "edge", "accept": "exact"}, Plan(NEVER, 1, True, mode="edge"), False),
    ],
)
def test_plans(options, plan, verifies, as_shipped):
    found = make_plan(**options)
    assert found == plan and found.mode == plan.mode
    assert found.verifies == verifies
    assert found.is_gated == (verifies and plan.gate != ALWAYS)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "turbo"}, "no mode 'turbo'"),
        ({"mode": "edge", "k": 3}, "k does not apply"),
        ({"mode": "edge", "gate": "always"}, "gate does not apply"),
        ({"mode": "edge", "eager": True}, "eager does not apply"),
        ({"mode": "cloud", "accept": "top:2"}, "top does not apply"),
        ({"mode": "cloud", "k": "auto"}, "k does not apply"),
        ({"mode": "cloud", "gate": "never"}, "gate does not apply"),
        ({"mode": "lossless", "gate": "never"}, "lossy"),
        ({"mode": "lossless", "gate": "entropy:3"}, "lossy"),
        ({"mode": "lossless", "accept": "top:1"}, "lossy"),
        ({"mode": "lossless", "eager": True}, "how unsure"),
        ({"gate": "always", "eager": True}, "how unsure"),
        ({"gate": "never", "eager": True}, "how unsure"),
        ({"gate": "never", "k": "auto"}, "checks nothing"),
        ({"mode": "quality", "gate": "never", "k": "auto"}, "checks nothing"),
        ({"k": 0}, "from 1 to"),
        ({"k": MAX_K + 1}, "from 1 to"),
        ({"k": -1}, "from 1 to"),
        ({"k": "many"}, "from 1 to"),
        ({"k": ""}, "from 1 to"),
        ({"gate": "maybe"}, "no gate"),
        ({"gate": "always", "accept": "top:0"}, "accept rule"),
        ({"gate": "always", "accept": "top"}, "accept rule"),
        ({"gate": "always", "accept": "top:-1"}, "accept rule"),
        ({"gate": "always", "accept": "top:²"}, "accept rule"),
        ({"gate": "always", "accept": "exact:1"}, "accept rule"),
        ({"gate": "always", "accept": ""}, "accept rule"),
    ],
)
def test_conflicts_are_refused_with_a_reason(options, says):
    with pytest.raises(OptionError, match=says) as raised:
        make_plan(**options)
    assert raised.value.exit_status == 2


@pytest.mark.parametrize("options", [{"gate": "never"}, {"mode": "quality", "gate": "never"}])
def test_an_accept_rule_without_verification_is_refused(options):
    with pytest.raises(OptionError):
        make_plan(**options, accept="top:5")


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
        ("always", {"k": 0}, "from 1 to"),
        ("always", {"k": -3}, "from 1 to"),
        ("always", {"k": MAX_K + 1}, "from 1 to"),
        ("always", {"top": -1}, "at least 1"),
        ("never", {"drafts": False}, "gate never has nothing to decide"),
        ("entropy:3", {"drafts": False}, "gate entropy has nothing to decide"),
        ("calibrated:0.9", {"drafts": False}, "gate calibrated has nothing to decide"),
        ("always", {"eager": True}, "gate always, which does not look"),
        ("never", {"eager": True}, "gate never, which does not look"),
        ("never", {"top": 5}, "never, which checks nothing"),
        ("never", {"k": None}, "never, which checks nothing"),
    ],
)
def test_a_plan_is_valid_or_not_there(gate, parts, says):
    with pytest.raises(OptionError, match=says) as raised:
        Plan(parse_gate(gate), **parts)
    assert raised.value.exit_status == 2
    with pytest.raises(OptionError, match=says):  # nor can a good one be turned into it
        replace(Plan(parse_gate(gate)), **parts)
