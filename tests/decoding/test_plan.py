"""Plans: modes, overrides, and options that cannot apply."""

from __future__ import annotations

import pytest

from skydraft.config import MAX_K, MODES
from skydraft.decoding.gates import Gate
from skydraft.decoding.plan import Plan, make_plan
from skydraft.errors import OptionError


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({}, Plan(Gate("always"), 5, True, True)),
        ({"mode": "lossless"}, Plan(Gate("always"), 5, True, True)),
        ({"mode": "edge"}, Plan(Gate("never"), 1, True, False)),
        ({"mode": "cloud"}, Plan(Gate("always"), 1, False, True)),
        ({"mode": "fluency"}, Plan(Gate("entropy", 5.5), 4, True, True)),
        ({"mode": "quality"}, Plan(Gate("entropy", 3.25), 6, True, True)),
        ({"mode": "quality", "k": 2}, Plan(Gate("entropy", 3.25), 2, True, True)),
        ({"mode": "quality", "k": "auto"}, Plan(Gate("entropy", 3.25), None, True, True)),
        ({"mode": "auto"}, Plan(Gate("calibrated", 0.95), 12, True, True, eager=True)),
        ({"mode": "auto", "gate": "calibrated:0.9", "k": 8}, Plan(Gate("calibrated", 0.9), 8, True, True, eager=True)),
        ({"mode": "quality", "gate": "prob:0.5"}, Plan(Gate("prob", 0.5), 6, True, True)),
        ({"mode": "quality", "accept": "top:3"}, Plan(Gate("entropy", 3.25), 6, True, True, top=3)),
        ({"mode": "fluency", "eager": True}, Plan(Gate("entropy", 5.5), 4, True, True, eager=True)),
        ({"k": "7"}, Plan(Gate("always"), 7, True, True)),
        ({"k": "auto"}, Plan(Gate("always"), None, True, True)),
        ({"k": 1}, Plan(Gate("always"), 1, True, True)),
        ({"k": MAX_K}, Plan(Gate("always"), MAX_K, True, True)),
        ({"gate": "never"}, Plan(Gate("never"), 5, True, False)),
        ({"gate": "margin:0.2", "k": 3}, Plan(Gate("margin", 0.2), 3, True, True)),
        ({"gate": "always", "accept": "top:2"}, Plan(Gate("always"), 5, True, True, top=2)),
        ({"mode": "lossless", "gate": "always", "accept": "exact"}, Plan(Gate("always"), 5, True, True)),
        ({"mode": "edge", "accept": "exact"}, Plan(Gate("never"), 1, True, False)),
    ],
)
def test_plans(options, plan):
    assert make_plan(**options) == plan


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "turbo"}, "no mode 'turbo'"),
        ({"mode": "edge", "k": 3}, "--k cannot apply"),
        ({"mode": "edge", "gate": "always"}, "--gate cannot apply"),
        ({"mode": "edge", "eager": True}, "--eager cannot apply"),
        ({"mode": "cloud", "accept": "top:2"}, "--accept cannot apply"),
        ({"mode": "cloud", "k": "auto"}, "--k cannot apply"),
        ({"mode": "cloud", "gate": "never"}, "--gate cannot apply"),
        ({"mode": "lossless", "gate": "never"}, "lossy"),
        ({"mode": "lossless", "gate": "entropy:3"}, "lossy"),
        ({"mode": "lossless", "accept": "top:1"}, "lossy"),
        ({"mode": "lossless", "eager": True}, "never sees"),
        ({"gate": "always", "eager": True}, "never sees"),
        ({"gate": "never", "eager": True}, "never sees"),
        ({"gate": "never", "k": "auto"}, "does not verify"),
        ({"mode": "quality", "gate": "never", "k": "auto"}, "does not verify"),
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
    assert "--gate" in raised.value.hint


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_a_plan_and_some_model_works(mode):
    plan = make_plan(mode)
    assert plan.drafts or plan.verifies
    assert plan.verifies == (plan.gate.kind != "never")
