"""Gates: which blocks are escalated and for which reason, and repetition (F6): confident cycles that no gate on
uncertainty sees, at any block boundary.

tests/decoding/test_field_reports.py shows that a cycle which the target has judged forces nothing again.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.decoding.context import Context
from skydraft.engines.toy import character_vocab
from skydraft.errors import OptionError
from skydraft.gating import gates
from skydraft.gating.gates import (
    COPY_LEN,
    MAX_DISTINCT,
    MAX_PERIOD,
    Gate,
    is_copying,
    is_looping,
    measure,
    parse_gate,
    unverified_cycles,
)
from skydraft.types import DraftBlock, Prompt, Signals, Verdict

from ..toys import VOCAB, ids, law

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


def escalations(generated, block_len, offset=0):
    """Lengths of generated text at which a cycle forces an escalation, the target accepting all it is shown."""
    num_seen, forced = 0, []
    starts = [0, *range(offset + 1, len(generated), block_len)]
    for base, end in zip(starts, [*starts[1:], len(generated)], strict=True):
        if unverified_cycles(generated[:end], base, num_seen):
            forced.append(end)
            num_seen = end
    return forced


cycles = st.integers(2, MAX_PERIOD).flatmap(lambda size: st.lists(st.integers(0, 3), min_size=size, max_size=size))


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


@law(150)
@given(cycles, st.integers(1, 12), st.integers(0, 11), st.integers(0, 60))
def test_a_cycle_is_seen_by_its_second_copy_at_any_block_boundary(cycle, block_len, offset, num_before):
    before = list(range(100, 100 + num_before))
    forced = escalations(before + cycle * 2, block_len, offset=offset)
    assert forced, "the cycle was missed"
    # Nothing before it, and no later than the end of the block in which the second copy is whole.
    assert num_before < forced[0] <= num_before + 2 * len(cycle)


@law(50)
@given(st.integers(1, 9), st.integers(0, 8), st.integers(0, 20))
def test_a_single_token_is_a_cycle_from_four_in_a_row(block_len, offset, num_before):
    before = list(range(100, 100 + num_before))
    assert escalations([*before, 7, 7, 7], block_len, offset=offset) == []
    assert len(escalations([*before, 7, 7, 7, 7], block_len, offset=offset)) == 1


ORDINARY = [
    "我在高兴的时候说话，他在人大的家里。我们都不说话，因为天气很好，所以大家都出去走一走，看一看。",
    "Speculative decoding drafts a few tokens and checks them all in one pass; nothing is lost by it.",
    "慢慢地，他高高兴兴地走了，红红的太阳也下山了。",
    "看看，看看。",  # a phrase of three said twice, with other marks
]


@pytest.mark.parametrize("text", ORDINARY)
@pytest.mark.parametrize("block_len", [1, 4, 7])
def test_ordinary_text_raises_no_alarm(text, block_len):
    words = [ord(char) for char in text] if not text.isascii() else [hash(word) % 10**6 for word in text.split()]
    assert escalations(words, block_len) == []


LOOPS = character_vocab("我在高兴的时候说话人大家abcdefgh0, .|-\n")


@pytest.mark.parametrize(("text", "length"), [
    # The length at which the cycle was seen twice; 0: never.
    ("我" * 20, 8), ("我在" * 10, 8), ("我在高" * 10, 12), ("我在高兴的时候说" * 5, 32), ("说话" + "ab" * 9, 10),
    ("0, " * 30, 64), ("|-" * 8, 0), ("我在高兴的时候说我在高兴的时候说", 0), ("我在高兴的时候说话" * 5, 0),
])  # fmt: skip
def test_a_cycle_was_seen_twice(text, length):
    ids = np.array(LOOPS.encode(text), np.int32)
    seen = [end for end in range(1, len(ids) + 1) if is_looping(ids[:end], LOOPS)]
    assert seen == (list(range(length, len(ids) + 1)) if length else [])


def test_a_longer_phrase_said_twice_is_an_echo_not_a_cycle():
    phrase = list(range(MAX_DISTINCT + 1))
    assert escalations(phrase * 2, 3) == []
    assert escalations(phrase[:MAX_DISTINCT] * 2, 3) != []
    nine = [0, 1, 2, 3, 0, 1, 3, 2, 1]
    assert len(nine) == MAX_PERIOD + 1 and escalations(nine * 2, 4) == []


@pytest.mark.parametrize(("base", "num_seen", "expected"), [
    (0, 0, True), (3, 0, True), (3, 3, True), (4, 0, False), (0, 4, False), (3, 5, False),
])  # fmt: skip
def test_what_was_complete_before_the_block_or_is_known_to_the_target_forces_nothing(base, num_seen, expected):
    for more in ([1, 2], [9]):
        assert bool(unverified_cycles([1, 2, 1, 2, *more], base, num_seen)) == expected


@law(100)
@given(st.lists(st.integers(0, 9), max_size=70), st.integers(0, 30), st.integers(0, 12))
def test_a_copy_is_whatever_ends_in_tokens_that_came_before(text, num_again, num_between):
    text = [*text, *range(100, 100 + num_between), *text[-num_again:]] if num_again else text
    last = text[-COPY_LEN:]
    came = any(text[at : at + COPY_LEN] == last for at in range(len(text) - COPY_LEN))
    assert is_copying(np.array(text, np.int32)) == (came and len(set(last)) > MAX_DISTINCT)
