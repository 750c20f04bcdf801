"""Rows have the bits of one row at a time at every length, also where an engine's kernels give others further on."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skydraft.engines.options import RowProfile
from skydraft.engines.toy import ToyEngine
from skydraft.errors import EngineError

from .test_probe import WideRowsDiffer
from .tiny_toy import SIZE, toy


def probed(kind: type[ToyEngine], rows: int = 4) -> ToyEngine:
    engine = toy(kind, context_len=2048)
    engine.has_kernels = True
    engine.profile = RowProfile(rows, (1.0,) * 8)
    return engine


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from([256, 512, 1024]))
def test_rows_are_those_of_one_row_at_a_time(data: st.DataObject, from_len: int) -> None:
    """Two sequences on an engine whose wide rows differ from some length on, beside one that is always fed singly."""
    engine, plain = probed(WideRowsDiffer), toy(context_len=2048)
    engine.width, engine.from_len = data.draw(st.integers(2, 5)), from_len
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


def test_it_compares_once_in_each_doubling_and_says_once_where_rows_differ(caplog: pytest.LogCaptureFixture) -> None:
    engine = probed(WideRowsDiffer)
    engine.width, engine.from_len = 3, 512
    widths: list[int] = []
    forward = engine.forward

    def noted(feeds: Any, *, want_logits: bool) -> Any:
        widths.append(len(feeds[0][1]))
        return forward(feeds, want_logits=want_logits)

    engine.forward = noted  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING), closing(engine.open([1] * 200)) as sequence:
        for length, expected in [
            (199, [3]), (300, [3, 1, 1, 1]), (340, [3]), (500, [3]), (600, [3, 1, 1, 1]), (700, [1, 1, 1]),
        ]:  # fmt: skip
            engine.fill(sequence, [1] * (length + 1))
            widths.clear()
            sequence.extend([1, 2, 3])
            assert widths == expected
    assert [record.getMessage() for record in caplog.records] == [
        "toy: 3 rows at once are not exact from 512 tokens on; there they are computed one by one."
    ]


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_a_forward_that_fails_while_it_compares_leaves_the_sequence_as_it_was(fails_at: int) -> None:
    engine = probed(ToyEngine)
    forward, left = engine.forward, fails_at

    def failing(feeds: object, *, want_logits: bool) -> object:
        nonlocal left
        left -= want_logits
        if want_logits and left == 0:
            raise EngineError("no")
        return forward(feeds, want_logits=want_logits)  # type: ignore[arg-type]

    engine.forward = failing  # type: ignore[method-assign, assignment]
    with closing(engine.open([1] * 300)) as sequence:
        with pytest.raises(EngineError, match="no"):
            sequence.extend([1, 2, 3])
        assert sequence.length == 299
        again = np.array(sequence.extend([1, 2, 3]))
    with closing(toy(context_len=2048).open([1] * 300)) as other:
        assert np.array_equal(again, np.concatenate([np.array(other.extend([n])) for n in (1, 2, 3)]))


def test_wider_forwards_than_promised_are_not_compared() -> None:
    engine = probed(WideRowsDiffer, rows=2)
    engine.from_len = 0
    with closing(engine.open([1] * 300)) as sequence, closing(toy(context_len=2048).open([1] * 300)) as other:
        wide, singly = np.array(sequence.extend([1, 2, 3])), [np.array(other.extend([n])) for n in (1, 2, 3)]
    assert not np.array_equal(wide, np.concatenate(singly))  # the broken rows came through: nobody promised these
