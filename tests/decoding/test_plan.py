"""Plans: modes, overrides, and options that cannot apply."""

from dataclasses import replace
from typing import Any

import pytest

from skydraft.config import MAX_K
from skydraft.decoding.plan import Plan, make_plan
from skydraft.errors import OptionError
from skydraft.gating.gates import GateSpec, parse_gate
from skydraft.gating.hand_back import HandBack, parse_hand_back
from skydraft.types import WRITE_ALL

ALWAYS, NEVER, MARGIN = GateSpec("always"), GateSpec("never"), GateSpec("margin", 0.0)
RULES = ("start", "digits", "dates", "values")
AGREE = HandBack(WRITE_ALL, 4)
LOSSLESS = ({}, {"mode": "lossless"}, {"mode": "lossless", "gate": "always"})
UNUSED = ({}, {"k": 3, "hand_back": "agree:2"})
AUTO = Plan(GateSpec("calibrated", 0.95), 6, ends_early=True, mode="auto", hand_back=AGREE)
IN_QUALITY = Plan(GateSpec("entropy", 3.25), 6, mode="quality")
STARTED = Plan(GateSpec("entropy", 3.25, RULES), 16, ends_early=True, mode="answers", hand_back=AGREE)


@pytest.mark.parametrize(("options", "plan", "verifies"), [
    *((given, Plan(ALWAYS, None, mode="lossless", hand_back=None), True) for given in LOSSLESS),
    # One model alone has no use for a block length or a hand-back.
    *(({"mode": "edge", **more}, Plan(NEVER, 1, mode="edge"), False) for more in UNUSED),
    *(({"mode": "cloud", **more}, Plan(ALWAYS, 1, False, mode="cloud"), True) for more in UNUSED),
    ({"mode": "fluency"}, Plan(GateSpec("entropy", 5.5), 4, mode="fluency", hand_back=AGREE), True),
    ({"mode": "quality"}, IN_QUALITY, True),
    ({"mode": "quality", "gate": "never"}, replace(IN_QUALITY, gate=NEVER), False),
    ({"mode": "quality", "gate": "margin:0", "k": 3}, replace(IN_QUALITY, gate=MARGIN, k=3), True),
    ({"mode": "answers"}, STARTED, True),
    ({"mode": "auto", "gate": "calibrated:0.9"}, replace(AUTO, gate=GateSpec("calibrated", 0.9)), True),
    ({"mode": "auto", "gate": "always"}, replace(AUTO, gate=ALWAYS, ends_early=False), True),
    ({"mode": "auto", "hand_back": "0"}, replace(AUTO, hand_back=HandBack()), True),
    ({"hand_back": "text"}, Plan(ALWAYS, 5, mode="lossless", hand_back=HandBack(WRITE_ALL)), True),
    ({"k": 3, "hand_back": 8}, Plan(ALWAYS, 3, mode="lossless", hand_back=HandBack(8)), True),
    ({"gate": "prob:0.3", "hand_back": "agree:4"}, Plan(GateSpec("prob", 0.3), 5, hand_back=AGREE), True),
    ({"k": "7"}, Plan(ALWAYS, 7, mode="lossless"), True), ({"gate": "never"}, Plan(NEVER, 5), False),
])  # fmt: skip
def test_plans(options, plan, verifies):
    found = make_plan(**options)
    assert found == plan and found.mode == plan.mode
    assert found.verifies == verifies
    assert found.is_gated == (verifies and plan.gate != ALWAYS)
    assert found.may_go_alone == (verifies and plan.mode != "cloud")


NO_HAND_BACKS = ["", "-1", "2147483648", "agree", "agree:0", "agree:65", "text:3", "all", "²", "４", "agree:٤", "none"]
CONFLICTS: dict[str, list[dict[str, Any]]] = {
    "no mode 'turbo'": [{"mode": "turbo"}],
    "gate does not apply": [{"mode": "edge", "gate": "always"}, {"mode": "cloud", "gate": "never"}],
    "lossy": [{"mode": "lossless", "gate": gate} for gate in ("never", "entropy:3")],
    "from 1 to": [{"k": k} for k in (0, MAX_K + 1, -1, "auto", "", "４")],
    "no hand-back": [{"hand_back": text} for text in NO_HAND_BACKS],
    "no gate": [{"gate": "maybe"}],
}


@pytest.mark.parametrize(("options", "says"), [(each, says) for says, found in CONFLICTS.items() for each in found])
def test_conflicts_are_refused_with_a_reason(options, says):
    with pytest.raises(OptionError, match=says) as raised:
        make_plan(**options)
    assert raised.value.exit_status == 2 and "\n" not in raised.value.line


def test_a_good_plan_cannot_be_turned_into_a_bad_one():
    with pytest.raises(OptionError, match="from 1 to"):
        replace(make_plan("quality"), k=0)


@pytest.mark.parametrize("text", ["0", "1", "12", "agree:1", "agree:64", "text"])
def test_a_hand_back_is_written_as_it_is_read(text):
    assert str(parse_hand_back(text)) == text


@pytest.mark.parametrize(("mode", "gate", "found"), [
    ("auto", None, "calibrated:0.95+start"), ("quality", "entropy:2+digits+dates", "entropy:2+start+digits+dates"),
    ("answers", None, "entropy:3.25+start+digits+dates+values"), ("edge", None, "never"),
    ("lossless", None, "always"),
])  # fmt: skip
def test_the_start_is_checked_as_well_where_blocks_may_be_skipped(mode, gate, found):
    plan = make_plan(mode, gate=gate)
    assert str(plan.checking_start().gate) == found and parse_gate(found) == plan.checking_start().gate
    assert plan.checking_start().checking_start() == plan.checking_start()
