"""The figures of the Chinese regression run, by hand and by a slow count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.zh import num_adjacent, repeat_rate

from ..toys import law

texts = st.text(st.sampled_from("我在员慢慢，。！,.a1 \n“—+"), max_size=30)


@pytest.mark.parametrize(
    ("text", "bigrams", "trigrams"),
    [("我在，我。在！", 1 / 3, 0), ("员员员员", 2 / 3, 1 / 2), ("ab ab", 1 / 3, 0), ("", 0, 0)],
)
def test_repeats_are_seen_through_punctuation(text: str, bigrams: float, trigrams: float) -> None:
    assert (repeat_rate([text], 2), repeat_rate([text], 3)) == (bigrams, trigrams)


@law(100)
@given(texts)
def test_adjacent_repeats_are_those_of_a_slow_count(text: str) -> None:
    twice = [text[at] for at in range(1, len(text)) if text[at - 1] == text[at] and text[at] in "我在员慢"]
    assert num_adjacent(text) == sum(char != "慢" for char in twice)  # 慢慢 is the one word among them
