"""Constraints with the semantics of transformers and OpenAI (F4, F5), and the order of the steps (F7)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.choosing.chooser import Chooser
from skydraft.config import DecodingParams, decoding_params
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError

from .. import reference, toys
from ..toys import VOCAB, law

prompts = st.lists(st.integers(0, VOCAB.size - 1), min_size=1, max_size=6)
texts = st.lists(st.integers(0, VOCAB.size - 1), max_size=14)


@law(250)
@given(st.integers(0, 10**6), prompts, st.lists(st.tuples(st.integers(0, 14), texts), min_size=1, max_size=4),
       toys.params())  # fmt: skip
def test_the_edited_row_is_what_the_rules_say_word_by_word(seed, prompt, walk, params):
    """All constraints and styles at once, against rules asked of texts; pure, and nothing given is changed.

    Each text goes on from somewhere in the one before: what a chooser keeps from one to the next is a cache.
    """
    row = np.random.default_rng(seed).normal(0, 4, VOCAB.size).astype(np.float32)
    row_before, chooser, written = row.copy(), Chooser(params, VOCAB, len(prompt)), []
    for keep, more in walk:
        written = written[:keep] + more
        token_ids = toys.array([*prompt, *written])
        token_ids.flags.writeable = False
        edited = chooser.constrain(row, token_ids)
        assert np.array_equal(edited, reference.constrained(row, token_ids, len(prompt), params, VOCAB))
        assert chooser.choose(row, token_ids) == reference.sample(edited, params, len(written))
        assert np.array_equal(chooser.constrain(row, token_ids), edited) and np.array_equal(row, row_before)


def test_a_bias_of_an_id_that_is_no_token_is_refused() -> None:
    with pytest.raises(OptionError, match="has no id"):
        Chooser(decoding_params(logit_bias=[(VOCAB.size, 1.0)]), VOCAB, 1)


BYTES = open_toy("toy").vocab
CALLS = [BYTES.pieces.index(piece) for piece in (b"`", b"{", b"<")]
BLANK, WORD = BYTES.pieces.index(b"\n"), BYTES.pieces.index(b"a")


@pytest.mark.parametrize(("chance", "least", "written", "may"), [
    (0.8, 0.73, [], True), (0.7, 0.73, [], False), (0.7, 0.0, [], True), (0.7, 0.73, [BLANK], False),
    (0.7, 0.73, [WORD], True), (0.7, 0.73, [BLANK, WORD], True), (0.7, 0.73, [BLANK] * 9, True),
])  # fmt: skip
def test_a_call_begins_only_where_it_is_likely(chance: float, least: float, written: list[int], may: bool) -> None:
    """All tokens with which one begins are summed: here three."""
    row = np.full(BYTES.size, -30.0, np.float32)
    row[CALLS] = np.log(chance / 3)
    row[[WORD, WORD + 1]] = np.log((1 - chance) * 0.99), np.log((1 - chance) * 0.01)
    prefix = np.array([1, 2, *written], np.int32)
    edited = Chooser(DecodingParams(min_call_prob=least), BYTES, 2).constrain(row, prefix)
    assert np.isfinite(edited[CALLS]).all() == may and np.isfinite(np.delete(edited, CALLS)).all()


@pytest.mark.parametrize("best", [np.inf, -np.inf])
def test_a_row_without_probabilities_bans_no_call(best: float) -> None:
    """Tests fail on warnings."""
    row = np.full(BYTES.size, -np.inf, np.float32)
    row[WORD] = best
    assert np.array_equal(Chooser(DecodingParams(min_call_prob=0.73), BYTES, 1).constrain(row, toys.array([1])), row)
