"""Text as it comes: whole characters, nothing of a stop string; and iterating once, again, in part, two at a time."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.decoding.generation import TextStream
from skydraft.engines.slots import Slots
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


BEGUN: dict[str, Callable[[Generation], object]] = {
    "text": lambda started: started.text, "ids": lambda started: started.token_ids,
    **{f"{num} tokens": lambda started, num=num: list(itertools.islice(started, num)) for num in (0, 1, 5, 20)},
    "a round": lambda started: next(started.rounds()), "rounds": lambda started: list(started.rounds()),
}  # fmt: skip


@pytest.mark.parametrize("begin", BEGUN.values(), ids=BEGUN)
@pytest.mark.parametrize("goes_on_by", ["tokens", "rounds"])
def test_however_it_was_begun_all_comes_in_order_and_each_round_once(begin: Any, goes_on_by: str) -> None:
    params = DecodingParams(max_new_tokens=20, min_new_tokens=20)
    with open_toy("toy:drift=0.4") as edge, open_toy("toy") as cloud:
        generation = skydraft.generate("语速", edge=edge, cloud=cloud, params=params, plan=make_plan(k=3))
        begin(generation)
        num_begun = len(generation.records)
        if goes_on_by == "rounds":
            given = [done.record.round for done, _ in generation.rounds()]
            assert given == list(range(num_begun, len(generation.records))) and not list(generation.rounds())
        tokens = list(generation)
    assert tuple(token.token_id for token in tokens) == generation.token_ids and len(tokens) == 20
    assert "".join(token.text for token in tokens) == generation.text != ""
    assert [record.round for record in generation.records] == list(range(len(generation.records)))
    ended = [record.ended_ms for record in generation.records]
    assert ended == sorted(ended)
    assert generation.finish_reason == "length" and generation.stats.num_tokens == 20


@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize("mode", ["edge", "cloud", "lossless"])
def test_what_was_closed_halfway_gives_what_it_has_and_says_why_there_is_no_more(mode: str, has_slots: bool) -> None:
    edge, cloud = open_toy("toy:drift=0.4"), open_toy("toy")
    for toy in (edge, cloud) if has_slots else ():
        toy.slots = Slots(toy.name, 1, toy.context_len)
    generation = skydraft.generate("语速", edge=edge, cloud=cloud, plan=make_plan(mode))
    next(iter(generation))
    assert 0 < len(generation.token_ids) < 100 and generation.finish_reason is None  # it is not run to its end
    generation.close()
    seen = list[int]()
    with pytest.raises(EngineError, match="closed"):
        seen.extend(token.token_id for token in generation)
    assert tuple(seen) == generation.token_ids != ()
