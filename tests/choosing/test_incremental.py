"""What is kept from one prefix to the next is a cache: each answer is that of a whole text read anew."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.characters import CLOSING, FULL_STOP_LIKE
from skydraft.choosing.constraints import num_cjk_since_punctuation
from skydraft.choosing.incremental import Along, Repeats, Tally
from skydraft.choosing.stopping import said_along
from skydraft.engines.vocab import Vocab
from tests.toys import law

# Dots, quotes, spaces, abbreviations, halves of characters, and bytes that are none.
PIECES = [
    b".", b"..", b" ", b"\n", "。".encode(), "」".encode(), b")", b"e.g", b"U", b"a.b", b"3", b"3.5", "我们".encode(),
    b"\xe6", b"\x88", b"\x91", b"\xff", "，".encode(), b"? ", "！”".encode(), b"x" * 70, b"." * 70, b"",
]  # fmt: skip
VOCAB = Vocab(PIECES, lambda text: [0])
token_ids = st.lists(st.integers(0, len(PIECES) - 1), max_size=24)
walks = st.lists(st.tuples(st.integers(0, 24), token_ids), min_size=1, max_size=6)


def prefixes(walk: list[tuple[int, list[int]]]) -> list[np.ndarray]:
    """Texts that go on from somewhere in the one before."""
    text: list[int] = []
    found = []
    for keep, more in walk:
        text = text[:keep] + more
        found.append(np.array(text, np.int32))
    return found


def plain_ends(text: str) -> bool:
    """Whether the text, closing quotes and spaces apart, ends at a sentence end."""
    bare = text.rstrip().rstrip("".join(CLOSING)).rstrip()
    return bool(bare) and plain_end(bare, len(bare) - 1)


def plain_num(text: str) -> int:
    """Sentence ends in `text`; several marks in a row count once."""
    count, last = 0, -2
    for found in re.finditer(f"[{re.escape(''.join(FULL_STOP_LIKE))}]", text):
        if plain_end(text, index := found.start()):
            count += index != last + 1
            last = index
    return count


def plain_end(text: str, index: int) -> bool:
    """A wide stop always ends a sentence; a dot neither inside a number, a word or an abbreviation, nor after a digit
    while nothing follows it (the next token may be a decimal)."""
    char = text[index]
    if char in FULL_STOP_LIKE - {".", "．"}:
        return True
    if char not in ".．":
        return False
    before, after = text[max(index - 64, 0) : index], text[index + 1 : index + 2]
    if after and after.isascii() and (after.isalnum() or after == "."):
        return False
    if before[-1:].isdigit():
        return after.isspace() or bool(after and not after.isascii())
    tail = len(before)
    while tail and (before[tail - 1] == "." or (before[tail - 1].isascii() and before[tail - 1].isalpha())):
        tail -= 1
    word = before[tail:]
    letters = word.lower().strip(".")
    is_initial = len(letters) == 1 and before[-1:].isupper()
    says_something = bool(before.strip() or text[:index].strip())
    return says_something and letters not in {"e.g", "u.s"} and not is_initial


@law(300)
@given(walks)
def test_sentences_along_the_tokens_are_those_of_the_text(walk):
    along = said_along(VOCAB)
    for prefix in prefixes(walk):
        said, text = along.at(prefix), VOCAB.decode(prefix)
        assert (said.ends_sentence, said.num_sentences) == (plain_ends(text), plain_num(text)), text


@law(200)
@given(walks)
def test_counts_and_gaps_are_those_of_the_prefix(walk):
    distinct, counted, gap = Tally(), Tally(), num_cjk_since_punctuation(VOCAB)
    for prefix in prefixes(walk):
        ids, counts = np.unique(prefix, return_counts=True)
        assert sorted(distinct.distinct(prefix).tolist()) == ids.tolist()
        found = {int(i): int(n) for i, n in zip(*counted.counts(prefix), strict=True)}
        assert found == dict(zip(ids.tolist(), counts.tolist(), strict=True))
        assert gap.at(prefix) == num_cjk_since_punctuation(VOCAB).at(prefix)


@law(200)
@given(walks, st.sampled_from([1, 2, 3, 12]))
def test_what_followed_a_run_is_that_of_the_prefix(walk, size):
    repeats = Repeats(size)
    for prefix in prefixes(walk):
        assert sorted(repeats.after(prefix).tolist()) == sorted(Repeats(size).after(prefix).tolist())


def test_a_step_that_fails_leaves_nothing_half_done() -> None:
    failing = [3]

    def step(total: int, token_id: int) -> int:
        if token_id in failing:
            raise RuntimeError("no")
        return total + token_id

    along = Along(0, step)
    assert along.at(np.array([1, 2], np.int32)) == 3
    with pytest.raises(RuntimeError):
        along.at(np.array([1, 5, 3], np.int32))
    failing.clear()
    assert along.at(np.array([1, 5, 3], np.int32)) == 9
    assert along.at(np.array([], np.int32)) == 0
