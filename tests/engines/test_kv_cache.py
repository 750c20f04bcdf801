"""KV caches, on toys: proof that their law notices engines that break it (F1, F2, F3, F8), and what the toy adds to it.
Reuse of KV, of earlier prompts or of the beginning of all, may change how soon a token comes, never which."""

import threading
from collections.abc import Sequence as Seq
from contextlib import closing, nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.errors import EngineError, OptionError
from skydraft.types import Reuse

from .. import toys
from ..toys import Partial, law
from .contract import largest_difference, one_by_one, rows_after, some_text, toy

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


class DoubleAdvance(ToyEngine):
    """F2: writes the first token of a feed twice."""

    def forward(self, feeds, *, want_logits):
        for sequence, token_ids in feeds:
            sequence.slot.append((int(token_ids[0]), len(sequence.slot)))
        return super().forward(feeds, want_logits=want_logits)


class ForgottenRollback(ToyEngine):
    """F3: keeps what was rejected."""

    def roll_back(self, sequence, length):
        return None


class RelativeRollback(ToyEngine):
    """Takes an absolute length for a number of tokens to drop."""

    def roll_back(self, sequence, length):
        del sequence.slot[max(0, len(sequence.slot) - length) :]


class StalePositions(ToyEngine):
    """F8: positions go on counting after a rollback."""

    ahead = 0

    def roll_back(self, sequence, length):
        self.ahead += len(sequence.slot) - length
        super().roll_back(sequence, length)

    def _row(self, cache):
        token_id, position = cache[-1]
        return super()._row([*cache[:-1], (token_id, position + self.ahead)])


class StaleLastToken(ToyEngine):
    """F1: looks at the token before instead of the last one."""

    def _row(self, cache):
        return super()._row(cache[:-1] or cache)


LOUD = [DoubleAdvance, ForgottenRollback, RelativeRollback]  # the cache has another length
IN_SILENCE = {"kv_length": lambda self, sequence: sequence.length}  # it lies about the length of its cache


@pytest.mark.parametrize(
    "kind", [*LOUD, *(type("Silent", (each,), IN_SILENCE) for each in LOUD), StalePositions, StaleLastToken]
)
def test_the_law_notices_an_engine_that_breaks_it(kind):
    text = some_text(toy(), 40)
    expected = one_by_one(toy(), text)
    with pytest.raises(EngineError, match="KV cache holds") if kind in LOUD else nullcontext():
        assert largest_difference(toy(kind), text, expected) > 0


ids = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@law(30)
@given(ids, ids, st.integers(1, 4))
def test_rolling_back_keeps_the_longest_shared_prefix_and_leaves_a_token_to_feed(before, wanted, max_rows):
    sequence = toy().open([0])
    sequence.extend(before)
    sequence.align(np.array(wanted, np.int32))
    shared = next((n for n, pair in enumerate(zip(before, wanted, strict=False)) if pair[0] != pair[1]), len(before))
    assert sequence.length == min(shared, len(before), len(wanted) - 1)
    assert sequence.token_ids.tolist() == wanted[: sequence.length]
    while sequence.length < len(wanted):
        last = sequence.extend(wanted[sequence.length :][:max_rows])[-1]
    assert np.array_equal(last, one_by_one(toy(), wanted)[-1])


def test_a_failed_prefill_frees_its_sequence():
    released, engine = [], toy()
    engine.forward, engine.release = None, released.append
    with pytest.raises(TypeError):
        engine.open([1, 2, 3])
    assert len(released) == 1


@pytest.mark.parametrize("spec", ["toy:drift=-1", "toy:drift=nan", "toy:drift=inf", "toy:drift=x", "toy:size=3"])
def test_what_is_no_toy_is_refused(spec):
    with pytest.raises(OptionError, match="is not a toy model"):
        open_toy(spec)


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
