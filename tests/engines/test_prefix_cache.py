"""Reuse of KV: what was kept may change how soon a token comes, never which."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.errors import EngineError
from skydraft.types import Reuse
from tests import toys
from tests.partial import PART, Partial
from tests.toys import law

MINE = Reuse("mine")


def engine_of(**changes: Any) -> Any:
    engine = toys.toy(3, kind=Partial)
    for name, value in changes.items():
        setattr(engine, name, value)
    return engine


def answer(engine: Any, prompt: Seq[int], reuse: Reuse | None, num_tokens: int = 6) -> tuple[list[int], Any, int]:
    """(Greedy tokens, their rows, how many tokens of the prompt were cached) of a sequence that is closed again."""
    sequence = engine.open(prompt, (), reuse)
    num_cached, token_ids, rows = sequence.take_prefill_cost().num_cached, [], []
    last = prompt[-1]
    for _ in range(num_tokens):
        row = sequence.extend([last])[0]
        rows.append(row.copy())
        last = int(row.argmax())
        token_ids.append(last)
    sequence.close()
    return token_ids, np.stack(rows), num_cached


turns = st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=9), min_size=1, max_size=5)


@law(60)
@given(st.lists(turns, min_size=1, max_size=4), st.randoms())
def test_conversations_with_reuse_are_those_of_fresh_engines(conversations: list[list[list[int]]], random: Any) -> None:
    engine, texts = engine_of(), [list[int]() for _ in conversations]
    left = [(number, turn) for number, turns in enumerate(conversations) for turn in turns]
    while left:  # in an order in which the conversations take each other's places
        number, turn = left.pop(random.randrange(min(2, len(left))))
        texts[number] += turn
        got, rows, _ = answer(engine, texts[number], Reuse(f"{number % 2}"))
        expected, fresh, _ = answer(engine_of(), texts[number], None)
        assert got == expected and np.array_equal(rows, fresh)
        texts[number] += got


def test_this_toy_would_notice_if_generated_tokens_were_reused() -> None:
    prompt = list(range(10))
    for exact, same in ((True, True), (False, False)):
        engine = engine_of()
        first, _, _ = answer(engine, prompt, Reuse("mine", exact))
        longer = [*prompt, *first, 5]
        _, rows, num_cached = answer(engine, longer, Reuse("mine", exact))
        assert num_cached == (8 if exact else 15)
        assert np.array_equal(rows, answer(engine_of(), longer, None)[1]) == same


@pytest.mark.parametrize("prompt_len", [1, 4, 5, 12, 13, 40])
def test_whole_parts_of_the_prompt_are_cached_and_the_rest_is_fed_again(prompt_len: int) -> None:
    engine, prompt = engine_of(), [index % 20 for index in range(prompt_len)]
    answer(engine, prompt, MINE)
    engine.num_rows = 0
    _, _, num_cached = answer(engine, prompt, MINE, num_tokens=1)
    assert num_cached == (prompt_len - 1) // PART * PART
    assert engine.num_rows == prompt_len - num_cached


def test_nobody_takes_up_what_another_scope_kept_or_what_was_not_to_be_kept() -> None:
    engine, prompt = engine_of(), list(range(12))
    answer(engine, prompt, MINE)
    assert [answer(engine, prompt, reuse)[2] for reuse in (Reuse("other"), None)] == [0, 0]
    answer(engine, prompt, None)
    assert answer(engine, prompt, Reuse("third"))[2] == 0


def test_what_failed_is_not_kept() -> None:
    engine, prompt = engine_of(), list(range(12))
    engine.open(prompt, None, MINE).discard()
    assert answer(engine, prompt, MINE)[2] == 0


def test_the_longest_shared_prompt_is_taken_and_the_longest_kept_makes_room() -> None:
    engine = engine_of()
    prompts = [[*range(4), *[number] * 9] for number in range(4)]
    for prompt in prompts[:3]:
        assert answer(engine, prompt, MINE)[2] == 0  # another conversation's beginning is left where there is room
    assert answer(engine, [*prompts[1], 9], MINE)[2] == 12
    assert answer(engine, prompts[3], MINE)[2] == 4  # and taken where there is none
    assert answer(engine, [20] * 8, MINE)[2] == 0  # takes the place of the one that was kept longest
    assert [answer(engine, [*prompts[number], 9], MINE)[2] for number in (1, 3)] == [12, 12]


def test_open_sequences_leave_no_room_for_kept_ones() -> None:
    engine, prompt = engine_of(max_sequences=2), list(range(12))
    answer(engine, prompt, MINE)
    held = [engine.open([number]) for number in range(2)]
    assert answer(engine_of(max_sequences=2), prompt, MINE)[2] == 0
    for sequence in held:
        sequence.close()
    assert answer(engine, prompt, MINE)[2] == 0  # released when the second was opened


def test_what_was_kept_too_long_is_forgotten() -> None:
    engine, prompt = engine_of(), list(range(12))
    answer(engine, prompt, MINE)
    engine.forget_kept(older_than_s=3600)
    assert answer(engine, prompt, MINE)[2] == 8
    engine.forget_kept()
    assert answer(engine, prompt, MINE)[2] == 0


def test_a_slot_that_cannot_be_cut_is_given_back_and_not_used() -> None:
    engine, prompt = engine_of(), list(range(12))
    answer(engine, prompt, MINE)
    sound, engine.roll_back = engine.roll_back, lambda sequence, length: (_ for _ in ()).throw(EngineError("no"))
    with pytest.raises(EngineError):
        engine.begin(prompt, (), MINE)
    engine.roll_back = sound
    assert answer(engine, prompt, MINE)[2] == 0
