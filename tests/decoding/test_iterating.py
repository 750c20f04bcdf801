"""Iterating over a generation: once, again, in part, and two at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.engines.toy import open_toy
from skydraft.errors import EngineError


@pytest.fixture
def generation() -> Iterator[Generation]:
    edge, cloud = open_toy("toy:drift=0.4"), open_toy("toy")
    params = DecodingParams(max_new_tokens=20, min_new_tokens=20)
    with edge, cloud, skydraft.generate("语速", edge=edge, cloud=cloud, params=params, plan=make_plan(k=3)) as started:
        yield started


def whole(generation: Generation) -> tuple[int, ...]:
    """Check that all came, in order and once, and that the figures say so; returns the ids."""
    tokens = list(generation)
    assert tuple(token.token_id for token in tokens) == generation.token_ids and len(tokens) == 20
    assert "".join(token.text for token in tokens) == generation.text != ""
    assert [record.round for record in generation.records] == list(range(len(generation.records)))
    ended = [record.ended_ms for record in generation.records]
    assert ended == sorted(ended)
    assert generation.finish_reason == "length" and generation.stats.num_tokens == 20
    return generation.token_ids


def test_nothing_is_there_before_the_first_round(generation: Generation) -> None:
    assert (generation.text, generation.token_ids, generation.finish_reason) == ("", (), None)
    assert generation.stats.num_tokens == 0


def test_a_second_iteration_gives_the_same_tokens(generation: Generation) -> None:
    first = list(generation)
    assert list(generation) == first == list(generation.run()) and whole(generation)


@pytest.mark.parametrize("num_read", [1, 2, 5, 19, 20])
def test_after_a_break_the_next_begins_anew_and_goes_on(generation: Generation, num_read: int) -> None:
    begun = [token.token_id for token in islice(generation, num_read)]
    assert whole(generation)[:num_read] == tuple(begun)


def test_two_at_a_time_get_all_of_it_each(generation: Generation) -> None:
    pairs = list(zip(generation, generation, strict=True))
    assert all(one is other for one, other in pairs) and len(pairs) == 20
    whole(generation)


def test_rounds_are_given_once(generation: Generation) -> None:
    first = next(generation.rounds())
    rest = list(generation.rounds())
    assert [done.record.round for done, _ in [first, *rest]] == list(range(len(generation.records)))
    assert list(generation.rounds()) == []
    whole(generation)


def test_what_was_closed_halfway_gives_what_it_has_and_says_why_there_is_no_more(generation: Generation) -> None:
    next(iter(generation))
    generation.close()
    seen = []
    with pytest.raises(EngineError, match="closed"):
        for token in generation:
            seen.append(token.token_id)
    assert tuple(seen) == generation.token_ids != ()
