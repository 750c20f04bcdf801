"""Plans and requests: modes, overrides, options that cannot apply; checked once, before anything is computed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skydraft
from skydraft import DecodingParams, GenerateRequest, decoding_params, generate, make_plan
from skydraft.config import MAX_K
from skydraft.decoding.builder import prompted
from skydraft.decoding.plan import Plan
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError, PromptError, UsageError, VocabularyMismatch
from skydraft.gating.calibration import read_calibration
from skydraft.gating.gates import GateSpec, parse_gate
from skydraft.gating.hand_back import HandBack, parse_hand_back
from skydraft.prompts.audio import Audio
from skydraft.prompts.messages import Message, asked
from skydraft.types import WRITE_ALL

from .. import toys
from ..prompts.test_chat_template import TEMPLATES

ALWAYS, NEVER, MARGIN = GateSpec("always"), GateSpec("never"), GateSpec("margin", 0.0)
RULES = ("start", "digits", "dates", "values")
AGREE = HandBack(WRITE_ALL, 4)
LOSSLESS = ({}, {"mode": "lossless"}, {"mode": "lossless", "gate": "always"})
UNUSED = ({}, {"k": 3, "hand_back": "agree:2"})
AUTO = Plan(GateSpec("calibrated", 0.95), 6, ends_early=True, mode="auto", hand_back=AGREE)
IN_QUALITY = Plan(GateSpec("entropy", 3.25), 6, mode="quality")
STARTED = Plan(GateSpec("entropy", 3.25, RULES), 16, ends_early=True, mode="answers", hand_back=AGREE)

SPOKEN = asked("我", audio=Audio(np.zeros(1600, np.float32)))
SIMPLE = GenerateRequest(asked("我"))
HALF = "\ud800"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [HALF]}}}
HALVES = [
    {"messages": asked("a", HALF)}, {"messages": [Message("assistant", "", (("tool_calls", [CALL]),))]},
    {"params": decoding_params(stop=HALF)}, {"params": DecodingParams(think_end=HALF)}, {"prediction": HALF},
    {"tools": ({"function": {"name": "f", "parameters": {"properties": {HALF: {}}}}},)}, {"cache_scope": HALF},
    {"settings": (("x", HALF),)},
]  # fmt: skip


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


@pytest.mark.parametrize(("parts", "error", "says"), [
    ({"messages": ()}, PromptError, "no prompt"),
    ({"messages": asked("我", "你"), "raw": True}, OptionError, "raw continues a single text"),
    *(({"execution": each}, OptionError, f"exact, throughput, not '{each}'") for each in ("Exact", "")),
    *((each, PromptError, "half of a character") for each in HALVES),
    *(
        ({"messages": SPOKEN, "share_audio": "none", "plan": make_plan(mode)}, OptionError, "does not hear")
        for mode in ("cloud", "lossless", "quality")
    ),
    *(({name: given}, OptionError, "come from make_plan") for name, given in (("plan", "edge"), ("params", {}))),
])  # fmt: skip
def test_a_request_is_valid_or_not_there(parts, error, says):
    with pytest.raises(error, match=says) as raised:
        replace(SIMPLE, **parts)
    assert raised.value.exit_status == 2


@pytest.mark.parametrize("name", [HALF, "n" * 5000, "\0"], ids=["half", "long", "zero"])
def test_a_name_that_no_file_or_server_can_have_is_one_clear_line(name):
    for use in (
        lambda: skydraft.load(name), lambda: skydraft.load(f"{name}.gguf"), lambda: skydraft.load(f"a/{name}"),
        lambda: skydraft.load(f"ollama:{name}"), lambda: skydraft.load("toy", adapter=name),
        lambda: skydraft.load("toy", adapter=f"{name}.gguf"), lambda: skydraft.load("toy:drift=" + name),
        lambda: skydraft.connect(name), lambda: skydraft.connect(f"http://{name}/v1", insecure=True),
        lambda: skydraft.connect("a:1", tls_name=name), lambda: skydraft.load_audio(name),
        lambda: read_calibration(Path(name)), lambda: make_plan(gate=name), lambda: decoding_params(style=name),
    ):  # fmt: skip
        with pytest.raises(UsageError) as raised:
            use()
        line = raised.value.line
        assert line.encode() and "\n" not in line and len(line) < 1500


@pytest.mark.parametrize(("given", "says"), [
    ({"temperature": "0.5"}, "temperature must be a number, not '0.5'"),
    ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, not 2.5"),
    ({"top_k": "3"}, "top_k must be a whole"), ({"max_new_tokens": 0}, "must be between 1 and"),
    ({"seed": float("nan")}, "seed must be a whole"), ({"top_p": float("nan")}, "must be between"),
])  # fmt: skip
def test_a_parameter_of_another_kind_is_one_clear_error(given, says):
    with pytest.raises(OptionError, match=says):
        decoding_params(**given)


@pytest.mark.parametrize(("mode", "given", "missing"), [
    ("lossless", [], "cloud"), ("lossless", ["edge"], "cloud"), ("lossless", ["cloud"], "edge"),
    ("quality", ["cloud"], "edge"), ("quality", ["edge"], "cloud"), ("cloud", ["edge"], "cloud"),
    ("edge", ["cloud"], "edge"),
])  # fmt: skip
def test_a_side_that_the_plan_needs_and_nobody_gave_is_named(mode, given, missing):
    with pytest.raises(OptionError, match=f"needs the {missing} model"):
        generate("你好", plan=make_plan(mode), **{side: open_toy("toy") for side in given})


def test_two_vocabularies_are_refused_before_anything_is_computed(monkeypatch):
    monkeypatch.setattr("skydraft.engines.toy.ToyEngine.forward", None)
    edge, cloud = open_toy("toy"), toys.toy(1)
    with pytest.raises(VocabularyMismatch):
        generate("我", edge=edge, cloud=cloud)


def test_first_tokens_that_belong_to_the_prompt_follow_ids_too() -> None:
    given = GenerateRequest((), prompt_ids=(1, 2), begun=(3,), begun_is_prompt=True)
    assert prompted(given, open_toy("toy", 4096, 1)).prompts.edge.token_ids == (1, 2, 3)


def test_without_a_draft_model_a_plan_drafts_nothing() -> None:
    toy = open_toy("toy")
    done = generate("我", edge=skydraft.without_model(toy), cloud=toy, params=decoding_params(max_new_tokens=3))
    assert done.run().request.plan == replace(make_plan("lossless"), drafts=False)


@pytest.mark.parametrize("name", ["gemma", "qwen2.5"])
def test_a_system_prompt_is_read_wherever_it_comes_from(name):
    """A command's --system was refused where the template takes no system message, and a gateway's was read."""
    toy = open_toy("toy", 4096, 1)
    toy.vocab.chat_template = TEMPLATES[name]
    said = prompted(GenerateRequest(asked("我", "你")), toy).prompts
    told = (Message("user", "你\n\n我"),) if name == "gemma" else asked("我", "你")
    assert said == prompted(GenerateRequest(told), toy).prompts
    assert toy.vocab.written(said.edge.token_ids).count("你") == 1
