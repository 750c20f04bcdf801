"""The law of every KV cache, on the toy engine, and proof that it notices engines that break it (F1, F2, F3, F8)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.engines.toy import ToyEngine, open_toy, random_toy
from skydraft.errors import EngineError, OptionError, PromptError

from .tiny_toy import SIZE, VOCAB, toy

law = settings(max_examples=60, deadline=None, derandomize=True)


def rows_alone(engine: Engine, token_ids: list[int], num_rows: int) -> np.ndarray:
    """The last rows of a fresh sequence that was fed one token at a time."""
    sequence = engine.open(token_ids[:1])
    rows = [sequence.extend([token_id])[0].copy() for token_id in token_ids]
    sequence.close()
    return np.array(rows[-num_rows:])


def broken_law(engine: Engine, judge: Engine, num_steps: int, seed: int = 0) -> str | None:
    """Walk at random by extend and truncate; say how the rows differ from a fresh sequence, or None."""
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(0, SIZE, 3).tolist()
    sequence = engine.open(token_ids)
    token_ids.pop()
    for step in range(num_steps):
        if len(token_ids) > 20 or (token_ids and rng.random() < 0.4):
            length = int(rng.integers(0, len(token_ids) + 1))
            for _ in range(int(rng.integers(1, 3))):  # idempotent
                sequence.truncate(length)
            del token_ids[length:]
        else:
            added = rng.integers(0, SIZE, int(rng.integers(1, 6))).tolist()
            rows = sequence.extend(added)
            token_ids += added
            if not np.array_equal(rows, rows_alone(judge, token_ids, len(added))):
                return f"other rows at step {step}"
        if sequence.length != len(token_ids) or sequence.token_ids.tolist() != token_ids:
            return f"other tokens at step {step}"
    return None


def test_truncate_and_replay_gives_the_bits_of_never_having_left():
    assert broken_law(toy(), toy(), 3000) is None


class DoubleAdvance(ToyEngine):
    """F2: writes the first token of a feed twice."""

    def forward(self, feeds, *, want_logits):
        for sequence, token_ids in feeds:
            sequence.slot.append((int(token_ids[0]), len(sequence.slot)))
        return super().forward(feeds, want_logits=want_logits)


class SilentDoubleAdvance(DoubleAdvance):
    """The same, and it lies about its length."""

    def kv_length(self, sequence):
        return sequence.length


class ForgottenRollback(ToyEngine):
    """F3: keeps what was rejected."""

    def roll_back(self, sequence, length):
        return None


class SilentForgottenRollback(ForgottenRollback):
    def kv_length(self, sequence):
        return sequence.length


class RelativeRollback(ToyEngine):
    """Takes an absolute length for a number of tokens to drop."""

    def roll_back(self, sequence, length):
        del sequence.slot[max(0, len(sequence.slot) - length) :]

    def kv_length(self, sequence):
        return sequence.length


class StalePositions(ToyEngine):
    """F8: positions go on counting after a rollback."""

    def roll_back(self, sequence, length):
        self.ahead = getattr(self, "ahead", 0) + len(sequence.slot) - length
        super().roll_back(sequence, length)

    def _row(self, cache):
        token_id, position = cache[-1]
        return super()._row([*cache[:-1], (token_id, position + getattr(self, "ahead", 0))])


class StaleLastToken(ToyEngine):
    """F1: looks at the token before instead of the last one."""

    def _row(self, cache):
        return super()._row(cache[:-1] or cache)


@pytest.mark.parametrize("kind", [DoubleAdvance, ForgottenRollback])
def test_a_cache_of_another_length_is_loud(kind):
    with pytest.raises(EngineError, match="KV cache holds"):
        broken_law(toy(kind), toy(), 100)


@pytest.mark.parametrize(
    "kind", [SilentDoubleAdvance, SilentForgottenRollback, RelativeRollback, StalePositions, StaleLastToken]
)
def test_the_law_notices_an_engine_that_breaks_it_in_silence(kind):
    assert broken_law(toy(kind), toy(), 100) is not None


@law
@given(st.lists(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=5), min_size=1, max_size=5), st.integers(0, 99))
def test_a_batch_is_its_feeds_one_by_one(feeds, seed):
    engine, rng = toy(), np.random.default_rng(seed)
    prompts = [rng.integers(0, SIZE, rng.integers(1, 6)).tolist() for _ in feeds]
    together, apart = ([engine.open(prompt) for prompt in prompts] for _ in range(2))
    batch = engine.extend_batch(list(zip(together, feeds, strict=True)))
    singly = [sequence.extend(token_ids) for sequence, token_ids in zip(apart, feeds, strict=True)]
    for mine, other, sequence, twin in zip(batch, singly, together, apart, strict=True):
        assert np.array_equal(mine, other)
        assert sequence.token_ids.tolist() == twin.token_ids.tolist()


@law
@given(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=30), st.integers(1, 5))
def test_opening_leaves_the_last_token_of_the_prompt_to_feed(prompt, max_batch_rows):
    engine = toy()
    engine.max_batch_rows = max_batch_rows
    sequence = engine.open(prompt)
    assert sequence.token_ids.tolist() == prompt[:-1]
    assert np.array_equal(sequence.extend(prompt[-1:])[0], rows_alone(toy(), prompt, 1)[0])


ids = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@law
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
    assert np.array_equal(last, rows_alone(toy(), wanted, 1)[0])


def test_what_is_refused_and_changes_nothing():
    engine = toy(context_len=20)
    sequence = engine.open([1, 2, 3])
    with pytest.raises(EngineError, match="fit"):
        sequence.extend([1] * 19)
    for wrong in ([], [SIZE], [-1], [0, 2**40]):
        with pytest.raises(EngineError):
            sequence.extend(wrong)
    for wrong in (-1, 3, 100):
        with pytest.raises(EngineError, match="truncate"):
            sequence.truncate(wrong)
    assert sequence.token_ids.tolist() == [1, 2] and engine.kv_length(sequence) == 2
    assert sequence.extend([1] * 18).shape == (18, SIZE)
    for prompt, error in (([], PromptError), ([1] * 20, PromptError), ([SIZE], PromptError), ([1, -1], PromptError)):
        with pytest.raises(error):
            engine.open(prompt)


def test_a_failed_prefill_frees_its_sequence():
    released = []

    class Failing(ToyEngine):
        def forward(self, feeds, *, want_logits):
            raise EngineError("no memory")

        def release(self, sequence):
            released.append(sequence)

    with pytest.raises(EngineError, match="no memory"):
        toy(Failing).open([1, 2, 3])
    assert len(released) == 1


@pytest.mark.parametrize(("prompt_len", "num_forwards"), [(1, 0), (2, 1), (4, 1), (5, 2), (7, 2)])
def test_a_prompt_is_fed_in_as_few_forwards_as_it_takes_and_none_is_empty(prompt_len, num_forwards):
    fed = []

    class Counting(ToyEngine):
        def forward(self, feeds, *, want_logits):
            fed.append(feeds)
            return super().forward(feeds, want_logits=want_logits)

    engine = toy(Counting)
    engine.max_batch_rows = 3
    engine.open([1] * prompt_len)
    assert len(fed) == num_forwards


def test_drift_moves_a_model_away_from_itself():
    def agreement(drift):
        twin, other = random_toy(VOCAB, drift=0.0), random_toy(VOCAB, drift=drift)
        prefixes = np.random.default_rng(0).integers(0, SIZE - 1, (200, 3)).tolist()
        rows = [[rows_alone(engine, prefix, 1)[0].argmax() for engine in (twin, other)] for prefix in prefixes]
        return np.mean([mine == theirs for mine, theirs in rows])

    assert agreement(0.0) == 1
    assert agreement(0.0) > agreement(0.3) > agreement(2.0)


@pytest.mark.parametrize("spec", ["toy:drift=-1", "toy:drift=nan", "toy:drift=inf", "toy:drift=x", "toy:size=3"])
def test_what_is_no_toy_is_refused(spec):
    with pytest.raises(OptionError, match="is not a toy model"):
        open_toy(spec)
    assert open_toy("toy").name == "toy"


def test_options_are_checked():
    for wrong, message in (({"context_len": 15}, "is too short"), ({"num_threads": -1}, "must be 0 or more, not -1")):
        with pytest.raises(OptionError, match=message):
            EngineOptions(**wrong)
