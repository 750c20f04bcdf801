"""What is kept from one prefix to the next is a cache: each answer is that of a whole text read anew."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skydraft.choosing.constraints import num_cjk_since_punctuation
from skydraft.choosing.incremental import Repeats, Tally
from skydraft.choosing.stopping import Said, said_along
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


@law(300)
@given(walks)
def test_sentences_along_the_tokens_are_those_of_the_text(walk):
    """What a whole text holds is in the tables of test_stopping."""
    along = said_along(VOCAB)
    for prefix in prefixes(walk):
        said, whole = along.at(prefix), Said().then(VOCAB.decode(prefix).encode())
        assert (said.ends_sentence, said.num_sentences) == (whole.ends_sentence, whole.num_sentences)


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
