"""Laws of the worker, driven by hand: in any company, order and failure, a verdict is the target's own."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.cloud.jobs import Answer, GenerateJob, OpenJob, VerifyJob
from skydraft.errors import CloudFailure, EngineError, SessionNotFound
from skydraft.protocol.values import Emission, VerifyCall
from skydraft.types import Cost, Verdict
from tests import reference, toys
from tests.cloud.worker_by_hand import ENDLESS, Asked, Desk, Edge, Watched
from tests.toys import law

# One move: who, tokens to catch up, tokens to draft, which of all these is wrong, what happens to the call, steps.
moves = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 6) | st.integers(0, 40),
        st.integers(0, 8),
        st.none() | st.integers(0, 12),
        st.sampled_from(["once", "once", "twice", "again", "opens"]),
        st.sampled_from([0, 0, 0, 1, 2, 4]),
    ),
    min_size=8,
    max_size=40,
)


@st.composite
def edges(draw: st.DrawFn, seed: int) -> list[Edge]:
    """Four generations of one target, each with prompt, parameters and acceptance of its own."""
    found = []
    for number in range(4):
        params = draw(toys.params())
        if draw(st.integers(0, 3)):  # most of them do not end soon
            params = dataclasses.replace(params, max_new_tokens=400, min_new_tokens=400, sentences=0, stop=())
        prompt = tuple(draw(st.lists(st.integers(0, 24), min_size=1, max_size=9)))
        found.append(Edge(number, seed, params, prompt, draw(st.sampled_from([0, 0, 3]))))
    return found


def lost(answer: Answer) -> bool:
    """Whether the session has to be opened again."""
    return isinstance(answer, SessionNotFound | EngineError | CloudFailure)


def play(desk: Desk, edges: list[Edge], script: list[Any]) -> int:
    """Let edges ask as scripted, each one call at a time; every verdict must be that of the target in this process."""
    under_way: dict[int, tuple[list[Asked], VerifyCall, Verdict]] = {}
    num_verdicts = 0
    opened = set()

    def settle() -> None:
        nonlocal num_verdicts
        for number, (copies, call, expected) in list(under_way.items()):
            if not all(asked.is_answered for asked in copies):
                continue
            if any(lost(asked.last) for asked in copies):
                before, edges[number].num_seen = edges[number].num_seen, call.base - len(call.catch_up_ids)
                again = edges[number].reopened(call)
                edges[number].num_seen = before
                under_way[number] = [desk.ask(again)], again, expected
                continue
            assert [asked.last for asked in copies] == [expected] * len(copies)
            assert all(asked.last is copies[0].last for asked in copies)
            num_verdicts += 1
            del under_way[number]

    for who, num_catch_up, num_draft, miss, manner, num_steps in script:
        edge = edges[who]
        if edge.is_finished and who not in under_way:
            continue
        if who not in under_way:
            num_catch_up = min(num_catch_up, edge.params.max_new_tokens - edge.base - 1)
            written = edge.likely(num_catch_up + num_draft, miss)
            call = edge.call(
                written[:num_catch_up], written[num_catch_up:], opens=manner == "opens" or who not in opened
            )
            opened.add(who)
            copies = [desk.ask(call) for _ in range(2 if manner == "twice" else 1)]
            under_way[who] = copies, call, edge.judged(call)
        elif manner == "again":
            under_way[who][0].append(desk.ask(under_way[who][1]))
        desk.step(num_steps)
        settle()
    for _ in range(60):
        if not under_way:
            return num_verdicts
        desk.finish()
        settle()
    raise AssertionError("some call is never answered with its verdict")


def check_batches(engine: Watched, max_rows: int) -> None:
    for batch in engine.batches:
        assert sum(len(tokens) for _, tokens in batch) <= max_rows
        assert max(Counter(id(sequence) for sequence, _ in batch).values()) == 1


@law(30)
@given(st.data(), toys.seeds, moves, st.integers(1, 40), st.integers(1, 8))
def test_verdicts_in_any_company_are_those_of_the_target_alone(
    data: st.DataObject, seed: int, script: list[Any], max_rows: int, part: int
) -> None:
    desk = Desk(toys.toy(seed, kind=Watched), max_rows=max_rows)
    desk.engine.max_batch_rows = part  # rows of a part of a prompt
    everyone = data.draw(edges(seed))
    num_verdicts = play(desk, everyone, script)
    assert num_verdicts > 0
    check_batches(desk.engine, max_rows)
    num_rows = sum(len(tokens) for batch in desk.engine.batches for _, tokens in batch)
    distinct = {id(asked.last): asked.last for asked in desk.asked}
    assert num_rows == sum(verdict.cost.num_rows for verdict in distinct.values())  # no block was judged twice
    assert desk.engine.num_open == desk.worker.num_sessions <= 4
    desk.worker.stop()
    desk.worker.run()
    assert desk.engine.num_open == 0


@law(30)
@given(st.data(), toys.seeds, moves, st.integers(1, 40), st.integers(1, 3))
def test_evictions_cost_no_verdict(
    data: st.DataObject, seed: int, script: list[Any], max_rows: int, max_sessions: int
) -> None:
    desk = Desk(toys.toy(seed, kind=Watched), max_rows=max_rows, max_sessions=max_sessions)
    play(desk, data.draw(edges(seed)), script)
    assert desk.engine.num_open == desk.worker.num_sessions <= max_sessions
    check_batches(desk.engine, max_rows)


@law(25)
@given(st.data(), toys.seeds, moves, st.integers(1, 20), st.sets(st.integers(1, 40), max_size=4))
def test_forwards_that_fail_cost_no_verdict(
    data: st.DataObject, seed: int, script: list[Any], max_rows: int, fail_at: set[int]
) -> None:
    desk = Desk(toys.toy(seed, kind=Watched), max_rows=max_rows, max_sessions=3)
    engine = desk.engine
    engine.fails = lambda feeds: EngineError("The device was lost.") if len(engine.batches) in fail_at else None
    play(desk, data.draw(edges(seed)), script)
    assert engine.num_open == desk.worker.num_sessions


@law(40)
@given(st.data(), toys.seeds, st.integers(1, 12), st.integers(1, 3))
def test_a_stream_is_the_target_alone_in_any_company(
    data: st.DataObject, seed: int, max_rows: int, max_sessions: int
) -> None:
    desk = Desk(toys.toy(seed, kind=Watched), max_rows=max_rows, max_sessions=max_sessions)
    everyone = data.draw(edges(seed))
    streams = []
    for edge in everyone:
        edge.params = dataclasses.replace(edge.params, max_new_tokens=min(edge.params.max_new_tokens, 20))
        edge.num_seen, edge.top = 0, 0
        streams.append(desk.ask(edge.open(), kind=GenerateJob))
        desk.step(data.draw(st.integers(0, 3)))
    desk.finish()
    for edge, asked in zip(everyone, streams, strict=True):
        token_ids = [token_id for emission in asked.answers for token_id in emission.token_ids]
        assert (tuple(token_ids), asked.last.finish) == reference.plain(toys.toy(seed), edge.prompt, edge.params)
        bases = [emission.base for emission in asked.answers]
        assert bases == list(range(len(token_ids)))
    check_batches(desk.engine, max_rows)
    desk.step()
    assert desk.engine.num_open == 0 == desk.worker.num_sessions


def costly(monkeypatch: pytest.MonkeyPatch) -> tuple[Desk, Edge]:
    """A worker whose engine measures by the desk's clock, in parts of 4 rows of a prompt and 2 of a block."""
    desk = Desk(toys.toy(4, kind=Watched), max_rows=2)
    desk.engine.max_batch_rows = 4
    monkeypatch.setattr("skydraft.engines.base.time", desk.clock)
    return desk, Edge(0, 4, ENDLESS, prompt=(0, 3, 5, 7) * 2)


def test_a_verdict_says_what_it_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, edge = costly(monkeypatch)
    call = edge.call(draft=edge.likely(4), opens=True)
    asked = desk.ask(call)
    desk.clock.now += 0.5
    desk.finish()
    cost = asked.last.cost
    assert (cost.num_passes, cost.num_rows) == (3, 5)
    assert cost.prefill_ms == pytest.approx(20, abs=0.1) and cost.forward_ms == pytest.approx(50, abs=0.1)
    assert cost.queue_ms == pytest.approx(500, abs=0.1)
    assert cost.encode_ms == 0


def test_an_opening_and_each_token_of_a_stream_say_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, edge = costly(monkeypatch)
    cost = desk.answer(edge.open(), kind=OpenJob).cost
    assert cost == Cost(forward_ms=cost.prefill_ms, prefill_ms=cost.prefill_ms)
    assert cost.prefill_ms == pytest.approx(20, abs=0.1)
    stream = Edge(1, 4, dataclasses.replace(ENDLESS, max_new_tokens=3, min_new_tokens=3), prompt=edge.prompt)
    asked = desk.ask(stream.open(), kind=GenerateJob)
    desk.finish()
    first, *others = [answer.cost for answer in asked.answers if isinstance(answer, Emission)]
    assert [(cost.num_passes, cost.num_rows) for cost in (first, *others)] == [(1, 1)] * 3
    assert first.prefill_ms == pytest.approx(20, abs=0.1) and first.forward_ms == pytest.approx(30, abs=0.1)
    assert [cost.prefill_ms for cost in others] == [0, 0]
    assert [cost.forward_ms for cost in others] == pytest.approx([10, 10], abs=0.1)
    assert all(cost.queue_ms < 0.1 for cost in (first, *others))


def test_a_job_is_answered_once_and_the_second_answer_reaches_nobody() -> None:
    desk, edge = Desk(toys.toy(4, kind=Watched)), Edge(0, 4, ENDLESS)
    asked = desk.ask(call := edge.call(opens=True))
    desk.finish()
    assert asked.job.is_answered
    with pytest.raises(CloudFailure, match="answered before"):
        asked.job.answer(EngineError("late"))
    assert asked.answers == [edge.judged(call)]


def test_a_job_that_has_not_begun_has_no_session_and_no_work() -> None:
    for kind in (OpenJob, VerifyJob, GenerateJob):
        job = kind(Edge(0, 4, ENDLESS).open(), "ann", lambda answer: None, 0.0)
        assert (job.has_session, job.work, job.is_answered, job.key) == (False, None, False, (0, "ann"))
        with pytest.raises(CloudFailure, match="no session"):
            job.session  # noqa: B018
        with pytest.raises(CloudFailure):
            job.commit(0.0)
