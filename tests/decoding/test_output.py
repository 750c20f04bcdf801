"""What a generation gives: its text as it comes, in part or again, the scores of its tokens, and its figures."""

import itertools
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, api, make_plan
from skydraft.decoding.accounts.prices import Prices
from skydraft.decoding.accounts.stats import stats_of
from skydraft.decoding.generation import TextStream
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.engines.slots import Slots
from skydraft.engines.toy import open_toy
from skydraft.engines.vocab import Vocab
from skydraft.errors import EngineError, OptionError
from skydraft.prompts.messages import asked
from skydraft.types import Cost, LinkCost, StepRecord, Token

from .. import reference
from ..toys import EOS, PIECES, TOOL, ids, law

VOCAB = Vocab([*PIECES, "\ufffd".encode()], list, special_ids=(TOOL, EOS))  # a model may write U+FFFD itself


def stream(pieces, stop=()):
    """What each token shows, and what is left for the end."""
    text = TextStream(VOCAB, stop)
    return [text.push(token_id)[1] for token_id in pieces], text.finish()[1]


def row_after(engine: Engine, prefix: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities [vocab] of the token after `prefix`, computed without the module under test."""
    row = reference.row_after(engine, prefix).astype(np.float64)
    return row - np.logaddexp.reduce(row)


def record(number, base, drafted, accepted, committed, outcome, ended_ms, *, audited=0, agreed=0, **spent):
    reason = "" if outcome == "skipped" else "uncertain"
    return StepRecord(
        number, base, drafted, accepted, committed, outcome, reason, 100.0, ended_ms,
        num_audited=audited, num_agreed=agreed, **spent,
    )  # fmt: skip


ROUNDS = [
    record(0, 0, 4, 0, 4, "skipped", 30.0, draft=Cost(3, 9, 25.0, 20.0, 5.0, num_cached=256)),
    record(
        1, 4, 4, 3, 4, "verified", 130.0, audited=4, agreed=3,
        draft=Cost(4, 4, 4.0), target=Cost(2, 9, 60.0, 40.0, 10.0, 1.5, 128), link=LinkCost(70.0, 300, 40, 96),
    ),
    record(
        2, 8, 4, 4, 5, "verified", 180.0,
        draft=Cost(4, 5, 4.0), target=Cost(1, 5, 10.0), link=LinkCost(20.0, 50, 20),
    ),
    record(3, 13, 4, 0, 4, "fallback", 190.0, draft=Cost(4, 5, 4.0), link=LinkCost(0.0, 50)),
    record(4, 17, 2, 2, 2, "verified", 200.0, audited=4, agreed=2, target=Cost(1, 7, 8.0), link=LinkCost(9.0, 60, 20)),
]  # fmt: skip


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
    seen = [next(tokens := iter(generation))]
    assert 0 < len(generation.token_ids) < 100 and generation.finish_reason is None  # it is not run to its end
    generation.close()
    for shown, iterator in ((seen, tokens), (again := list[Token](), generation)):
        with pytest.raises(EngineError, match="closed"):
            shown.extend(iterator)
        assert tuple(token.token_id for token in shown) == generation.token_ids != ()
    assert seen == again


def test_what_was_cancelled_and_closed_gives_what_it_has() -> None:
    generation = skydraft.generate("语速", edge=open_toy("toy"), plan=make_plan("edge"))
    next(iter(generation))
    generation.cancel()
    generation.close()
    assert tuple(token.token_id for token in generation) == generation.token_ids != ()


@pytest.mark.parametrize("mode", ["edge", "cloud", "lossless", "fluency", "quality"])
@pytest.mark.parametrize(("temperature", "grammar"), [(0.0, ""), (0.9, ""), (0.7, "regex:语速[a-z]{3}(快|慢)+")])
def test_each_token_has_the_score_of_its_author(mode: str, temperature: float, grammar: str) -> None:
    if grammar:
        pytest.importorskip("llguidance")
    edge, target = open_toy("toy:drift=0.4"), open_toy("toy")
    params = DecodingParams(max_new_tokens=24, temperature=temperature, seed=3, grammar=grammar or None)
    plain = GenerateRequest(asked("语速"), plan=make_plan(mode), params=params)
    generation = api.start(replace(plain, num_best=2), edge=edge, cloud=target)
    scores = [told for done, _ in generation.rounds() for told in generation.scores(done)]
    assert [told.token_id for told in scores] == list(generation.token_ids)
    prefix = generation.request.prompts.edge.token_ids
    for told, origin in zip(scores, generation.origins, strict=True):
        want = row_after(edge if origin in ("edge", "skipped") else target, prefix)
        assert told.logprob == pytest.approx(want[told.token_id], abs=1e-6)
        assert [each for each, _ in told.best] == list(np.argsort(-want, kind="stable")[:2])
        prefix += (told.token_id,)
    same = api.start(plain, edge=edge, cloud=target).run()  # scoring changes no token
    assert same.token_ids == generation.token_ids and same.origins == generation.origins


def test_a_server_without_skydraft_tells_none() -> None:
    request = GenerateRequest(asked("语速"), plan=make_plan("cloud"), num_best=0)
    cloud = skydraft.connect("http://127.0.0.1:9/v1")
    with pytest.raises(OptionError, match="tells no log-probabilities"):
        api.start(request, edge=open_toy("toy"), cloud=cloud)
    cloud.close()


def test_figures_are_those_of_the_records():
    expected = {
        "num_tokens": 19, "num_rounds": 5, "num_escalated": 3, "num_fallback_tokens": 4,
        "num_draft_tokens": 10, "num_accepted_tokens": 9, "acceptance_rate": 0.9,  # of escalated blocks alone
        "mean_acceptance_length": round(11 / 3, 4), "cloud_calls_per_token": round(3 / 19, 4),
        "target_written_per_token": round(2 / 19, 4), "target_passes_per_token": round(4 / 19, 4),
        "target_rows_per_token": round(21 / 19, 4), "ttft_ms": 30.0, "tokens_per_s": 95.0,
        # gaps of 25 four times, 10 five times, 2.5 four times, 5 twice
        "itl_ms_p50": 10.0, "itl_ms_p95": 25.0,
        "draft_ms": 37.0, "target_ms": 78.0, "overhead_ms": 500.0 - 37.0 - 99.0,
        "bytes_up": 460, "bytes_down": 80, "shared_bytes": 96, "audited_agreement": 5 / 8,
        "draft_prefill_ms": 20.0, "target_prefill_ms": 40.0,
        "cached_tokens": {"edge": 256, "cloud": 128},
    }  # fmt: skip
    assert expected.items() <= asdict(stats_of(ROUNDS)).items()


def test_where_there_is_nothing_to_divide_by_there_is_no_rate():
    nothing, alone = stats_of([]), stats_of(ROUNDS[:1])
    rates = ("acceptance_rate", "mean_acceptance_length", "audited_agreement")
    assert [getattr(alone, name) for name in rates] == [None] * 3
    assert (alone.cloud_calls_per_token, alone.itl_ms_p50, alone.num_escalated) == (0, None, 0)
    values = asdict(nothing)
    assert values.pop("cached_tokens") == {"edge": 0, "cloud": 0} and values.pop("exact")
    assert {value for value in values.values() if value is not None} == {0}
    assert nothing.ttft_ms is nothing.tokens_per_s is nothing.cloud_calls_per_token is None


def test_a_price_is_that_of_the_tokens():
    link = LinkCost(num_requests=2, tokens_in=3000, tokens_hit=1000, tokens_out=500)
    records = [replace(ROUNDS[0], link=link)]
    found = stats_of(records, is_exact=False, prices=Prices(1.0, 10.0, 100.0))
    assert found.cost == pytest.approx((1000 * 1 + 2000 * 10 + 500 * 100) / 1e6)
    assert not found.exact and stats_of(records).cost is None
