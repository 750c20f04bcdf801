"""Repetition (F6): confident cycles that no gate on uncertainty sees, at any block boundary.

tests/decoding/test_field_reports.py shows that one which the target has judged forces nothing again.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.engines.toy import character_vocab
from skydraft.gating.gates import COPY_LEN, MAX_DISTINCT, MAX_PERIOD, is_copying, is_looping, unverified_cycles

from ..toys import law


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
