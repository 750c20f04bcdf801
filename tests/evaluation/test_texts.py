"""Indicators of a text: by hand in the tables, by brute force in the laws."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.characters import is_cjk, is_punctuation
from skydraft.evaluation.texts import TextIndicators, indicators, lexical_doubles

from ..toys import law


def look(text: str, token_ids: Sequence[int] = (1,)) -> TextIndicators:
    return indicators(text, token_ids)


@pytest.mark.parametrize(
    ("text", "num_punctuation", "num_chars"),
    [
        ("", 0, 0),
        ("我，在。", 2, 4),
        ("我,在.", 2, 4),  # ASCII is the same mark
        ("我﹐在．！", 3, 5),  # small and full-width forms
        ("“我”——（在）…", 7, 9),
        ("1 + 2 = 3", 0, 9),  # symbols are no punctuation
    ],
)
def test_punctuation_in_all_its_widths(text: str, num_punctuation: int, num_chars: int) -> None:
    found = look(text)
    assert (found.num_punctuation, found.num_chars) == (num_punctuation, num_chars)
    assert sum(map(is_punctuation, text)) == num_punctuation


@pytest.mark.parametrize(
    ("text", "bigrams", "trigrams"),
    [
        ("", (0, 0), (0, 0)),
        ("我在，我。在！", (1, 3), (0, 2)),  # through punctuation (F9)
        ("员员员员", (2, 3), (1, 2)),
        ("ab ab", (1, 3), (0, 2)),  # letters are content, spaces are not
    ],
)
def test_repeats_over_content_characters(text: str, bigrams: tuple[int, int], trigrams: tuple[int, int]) -> None:
    found = look(text)
    assert (found.num_repeats[2], found.num_ngrams[2]) == bigrams
    assert (found.num_repeats[3], found.num_ngrams[3]) == trigrams


def test_the_list_of_doubles_holds_doubles_alone() -> None:
    assert len(lexical_doubles()) > 50
    assert all(len(word) == 2 and word[0] == word[1] and is_cjk(word[0]) for word in lexical_doubles())
    assert "员员" not in lexical_doubles()


texts = st.text(st.sampled_from("我在员慢慢，。！,.a1 \n“—+"), max_size=30)


@law(150)
@given(texts)
def test_indicators_are_those_of_a_slow_count(text: str) -> None:
    found = look(text)
    content = "".join(char for char in text if unicodedata.category(char)[0] in "LN")
    for n in (2, 3):
        grams = [content[at : at + n] for at in range(len(content) - n + 1)]
        assert found.num_ngrams[n] == len(grams)
        assert found.num_repeats[n] == sum(gram in grams[:at] for at, gram in enumerate(grams))
    twice = [text[at] for at in range(1, len(text)) if text[at - 1] == text[at] and text[at] in "我在员慢"]
    assert found.num_adjacent == sum(char != "慢" for char in twice)  # 慢慢 is the one word among them
    assert found.num_punctuation == sum(char in "，。！,.“—" for char in text)
