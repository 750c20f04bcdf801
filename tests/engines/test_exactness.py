"""Rows have the bits of one row at a time at every length, also where an engine's kernels give others further on."""

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.engines.row_costs import RowProfile
from skydraft.engines.toy import ToyEngine
from skydraft.errors import EngineError
from tests.toys import FlakyEngine, law

from .contract import SIZE, one_by_one, toy
from .test_probe import SomeRowsDiffer


def probed(kind: type[ToyEngine], rows: int = 4, **changes: Any) -> Any:
    engine = toy(kind, context_len=2048)
    for name, value in ({"has_kernels": True, "profile": RowProfile(rows, (1.0,) * 8)} | changes).items():
        setattr(engine, name, value)
    return engine


@law(30)
@given(st.data(), st.sampled_from([256, 512, 1024]))
def test_rows_are_those_of_one_row_at_a_time(data: st.DataObject, from_len: int) -> None:
    """Two sequences on an engine whose wide rows differ from some length on, beside one that is always fed singly."""
    plain = toy(context_len=2048)
    engine = probed(SomeRowsDiffer, widths=range(data.draw(st.integers(2, 5)), 99), from_len=from_len)
    starts = data.draw(st.lists(st.integers(180, 1100), min_size=2, max_size=2))
    ids = np.random.default_rng(1).integers(0, SIZE, 1200).tolist()
    ours = [engine.open(ids[: start + 1]) for start in starts]
    theirs = [plain.open(ids[: start + 1]) for start in starts]
    for _ in range(data.draw(st.integers(1, 6))):
        sizes = data.draw(st.sampled_from([(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (2, 2), (1, 3)]))
        feeds = [(ours[i], ids[ours[i].length :][:size]) for i, size in enumerate(sizes) if size]
        rows = [np.array(found) for found in engine.extend_batch(feeds)]
        for (sequence, fed), found in zip(feeds, rows, strict=True):
            other = theirs[ours.index(sequence)]
            assert np.array_equal(found, np.concatenate([np.array(other.extend([token_id])) for token_id in fed]))
            assert sequence.token_ids.tolist() == other.token_ids.tolist()


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_a_forward_that_fails_while_it_compares_leaves_the_sequence_as_it_was(fails_at: int) -> None:
    engine, text = probed(FlakyEngine, fail_at=fails_at), [1] * 299 + [1, 2, 3]
    with closing(engine.open([1] * 300)) as sequence:
        with pytest.raises(EngineError, match="lost"):
            sequence.extend([1, 2, 3])
        assert sequence.length == 299
        assert np.array_equal(sequence.extend([1, 2, 3]), one_by_one(toy(context_len=2048), text)[-3:])
