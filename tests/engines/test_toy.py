"""Proof that the law of every KV cache notices engines that break it (F1, F2, F3, F8), and what the toy adds to it."""

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.errors import EngineError, OptionError
from tests.toys import law

from .contract import largest_difference, one_by_one, some_text, toy


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
