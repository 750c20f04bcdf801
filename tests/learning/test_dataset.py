"""What is trained with: one vocabulary, one target, no prompt on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.errors import RecordsError
from skydraft.learning.dataset import MIN_GENERATIONS, Usable, choose, split
from skydraft.learning.lesson import Lesson
from skydraft.learning.store import Store
from tests import toys

from .lessons import lesson


def filled(folder: Path, *lessons: Lesson) -> Store:
    store = Store(folder)
    for each in lessons:
        store.add(each)
    return store


def test_lessons_of_others_are_left_out_with_a_count(tmp_path: Path) -> None:
    good = [lesson(number) for number in range(MIN_GENERATIONS)]
    store = filled(
        tmp_path,
        *good,
        lesson(100, vocab="x" * 32),
        lesson(101, target="x" * 32),
        lesson(102, token_ids=(3, 4, 5, 1000)),
        lesson(1000),
        lesson(3),
        lesson(103, marks="www-", ranks=(1, 1, 1)),
    )
    chosen = choose(store, Usable("v" * 32, vocab_size=1000))
    assert chosen.lessons == tuple(good) and chosen.target == "t" * 32
    assert chosen.skipped == {
        "of another vocabulary": 1,
        "of another target": 1,
        "with tokens that the vocabulary does not have": 2,
        "that say nothing new": 2,
    }
    assert "1 of another target" in chosen.left_out


def test_the_newest_are_taken_and_those_of_the_target_that_judged_most(tmp_path: Path) -> None:
    mine = [lesson(number, target="m" * 32) for number in range(40)]
    store = filled(tmp_path, *(lesson(number) for number in range(30)), *mine)
    assert choose(store, Usable(), limit=30).lessons == tuple(mine[10:])
    assert choose(store, Usable(target="t" * 32)).target == "t" * 32


def test_too_few_say_how_many_are_missing(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="Nothing was collected"):
        choose(Store(tmp_path / "none"), Usable())
    store = filled(tmp_path, *(lesson(number) for number in range(MIN_GENERATIONS - 2)))
    with pytest.raises(RecordsError, match="2 are missing"):
        choose(store, Usable())
    store.add(lesson(100))
    store.add(lesson(101))
    assert len(choose(store, Usable()).lessons) == MIN_GENERATIONS


@toys.law(60)
@given(st.lists(st.integers(0, 40), min_size=MIN_GENERATIONS, max_size=80), st.integers(0, 5))
def test_no_prompt_is_on_both_sides_and_nothing_is_lost(prompts: list[int], seed: int) -> None:
    lessons = [lesson(prompt, token_ids=(number, 1, 1, 1)) for number, prompt in enumerate(prompts)]
    try:
        trained, held_out = split(lessons, seed)
    except RecordsError:
        assert len(set(prompts)) < 8
        return
    assert sorted(map(id, trained + held_out)) == sorted(map(id, lessons))
    assert not {each.prompt_ids for each in trained} & {each.prompt_ids for each in held_out}
    assert len(held_out) >= len(lessons) / 6
    assert (trained, held_out) == split(lessons, seed)


def test_answers_to_one_prompt_cannot_be_split() -> None:
    with pytest.raises(RecordsError, match="too few to hold some out"):
        split([lesson(1, token_ids=(number, 1, 1, 1)) for number in range(50)])
