"""Reuse of KV, of earlier prompts or of the beginning of all, may change how soon a token comes, never which."""

import threading
from collections.abc import Sequence as Seq
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.errors import EngineError
from skydraft.types import Reuse
from tests import toys
from tests.toys import Partial, law

from .contract import rows_after

MINE = Reuse("mine")
PROMPT = list(range(12))
FIXED = [number % 17 for number in range(21)]


def engine_of(beginning: Seq[int] = (), **changes: Any) -> Any:
    engine = toys.toy(3, kind=Partial)
    engine.prefixes.beginning = tuple(beginning)
    for name, value in changes.items():
        setattr(engine, name, value)
    return engine


def answer(engine: Any, prompt: Seq[int], reuse: Reuse | None, num_tokens: int = 6) -> tuple[list[int], Any, int]:
    """(Greedy tokens, their rows, how many tokens of the prompt were cached) of a sequence that is closed again."""
    num_rows = engine.num_rows
    with closing(engine.open(prompt, (), reuse)) as sequence:
        num_cached = sequence.take_prefill_cost().num_cached
        assert engine.num_rows - num_rows == len(prompt) - 1 - num_cached  # all others were fed
        rows = np.stack(rows_after(sequence, prompt[-1], num_tokens))
    return rows.argmax(1).tolist(), rows, num_cached


def num_cached(engine: Any, prompt: Seq[int], reuse: Reuse | None = MINE) -> int:
    return answer(engine, prompt, reuse)[2]


def as_fed(engine: Any, prompt: Seq[int], reuse: Reuse | None, beginning: Seq[int] = (1, 2, 3)) -> Any:
    """(Tokens, how many of the prompt were cached): tokens and rows are those of an engine that feeds all, also the
    beginning each time, in parts that end where it ends all the same."""
    token_ids, rows, cached = answer(engine, prompt, reuse)
    expected, fresh, _ = answer(engine_of(beginning, can_copy=False), prompt, None)
    assert token_ids == expected and np.array_equal(rows, fresh)
    return token_ids, cached


texts = st.lists(st.integers(0, 20), min_size=1, max_size=9)
beginnings = st.lists(st.integers(0, 20), max_size=11)


@law(150)
@given(beginnings, st.lists(st.lists(texts, min_size=1, max_size=5), min_size=1, max_size=4), st.randoms())
def test_reuse_changes_no_conversation(beginning: list[int], conversations: list[list[list[int]]], random: Any) -> None:
    """Conversations with reuse are those of engines that feed all, beside others that are cut and filled again."""
    engine, held = engine_of(beginning), list[Any]()
    shared = [*beginning[: random.choice([None, None, len(beginning) // 2])], *range(random.choice([0, 0, 9, 20]))]
    said = [[*shared] for _ in conversations]
    left = [(number, turn) for number, turns in enumerate(conversations) for turn in turns]
    while left:  # in an order in which the conversations take each other's places
        number, turn = left.pop(random.randrange(min(2, len(left))))
        said[number] += turn
        reuse = random.choice([Reuse(f"{number % 2}")] * 3 + [None])
        if random.random() < 0.4:
            other = engine.open(said[number], (), reuse)
            other.truncate(random.randrange(len(said[number])))
            engine.fill(other, said[number])
            held.append(other)  # a source for those below, too
        said[number] += as_fed(engine, said[number], reuse, beginning)[0]
        if len(held) > random.randrange(3):
            held.pop(0).close()


def test_the_beginning_takes_nobody_a_place() -> None:
    engine = engine_of([1, 2, 3], max_sequences=2)
    prompts = {"ann": [1, 2, 3, 4, 5], "bob": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}
    for owner, prompt in prompts.items():
        answer(engine, prompt, Reuse(owner))
    assert [num_cached(engine, prompt, Reuse(owner)) for owner, prompt in prompts.items()] == [4, 8]  # both are kept
    held = [engine.open([1, 2, 3, number]) for number in range(2)]
    assert all(sequence.token_ids.tolist() == [1, 2, 3] for sequence in held)


def test_the_longest_shared_prompt_is_taken_and_the_longest_kept_makes_room() -> None:
    engine = engine_of()
    prompts = [[*range(4), *[number] * 9] for number in range(4)]
    # Another conversation with the same beginning is left where there is room, and its beginning copied.
    assert [num_cached(engine, prompt) for prompt in prompts[:3]] == [0, 4, 4]
    assert num_cached(engine, [*prompts[1], 9]) == 12
    assert num_cached(engine, prompts[3]) == 4  # and taken where there is none
    assert num_cached(engine, [20] * 8) == 0  # takes the place of the one that was kept longest
    assert [num_cached(engine, [*prompts[number], 9]) for number in (1, 3)] == [12, 12]


def test_what_failed_was_kept_too_long_or_has_no_room_is_gone() -> None:
    engine = engine_of(max_sequences=2)
    engine.open(PROMPT, None, MINE).discard()
    assert num_cached(engine, PROMPT) == 0
    engine.forget_kept(older_than_s=3600)
    assert num_cached(engine, PROMPT) == 8
    engine.forget_kept()
    assert num_cached(engine, PROMPT) == 0
    for sequence in [engine.open([number]) for number in range(2)]:
        sequence.close()
    assert num_cached(engine, PROMPT) == 0  # released when the second was opened


def test_what_conversations_share_is_read_once() -> None:
    engine = engine_of([1, 2, 3], max_sequences=3)
    assert [num_cached(engine, [*FIXED, *[end] * 9]) for end in (7, 8)] == [0, 20]
    assert num_cached(engine, [*FIXED, 9], Reuse("bob")) == 0
    engine = engine_of([1, 2, 3], max_sequences=1)  # full, it goes on from what it kept
    answer(engine, [*FIXED, 9], MINE)
    assert num_cached(engine, [*FIXED[:9], 16, *FIXED[10:], 9]) == 8


def test_what_was_generated_and_then_copied_is_no_part_of_a_prompt() -> None:
    engine, loose = engine_of([1, 2, 3]), Reuse("0", exact=False)
    first = engine.open([5, 6, 7, 8, 9], (), loose)
    written = [9, *range(1, 12)]
    for token_id in written:
        first.extend([token_id])
    assert answer(engine, [5, 6, 7, 8, *written, 3], loose)[2] == 16
    first.discard()
    assert as_fed(engine, [5, 6, 7, 8, *written, 3], Reuse("0"))[1] == 4


@pytest.mark.parametrize("error", [EngineError("no"), MemoryError()])
def test_what_an_engine_cannot_copy_is_read_and_what_it_cannot_cut_is_given_back(error: Exception) -> None:
    def fail(*_: Any) -> None:
        raise error

    engine = engine_of([1, 2, 3])
    answer(engine, [*FIXED, 9, 9], MINE)
    sound, engine.copy = engine.roll_back, fail
    as_fed(engine, [*FIXED[:9], *[8] * 5], MINE)
    assert engine.prefixes.num_open == 0
    engine.roll_back = fail
    with pytest.raises(type(error)):
        engine.begin([*FIXED, 9, 9], (), MINE)
    engine.roll_back = sound
    assert engine.prefixes.num_open == 0 and num_cached(engine, [*FIXED, 9, 9]) == 8  # of the second one


def test_progress_is_told_while_a_prompt_is_read() -> None:
    engine = engine_of([1, 2, 3])
    sequence, told = engine.begin(prompt := [*FIXED, 9], (), None), []
    while engine.prefill(sequence, prompt):
        told.append(engine.prefixes.progress)
    assert told[0] == (4, 21) and told == sorted(told) and engine.prefixes.progress == (0, 0)
    broken = engine.begin(prompt, (), None)
    engine.prefill(broken, prompt)
    broken.close()
    left, forward = engine.begin(prompt, (), None), engine.forward

    def leaving(*given: Any, **how: Any) -> Any:
        closing = threading.Thread(target=left.close)  # of a client that leaves while a part is read
        closing.start()
        closing.join()
        return forward(*given, **how)

    engine.forward = leaving
    with pytest.raises(EngineError, match="closed"):
        engine.fill(left, prompt)
    assert engine.prefixes.progress == (0, 0)
