"""Gates: which blocks are escalated, and for which reason."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import entr, softmax

from skydraft.decoding.context import Context
from skydraft.decoding.gates import Gate, parse_gate
from skydraft.decoding.signals import measure
from skydraft.engines.toy import character_vocab
from skydraft.errors import OptionError
from skydraft.types import DraftBlock, Signals

from .toys import VOCAB, ids, law

CHARACTERS = character_vocab("我你他员在说高兴人，。！？、1234567890年月日号星期三abcdef.,!-/ ")
SURE, UNSURE = Signals(0.1, 0.9, 0.95), Signals(4.0, 0.05, 0.2)


def reason(gate, text, signals=None, history="", vocab=CHARACTERS):
    tokens = vocab.encode(text) if isinstance(text, str) else tuple(text)
    context = Context(vocab.encode("我你"))
    if history:
        context.commit_skip(DraftBlock(len(context), vocab.encode(history)), None)
    block = DraftBlock(len(context), tokens, signals or (SURE,) * len(tokens))
    return parse_gate(gate).reason(context, block, vocab)


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("always", Gate("always")),
        ("never", Gate("never")),
        ("entropy:3.25", Gate("entropy", 3.25)),
        ("entropy:0", Gate("entropy", 0.0)),
        ("margin:0.3", Gate("margin", 0.3)),
        ("margin:1", Gate("margin", 1.0)),
        ("prob:.5", Gate("prob", 0.5)),
        ("entropy:5.5+digits", Gate("entropy", 5.5, ("digits",))),
        ("prob:0.5+dates+digits", Gate("prob", 0.5, ("dates", "digits"))),
    ],
)
def test_parsing(text, gate):
    assert parse_gate(text) == gate


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no gate"),
        ("sometimes", "no gate"),
        ("Always", "no gate"),
        ("always:1", "no gate"),
        ("never:0", "no gate"),
        ("entropy", "at least 0"),
        ("entropy:", "at least 0"),
        ("entropy:-1", "at least 0"),
        ("entropy:nan", "at least 0"),
        ("entropy:much", "nats"),
        ("margin:1.1", "at most 1"),
        ("prob:-0.1", "probability"),
        ("prob:nan", "probability"),
        ("entropy:3+colours", "content rule 'colours'"),
        ("entropy:3+", "content rule ''"),
        ("always+digits", "nothing"),
        ("never+dates", "nothing"),
        ("calibrated:1.5", "agreement"),
        ("calibrated:", "agreement"),
        ("entropy:3:4", "nats"),
    ],
)
def test_what_is_no_gate_is_refused_with_a_reason(text, says):
    with pytest.raises(OptionError, match=says):
        parse_gate(text)


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        ("always", "always"),
        ("never", ""),
        ("entropy:3.9", "uncertain"),
        ("entropy:4.0", ""),  # more than theta, not as much
        ("margin:0.06", "uncertain"),
        ("margin:0.05", ""),
        ("prob:0.21", "uncertain"),
        ("prob:0.2", ""),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_any_unsure_token_escalates_the_block(gate, expected, place):
    signals = tuple(UNSURE if index == place else SURE for index in range(3))
    assert reason(gate, "我在说", signals) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("我在说，", ""),
        ("我，在。说", ""),  # 2 of 5: 0.4 is not more than 0.4
        ("我，。", "density"),
        ("，。", "density"),
        ("a.b,", "density"),  # ASCII too
        ("我-/", "density"),
        ("我 - /", ""),  # spaces are characters
        ("我在说高", ""),
    ],
)
def test_punctuation_density_counts_characters(text, expected):
    assert reason("entropy:9", text) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["。\n", "？”", "我们", "我们"], ""),  # 3 marks of 8 characters, though 2 of 4 tokens
        (["？”", "我", "在"], "density"),  # 2 of 4 characters, though 1 of 3 tokens
        (["，我", "，我", "在"], ""),  # 2 of 5
        (["，我", "，我"], "density"),
        ([b"\xe5", b"\x91"], ""),  # no text, no density
    ],
)
def test_density_sees_through_merged_tokens(pieces, expected):
    assert reason("entropy:9", ids(*pieces), vocab=VOCAB) == expected


@pytest.mark.parametrize(
    ("history", "text", "expected"),
    [
        ("", "员在员在", "loop"),
        ("员", "在员在", "loop"),
        ("员在员", "在我", "loop"),
        ("员在员在", "员在", ""),  # was complete in an earlier block, which had its escalation
        ("", "员在员", ""),
        ("我在说", "我在说高", "loop"),
        ("", "我在说高兴", ""),
    ],
)
def test_loops_are_seen_over_history_and_block(history, text, expected):
    assert reason("entropy:9", text, history=history) == expected


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("digits", "我有3", "content"),
        ("digits", "我在", ""),
        ("dates", "3月5日", "content"),
        ("dates", "2024-1", "content"),
        ("dates", "星期三", "content"),
        ("dates", "我有3人", ""),
        ("dates", "我年月", ""),
    ],
)
def test_content_rules(rule, text, expected):
    assert reason(f"entropy:9+{rule}", text) == expected
    assert reason("entropy:9", text) == ""


def test_a_date_over_a_block_boundary_is_a_date():
    assert reason("entropy:9+dates", "月我", history="我在3") == "content"


def test_reasons_in_order_and_never_means_never():
    assert reason("entropy:3", "，。，。", (UNSURE,) * 4) == "uncertain"
    assert reason("entropy:9", "，。，。") == "density"
    assert reason("never", "，。，。", (UNSURE,) * 4) == ""
    empty = DraftBlock(2, ())
    for gate in ("always", "entropy:3"):
        assert parse_gate(gate).reason(Context([1, 2]), empty, CHARACTERS) == "always"


def test_only_signal_gates_need_signals():
    assert [parse_gate(g).needs_signals for g in ("always", "never", "entropy:1", "margin:1", "prob:1")] == [
        0,
        0,
        1,
        1,
        1,
    ]
    assert not parse_gate("never").is_unsure([UNSURE]) and not parse_gate("always").is_unsure([UNSURE])


@law(100)
@given(st.integers(0, 10_000), st.sampled_from([0.1, 1, 5, 20]), st.sampled_from([np.float32, np.float64]))
def test_signals_are_those_of_the_softmax_at_temperature_1(seed, scale, dtype):
    row = np.random.default_rng(seed).normal(50, scale, 500).astype(dtype)
    before = row.copy()
    signals = measure(row)
    probs = np.sort(softmax(row.astype(np.float64)))
    expected = (entr(probs).sum(), probs[-1] - probs[-2], probs[-1])
    assert (signals.entropy, signals.margin, signals.top_prob) == pytest.approx(expected, abs=1e-4)
    assert np.array_equal(row, before)


def test_signals_at_the_extremes():
    assert measure(np.zeros(8, np.float32)) == Signals(pytest.approx(np.log(8)), 0.0, 0.125)
    sure = measure(np.array([0, 500, 0], np.float32))
    assert (sure.entropy, sure.margin, sure.top_prob) == (0.0, 1.0, 1.0)


def test_a_token_that_the_model_rules_out_leaves_the_signals_numbers():
    assert measure(np.array([1, 1, -np.inf], np.float32)).entropy == pytest.approx(np.log(2))
