"""Requests: checked once, before anything is computed, and where a request meets who takes part."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import skydraft
from skydraft import DecodingParams, GenerateRequest, decoding_params, generate, make_plan
from skydraft.decoding.builder import prompted
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError, PromptError, UsageError, VocabularyMismatch
from skydraft.gating.calibration import read_calibration
from skydraft.prompts.audio import Audio
from skydraft.prompts.messages import Message, asked

from .. import toys
from ..prompts.test_chat_template import TEMPLATES

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


@pytest.mark.parametrize("name", ["gemma", "qwen2.5"])
def test_a_system_prompt_is_read_wherever_it_comes_from(name):
    """A command's --system was refused where the template takes no system message, and a gateway's was read."""
    toy = open_toy("toy", 4096, 1)
    toy.vocab.chat_template = TEMPLATES[name]
    said = prompted(GenerateRequest(asked("我", "你")), toy).prompts
    told = (Message("user", "你\n\n我"),) if name == "gemma" else asked("我", "你")
    assert said == prompted(GenerateRequest(told), toy).prompts
    assert toy.vocab.written(said.edge.token_ids).count("你") == 1
