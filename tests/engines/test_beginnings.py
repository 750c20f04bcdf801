"""The chat template's part of prompts: fed once and copied, whoever asks; with the bits of feeding it each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.types import Reuse
from tests.engines.test_prefix_cache import answer, engine_of
from tests.toys import law


def sharing(beginning: list[int], **changes: Any) -> Any:
    engine = engine_of(**changes)
    engine.prefixes.share(beginning)
    return engine


def feeding(beginning: list[int]) -> Any:
    """Feeds the beginning each time, in parts that end where it ends all the same."""
    return sharing(beginning, allocate_beginning=lambda: None)


beginnings = st.lists(st.integers(0, 20), min_size=1, max_size=11)


@law(60)
@given(beginnings, st.lists(st.lists(st.integers(0, 20), max_size=12), min_size=1, max_size=6), st.data())
def test_copied_beginnings_have_the_bits_of_those_that_were_fed(
    beginning: list[int], texts: list[list[int]], data: st.DataObject
) -> None:
    engine = sharing(beginning)
    for text in texts:
        cut = data.draw(st.sampled_from([len(beginning)] * 4 + [len(beginning) // 2]))
        prompt = [*beginning[:cut], *text] or [3]
        reuse = data.draw(st.sampled_from([None, Reuse("a"), Reuse("b")]))
        got, rows, _ = answer(engine, prompt, reuse)
        expected, fresh, _ = answer(feeding(beginning), prompt, None)
        assert got == expected and np.array_equal(rows, fresh)


@law(50)
@given(beginnings, st.lists(st.integers(0, 20), min_size=1, max_size=16), st.integers(0, 30))
def test_what_was_cut_and_filled_again_is_kept_as_far_as_it_is_whole(
    beginning: list[int], text: list[int], cut: int
) -> None:
    engine, prompt = sharing(beginning), [*beginning, *text]
    sequence = engine.open(prompt, (), Reuse("a"))
    sequence.truncate(cut % len(prompt))
    engine.fill(sequence, prompt)
    sequence.close()
    rows = answer(engine, [*prompt, 5], Reuse("a"))[1]
    assert np.array_equal(rows, answer(feeding(beginning), [*prompt, 5], None)[1])


def test_this_toy_would_notice_a_beginning_whose_end_ends_no_part() -> None:
    beginning, prompt = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert not np.array_equal(answer(feeding(beginning), prompt, None)[1], answer(engine_of(), prompt, None)[1])


@pytest.mark.parametrize("beginning_len", [1, 3, 4, 5, 9])
def test_nothing_but_the_beginning_goes_from_one_owner_to_another(beginning_len: int) -> None:
    beginning = list(range(beginning_len))
    engine, prompt = sharing(beginning), [*beginning, *[7] * 20]
    assert answer(engine, prompt, Reuse("ann"))[2] == 0
    for owner in (Reuse("bob"), None, Reuse("eve", exact=False)):
        assert answer(engine, prompt, owner)[2] == beginning_len
    assert answer(engine, prompt, Reuse("ann"))[2] == (beginning_len + 19) // 4 * 4
    assert answer(engine, [9, *prompt], None)[2] == 0


def test_the_beginning_takes_nobody_a_place() -> None:
    engine = sharing([1, 2, 3], max_sequences=2)
    answer(engine, [1, 2, 3, 4, 5], Reuse("ann"))
    answer(engine, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], Reuse("bob"))
    assert answer(engine, [1, 2, 3, 4, 5], Reuse("ann"))[2] == 4  # both are kept
    assert answer(engine, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], Reuse("bob"))[2] == 8
    held = [engine.open([1, 2, 3, number]) for number in range(2)]
    assert all(sequence.token_ids.tolist() == [1, 2, 3] for sequence in held)
