"""Text as it comes: whole characters, nothing of a stop string; and iterating once, again, in part, two at a time."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.decoding.generation import TextStream
from skydraft.engines.toy import open_toy
from skydraft.engines.vocab import Vocab
from skydraft.errors import EngineError

from ..toys import EOS, PIECES, TOOL, ids, law

VOCAB = Vocab([*PIECES, "\ufffd".encode()], list, special_ids=(TOOL, EOS))  # a model may write U+FFFD itself


def stream(pieces, stop=()):
    """What each token shows, and what is left for the end."""
    text = TextStream(VOCAB, stop)
    return [text.push(token_id)[1] for token_id in pieces], text.finish()[1]


@law(200)
@given(
    st.lists(st.integers(0, VOCAB.size - 1), max_size=14),
    st.lists(st.text("ab我们员3.在。\ufffd", min_size=1, max_size=4), max_size=3),
)
@example(ids("在".encode()[:2], "a", "b"), ["\ufffd"])
@example([*ids("员".encode()[:1]), VOCAB.size - 1, *ids("a")], ["\ufffd"])
@example(ids("员".encode()[:1], "在".encode()[:2], "a", "b"), ["ab"])
def test_the_pieces_are_the_decoded_text_cut_at_the_first_stop_string(pieces, stop):
    shown, rest = stream(pieces, stop)
    cut = VOCAB.decode(pieces)
    for length in range(len(pieces) + 1):
        written = VOCAB.text_bytes(pieces[:length])  # wrong bytes are shown as U+FFFD, and are no stop string of it
        if found := [written.find(one.encode()) for one in stop if one.encode() in written]:
            cut = written[: min(found)].decode(errors="replace")
            break
    assert "".join(shown) + rest == cut
    # Nothing is held that no stop string could begin with.
    held = VOCAB.decode(pieces)[len("".join(shown)) :]
    assert not held or any(one.startswith(held) for one in stop) or any(one in VOCAB.decode(pieces) for one in stop)


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


@pytest.mark.parametrize("name", ["text", "token_ids"])
def test_who_asks_for_the_text_first_gets_all_of_it(generation: Generation, name: str) -> None:
    assert len(getattr(generation, name)) >= 20 and generation.finish_reason == "length"
    whole(generation)


@pytest.mark.parametrize("num_read", [1, 5, 20])
def test_after_a_break_the_next_begins_anew_and_goes_on(generation: Generation, num_read: int) -> None:
    begun = [token.token_id for token in itertools.islice(generation, num_read)]
    assert whole(generation)[:num_read] == tuple(begun)


def test_rounds_are_given_once(generation: Generation) -> None:
    first = next(generation.rounds())
    rest = list(generation.rounds())
    assert [done.record.round for done, _ in [first, *rest]] == list(range(len(generation.records)))
    assert list(generation.rounds()) == []
    whole(generation)


@pytest.mark.parametrize("mode", ["edge", "cloud", "lossless"])
def test_what_was_closed_halfway_gives_what_it_has_and_says_why_there_is_no_more(mode: str) -> None:
    generation = skydraft.generate("语速", edge=open_toy("toy:drift=0.4"), cloud=open_toy("toy"), plan=make_plan(mode))
    next(iter(generation))
    assert 0 < len(generation.token_ids) < 100 and generation.finish_reason is None  # it is not run to its end
    generation.close()
    seen = []
    with pytest.raises(EngineError, match="closed"):
        for token in generation:
            seen.append(token.token_id)
    assert tuple(seen) == generation.token_ids != ()
