"""Gates: which blocks are escalated, and for which reason."""

import numpy as np
import pytest

from skydraft.decoding.context import Context
from skydraft.engines.toy import character_vocab
from skydraft.errors import OptionError
from skydraft.gating import gates
from skydraft.gating.gates import Gate, measure, parse_gate
from skydraft.types import DraftBlock, Prompt, Signals, Verdict

from ..toys import VOCAB, ids

CHARACTERS = character_vocab('我你他员在说高兴人，。！？、1234567890年月日号星期三abcdef.,!-/ ":：[]{}')
SURE, UNSURE = Signals(0.1, 0.9, 0.95), Signals(4.0, 0.05, 0.2)


def reason(gate, text, signals=None, history="", vocab=CHARACTERS, prompt="我你", judged=""):
    tokens = vocab.encode(text) if isinstance(text, str) else tuple(text)
    context = Context(Prompt(vocab.encode(prompt)))
    if history:
        context.commit_skip(DraftBlock(0, vocab.encode(history)), None)
    if judged:
        context.commit_verdict(DraftBlock(context.base, ()), Verdict(context.base, 0, vocab.encode(judged)[0]))
    block = DraftBlock(context.base, tokens, signals or (SURE,) * len(tokens))
    return Gate(parse_gate(gate)).reason(context.generated, context.num_seen, block, vocab)


NO_GATES = {
    "no gate": ["", "sometimes", "Always", "always:1", "never:0"],
    "at least 0": ["entropy:-1", "entropy:nan"],
    "nats": ["entropy", "entropy:", "entropy:much", "entropy:3:4"],
    "at most 1": ["margin:1.1"],
    "probability": ["prob:-0.1", "prob:nan"],
    "agreement.* For example calibrated:0.95": ["calibrated:", "calibrated:1.5"],
    "content rule 'colours'": ["entropy:3+colours"],
    "content rule ''": ["entropy:3+"],
    "does not apply": ["always+digits", "never+dates"],
}


@pytest.mark.parametrize(("text", "says"), [(text, says) for says, texts in NO_GATES.items() for text in texts])
def test_what_is_no_gate_is_refused_with_a_reason(text, says):
    with pytest.raises(OptionError, match=says):
        parse_gate(text)


@pytest.mark.parametrize(("gate", "expected"), [
    # more than theta, not as much
    ("entropy:3.9", "uncertain"), ("entropy:4.0", ""), ("margin:0.06", "uncertain"), ("margin:0.05", ""),
])  # fmt: skip
def test_any_unsure_token_escalates_the_block(gate, expected):
    assert reason(gate, "我在说", (SURE, UNSURE, SURE)) == expected


@pytest.mark.parametrize(("history", "text", "expected"), [
    ("", "，我，我，我，我，我，我", "density"),  # 6 of 12 characters
    ("", "，我，在，说，高兴我在说", ""),  # 4 of 12
    ("，，，，，，，，，", "我在说", ""),  # what was before is no fault of the block
    ("我在说我在说高兴我在说", "。", ""),  # the stop of a sentence
    ("我，在，说，高，兴", "，我，", "density"),  # with the characters before
    ("", "，。，", ""),  # nobody can tell from four
    ("我在说", "## 我\n- **在**\n- `说`", ""),  # marks of Markdown
])  # fmt: skip
def test_density_is_of_twelve_characters_or_more(history, text, expected):
    vocab = character_vocab("我在说高兴，。# -*`\n")
    assert reason("entropy:9", text, history=history, vocab=vocab) == expected


@pytest.mark.parametrize(("pieces", "expected"), [
    (["。\n", "？”", "，我", "我们", "在", "我们", "我们"], ""),  # 4 marks of 13 characters, though 3 of 7 tokens
    (["，我"] * 6, "density"),
    ([b"\xe5", b"\x91"], ""),  # no text, no density
])  # fmt: skip
def test_density_sees_through_merged_tokens(pieces, expected):
    """F11: counted on characters, not on tokens."""
    assert reason("entropy:9", ids(*pieces), vocab=VOCAB) == expected


def test_the_prompt_is_no_part_of_a_repetition():
    for prompt, text in (("员在员在员在", "员在"), ("员员员", "员员员"), ("在说高在说", "高")):
        assert reason("entropy:9", text, prompt=prompt) == ""


@pytest.mark.parametrize(("rule", "text", "expected"), [
    ("digits", "我有3", "content"), ("digits", "我在", ""),
    *(("dates", text, "content") for text in ("3月5日", "2024-1", "星期三", "月十五", "月初九", "二十世纪")),
    *(("dates", text, "content") for text in ("初九", "in July", "Monday")),
    *(("dates", text, "") for text in ("我有3人", "我年月", "我月初", "may", "Marching")),
    *(("values", text, "content") for text in ("abc:3", "abcde: -3.5", 'abcd":"e', "ab：12", "abc[e,f]", "ab[")),
    *(("values", text, "") for text in ("a3", '"ab', '{"abcdef"', '"abcdef",', "ab:", "abc: ", "e.f")),
])  # fmt: skip
def test_content_rules(rule, text, expected):
    assert reason(f"entropy:9+{rule}", text) == expected
    assert reason("entropy:9", text) == ""


def test_a_date_over_a_block_boundary_is_a_date_unless_the_prompt_begins_it():
    assert reason("entropy:9+dates", "月我", history="我在3") == "content"
    assert [reason(f"entropy:9+{rule}", "月我", prompt="我在3") for rule in ("digits", "dates")] == ["", ""]


@pytest.mark.parametrize(("history", "text", "expected"), [
    ('{"a": "我在说', "高兴", "content"),  # the text of a value goes on
    ('{"a": "我在说",', '"abcdef"', ""),  # a key follows
    ('{"a": [1, 2', ", 3", "content"),
    ('{"a": [1, 2]', ', "abcdef"', ""),
    ('{"a": "我\\"在', "说", "content"),  # a mark within a text does not end it
])  # fmt: skip
def test_values_are_seen_over_a_block_boundary_and_keys_are_none(history, text, expected):
    vocab = character_vocab('我在说高兴abcdef123,:"[]{} \\')
    assert reason("entropy:9+values", text, history=history, vocab=vocab) == expected


def test_start_checks_until_the_target_has_seen_something():
    assert reason("entropy:9+start", "我在") == "content"
    assert reason("entropy:9+start", "我在", history="说高") == "content"  # it was skipped: the target has seen nothing
    assert reason("entropy:9+start", "我在", history="说高", judged="兴") == ""


def test_never_means_never_and_an_empty_block_is_always_sent():
    assert reason("never", "，。，。，。", (UNSURE,) * 6) == ""
    assert reason("always", "") == reason("entropy:3", "") == "always"


def test_a_gate_of_ones_own_checks_the_blocks_that_it_names(monkeypatch):
    monkeypatch.setattr(gates, "SIGNALS", dict(gates.SIGNALS))
    gates.register_gate("mean", lambda block, most: sum(token.entropy for token in block) / len(block) > most)
    assert reason("mean:0.5", "我在", (UNSURE, UNSURE)) == "uncertain" != reason("mean:0.5", "我在", (SURE, SURE))
    assert str(parse_gate("mean:0.5+digits")) == "mean:0.5+digits"
    gates.register_gate("mean", lambda block, _: len(block) > 1)  # in a notebook a cell is run again
    assert reason("mean:0.5", "我在", (SURE, SURE)) == "uncertain"
    assert str(parse_gate("mean:1234567.5")) == "mean:1234567.5"
    for taken in ("entropy", "always", "a b"):
        with pytest.raises(OptionError, match="cannot be called"):
            gates.register_gate(taken, lambda block, _: False)
    with pytest.raises(OptionError, match="is no function"):
        gates.register_gate("long", 3)


def test_signals_at_the_extremes():
    """Those of other rows are compared with the softmax in tests/decoding/test_laws.py."""
    assert measure(np.zeros(8, np.float32)) == Signals(pytest.approx(np.log(8)), 0.0, 0.125)
    sure = measure(np.array([0, 500, 0], np.float32))
    assert (sure.entropy, sure.margin, sure.top_prob) == (0.0, 1.0, 1.0)
    # A token that the model rules out leaves them numbers.
    assert measure(np.array([1, 1, -np.inf], np.float32)).entropy == pytest.approx(np.log(2))
