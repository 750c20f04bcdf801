"""Values that are valid by construction."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.types import Cost, DraftBlock, LinkCost, Media, Signals, StepRecord, Verdict

from .toys import law


def features(num_frames: int, fill: float = 0.5) -> np.ndarray:
    return np.full((128, num_frames), fill, np.float32)


@pytest.mark.parametrize(("num_frames", "num_tokens"), [(3, 1), (4, 1), (7, 2), (10, 2), (100, 25), (3000, 750)])
def test_media_fills_one_token_per_40_ms(num_frames: int, num_tokens: int) -> None:
    assert Media(features(num_frames)).num_tokens == num_tokens


def test_media_is_its_content_and_cannot_be_changed_from_outside() -> None:
    given = features(9)
    one, same, other = Media(given), Media(features(9)), Media(features(9, 0.6))
    given[:] = 7
    assert one == same and hash(one) == hash(same) and one != other and one != Media(features(10)) and one != 9
    with pytest.raises(ValueError, match="read-only"):
        one.features[0, 0] = 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (features(9).astype(np.float64), r"float32 \[mels, frames\], not float64 \(128, 9\)"),
        (features(9)[:0], r"not float32 \(0, 9\)"),
        (features(2), "2 frames of audio are too few"),
        (features(9, np.nan), "must be finite"),
    ],
)
def test_media_is_valid_or_not_there(wrong: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Media(wrong)


whole = st.integers(0, 10**6)
costs = st.builds(Cost, whole, whole, *[whole.map(float)] * 4)
link_costs = st.builds(LinkCost, whole.map(float), *[whole] * 3)


@law(50)
@given(st.lists(costs, max_size=6) | st.lists(link_costs, min_size=1, max_size=6))
def test_costs_add_up_field_by_field(spent: list[Cost] | list[LinkCost]) -> None:
    kind = type(spent[0]) if spent else Cost
    total = sum(spent, kind())
    assert type(total) is kind
    for field in fields(kind):
        added = getattr(total, field.name)
        assert added == sum(getattr(one, field.name) for one in spent)
        assert type(added) is type(field.default)


@pytest.mark.parametrize(
    ("target", "link", "overhead_ms"),
    [
        (Cost(1, 6, forward_ms=40.0), LinkCost(), 50.0),
        (Cost(1, 6, forward_ms=40.0, queue_ms=20.0), LinkCost(), 30.0),
        (Cost(1, 6, forward_ms=40.0, prefill_ms=30.0, encode_ms=10.0), LinkCost(), 50.0),  # parts of the forwards
        (Cost(1, 6, forward_ms=40.0, queue_ms=20.0), LinkCost(rtt_ms=65.0), 25.0),  # the wait holds what it was for
        (Cost(1, 6, forward_ms=400.0), LinkCost(rtt_ms=65.0), 25.0),  # computed ahead, while nobody waited
    ],
)
def test_overhead_is_what_no_model_no_queue_and_no_wire_took(target: Cost, link: LinkCost, overhead_ms: float) -> None:
    draft = Cost(5, 5, forward_ms=10.0, prefill_ms=4.0)
    record = StepRecord(1, 0, 5, 3, 4, "verified", "always", 100.0, 300.0, draft, target, link)
    assert record.overhead_ms == overhead_ms


def test_verdicts_and_blocks_are_valid_or_not_there() -> None:
    for wrong in ((-1, 0, 5, None), (3, -1, 5, None), (3, 0, None, "eos"), (3, 2, None, None)):
        with pytest.raises(ValueError):
            Verdict(*wrong)
    for base, signals in ((-1, ()), (0, (Signals(0.0, 1.0, 1.0),))):
        with pytest.raises(ValueError):
            DraftBlock(base, (1, 2), signals)


def test_what_was_spent_is_no_part_of_what_was_said() -> None:
    block, verdict = DraftBlock(0, (1, 2)), Verdict(0, 2, 3)
    assert replace(block, cost=Cost(9)) == block and replace(verdict, cost=Cost(9)) == verdict
    assert replace(block, finish="eos") != block and replace(verdict, finish="eos") != verdict
    assert StepRecord(0, 0, 5, 3, 4, "verified", "always", 7.0, 7.0).overhead_ms == 7.0


@pytest.mark.parametrize(
    ("num_accepted", "token_id", "committed"),
    [(0, 9, (9,)), (2, 9, (1, 2, 9)), (3, 9, (1, 2, 3, 9)), (2, None, (1, 2))],
)
def test_a_verdict_commits_what_was_accepted_and_its_own_token(
    num_accepted: int, token_id: int | None, committed: tuple[int, ...]
) -> None:
    verdict = Verdict(0, num_accepted, token_id, "eos" if token_id is None else None)
    assert verdict.commits(DraftBlock(0, (1, 2, 3))) == committed
    assert verdict.num_tokens == len(committed)
