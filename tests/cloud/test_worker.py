"""Laws of the worker, driven by hand: in any company, order and failure, a verdict is the target's own, and so is what
the target writes after it until it is told to stop.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.access.limits import RowBudget
from skydraft.cloud.docket import Answer
from skydraft.errors import CloudFailure, EngineError, SessionNotFound
from skydraft.protocol.values import OpenCall, Opened, VerifyCall
from skydraft.types import Cost, Verdict

from .. import toys
from ..toys import law
from .driver import ENDLESS, Asked, Desk, Edge, desk_of


# One move: who, tokens to catch up, tokens to draft, which of all these is wrong, what happens to the call, tokens that
# the target may write, steps.
def moves(*writes: int) -> st.SearchStrategy[list[Any]]:
    move = st.tuples(
        st.integers(0, 3), st.integers(0, 6) | st.integers(0, 40), st.integers(0, 8), st.none() | st.integers(0, 12),
        st.sampled_from(["once", "once", "twice", "again", "opens", "stop"]), st.sampled_from(writes),
        st.sampled_from([0, 0, 0, 1, 2, 4]),
    )  # fmt: skip
    return st.lists(move, min_size=8, max_size=40)


WRITING = moves(0, 0, 1, 3, 30)


@st.composite
def edges(draw: st.DrawFn, seed: int) -> list[Edge]:
    """Four generations of one target, each with a prompt and parameters of its own."""
    found = []
    for number in range(4):
        params = draw(toys.params())
        if draw(st.integers(0, 3)):  # most of them do not end soon
            params = dataclasses.replace(params, max_new_tokens=400, min_new_tokens=400, sentences=0, stop=())
        prompt = tuple(draw(st.lists(st.integers(0, 24), min_size=1, max_size=9)))
        found.append(Edge(number, seed, params, prompt))
    return found


def lost(answer: Answer) -> bool:
    """Whether the session has to be opened again."""
    return isinstance(answer, SessionNotFound | EngineError | CloudFailure)


class Play:
    """Lets edges ask as scripted, each one call at a time; all verdicts and tokens must be those of the target here."""

    def __init__(self, desk: Desk, edges: list[Edge]) -> None:
        self._desk = desk
        self._edges = edges
        self._under_way: dict[int, tuple[list[Asked], VerifyCall, Verdict]] = {}
        self._opened: set[int] = set()
        self._stopped: set[int] = set()
        self.num_verdicts = self.num_written = 0

    def run(self, script: list[Any]) -> None:
        for who, num_catch_up, num_draft, miss, manner, write, num_steps in script:
            if who not in self._under_way and not self._edges[who].is_finished:
                self._ask(who, num_catch_up, num_draft, miss, manner, write)
            elif who in self._under_way and manner == "again":
                copies, call, _ = self._under_way[who]
                copies.append(self._desk.ask(call))
            elif who in self._under_way and manner == "stop":
                self._stopped.add(who)
                self._desk.stop_writing(self._under_way[who][0][-1])
            self._desk.step(num_steps)
            self._settle()
        for _ in range(60):
            if not self._under_way:
                return
            self._desk.finish()
            self._settle()
        raise AssertionError("some call is never answered with its verdict")

    def _ask(self, who: int, num_catch_up: int, num_draft: int, miss: int | None, manner: str, write: int) -> None:
        edge = self._edges[who]
        num_catch_up = min(num_catch_up, edge.params.max_new_tokens - edge.base - 1)
        likely, opens = edge.likely(num_catch_up + num_draft, miss), manner == "opens" or who not in self._opened
        call = edge.call(likely[:num_catch_up], likely[num_catch_up:], opens=opens, write=write)
        self._opened.add(who)
        self._stopped.discard(who)
        copies = [self._desk.ask(call) for _ in range(2 if manner == "twice" else 1)]
        self._under_way[who] = copies, call, edge.judged(call)

    def _settle(self) -> None:
        for who, (copies, call, expected) in list(self._under_way.items()):
            if not all(asked.is_answered for asked in copies):
                continue
            firsts = [asked.answers[0] for asked in (copies[-1:] if call.write else copies)]
            if any(map(lost, firsts)):
                self._reopen(who, call, expected)
                continue
            assert firsts == [expected] * len(firsts) and all(first is firsts[0] for first in firsts)
            self.num_verdicts += 1
            del self._under_way[who]
            if call.write:
                self._take_written(who, copies[-1], call.write if expected.hands_over(call.block) else 0)

    def _reopen(self, who: int, call: VerifyCall, expected: Verdict) -> None:
        edge = self._edges[who]
        before, edge.num_seen = edge.num_seen, call.base - len(call.catch_up_ids)
        again = edge.reopened(call)
        edge.num_seen = before
        self._under_way[who] = [self._desk.ask(again)], again, expected

    def _take_written(self, who: int, asked: Asked, most: int) -> None:
        edge, num_written = self._edges[who], len(asked.written)
        edge.took(asked)
        self.num_written += num_written
        if lost(asked.last):
            self._opened.discard(who)
            edge.epoch += 1
        elif who in self._stopped or edge.is_finished:
            assert num_written <= most
        else:
            assert num_written == most


Begin = Callable[[Edge], VerifyCall]
BEGINNINGS = [pytest.param(Edge.stream, id="stream"), pytest.param(Edge.correction, id="correction")]


def goes_on(desk: Desk, edge: Edge, **options: Any) -> None:
    """The next block needs no opening."""
    call = edge.call(draft=edge.likely(3, **options))
    assert desk.answer(call) == edge.judged(call)


@law(30)
@given(st.data(), toys.seeds, moves(0), st.integers(1, 40), st.integers(1, 8))
def test_company_alters_no_verdict(data: st.DataObject, seed: int, script: list[Any], max_rows: int, part: int) -> None:
    desk = desk_of(seed, part=part, max_rows=max_rows)
    play = Play(desk, data.draw(edges(seed)))
    play.run(script)
    desk.check_batches()
    assert play.num_verdicts > 0
    distinct = {id(asked.last): asked.last for asked in desk.all_asked}
    assert desk.engine.num_rows == sum(verdict.cost.num_rows for verdict in distinct.values())  # none was judged twice
    assert desk.engine.num_open == desk.num_sessions <= 4
    desk.shut_down()
    assert desk.engine.num_open == 0


@law(50)
@given(st.data(), toys.seeds, WRITING, st.integers(1, 40), st.integers(1, 4), st.sets(st.integers(1, 40), max_size=4))
def test_neither_company_nor_evictions_nor_forwards_that_fail_cost_a_token(
    data: st.DataObject, seed: int, script: list[Any], max_rows: int, max_sessions: int, fail_at: set[int]
) -> None:
    desk = desk_of(seed, max_rows=max_rows, max_sessions=max_sessions)
    engine = desk.engine
    engine.fails = lambda feeds: EngineError("The device was lost.") if len(engine.batches) in fail_at else None
    Play(desk, data.draw(edges(seed))).run(script)
    desk.check_batches()
    desk.tick()  # the next tick releases what failed in a forward
    assert engine.num_open == desk.num_sessions <= max_sessions


def test_each_answer_says_what_it_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the desk's clock, in parts of 4 rows of a prompt and 2 of a block, each of which takes 10 ms."""
    desk = desk_of(part=4, max_rows=2)
    monkeypatch.setattr("skydraft.engines.prefix_cache.time", desk.clock)
    edge, other = (Edge(number, 4, ENDLESS, prompt=(0, 3, 5, 7) * 2) for number in range(2))
    cost = desk.answer(OpenCall(7, 1, edge.opening())).cost
    assert cost == Cost(forward_ms=cost.prefill_ms, prefill_ms=cost.prefill_ms)
    assert cost.prefill_ms == pytest.approx(20, abs=0.1)
    judged = desk.ask(edge.call(draft=edge.likely(4), opens=True))
    desk.clock.now += 0.5
    desk.finish()
    asked = desk.ask(other.stream(2))
    desk.finish()
    costs = [answer.cost for each in (judged, asked) for answer in each.answers if isinstance(answer, Verdict)]
    assert [(cost.num_passes, cost.num_rows) for cost in costs] == [(3, 5), (1, 1), (1, 1), (1, 1)]
    assert [cost.prefill_ms for cost in costs] == pytest.approx([20, 20, 0, 0], abs=0.1)
    assert [cost.forward_ms for cost in costs] == pytest.approx([50, 30, 10, 10], abs=0.1)
    assert [cost.queue_ms for cost in costs] == pytest.approx([500, 0, 0, 0], abs=0.1)


@law(25)
@given(toys.seeds, st.integers(0, 12), st.integers(0, 9), st.sampled_from(["lost", "left", "under way"]), st.booleans())
def test_a_repeated_verify_gets_the_same_answer(
    seed: int, num_steps: int, num_write: int, how: str, ends: bool
) -> None:
    """Also where the text has ended, which the repeat is told once more."""
    params = dataclasses.replace(ENDLESS, max_new_tokens=6, min_new_tokens=6) if ends else ENDLESS
    desk, edge = desk_of(seed, max_rows=2), Edge(0, seed, params)
    first = desk.ask(call := edge.call(draft=edge.likely(4, miss=2), opens=True, write=num_write))
    desk.step(num_steps)
    if how == "lost":
        desk.finish()
    elif how == "left":
        desk.stop_writing(first)
    num_lost = 0 if first.answers else desk.engine.num_rows  # the rows of a block that was not judged to its end
    again = desk.ask(call)
    desk.finish()
    alone = desk_of(seed, max_rows=2)
    alone.ask(call)
    alone.finish()
    assert desk.engine.num_rows <= alone.engine.num_rows + num_lost  # else nothing is computed twice
    most = min(num_write, 3) if ends else num_write
    if how == "under way" and len(first.written) < most:
        assert isinstance(first.last, SessionNotFound)  # it has one reader
    assert again.answers[0] == edge.judged(call)
    assert len(again.written) == most and again.written[: len(first.written)] == first.written
    edge.took(again)
    assert edge.is_finished == (ends and most == 3)
    assert isinstance(again.last, Verdict) and bool(again.last.finish) == edge.is_finished
    if not edge.is_finished:
        goes_on(desk, edge, miss=1)


@pytest.mark.parametrize("begin", BEGINNINGS)
@pytest.mark.parametrize("part", [64, 4])
def test_a_text_that_made_way_goes_on_with_the_right_tokens_when_it_is_opened_again(begin: Begin, part: int) -> None:
    """Its block is judged before it makes way: who gave way before had its prompt read in vain, and would again."""
    desk = desk_of(max_sessions=2, part=part)
    texts = [Edge(number, 4, ENDLESS, prompt=(number, 3) * 20) for number in (1, 2)]
    asked = [desk.ask(begin(edge), "eve") for edge in texts]
    desk.step(6 if part == 64 else 3)
    mine = desk.ask(Edge(9, 4, ENDLESS).open(), "bob")
    desk.steps_until(mine)
    assert mine.last == Opened(0)
    desk.step(30)
    desk.ask(Edge(8, 4, ENDLESS).open(), "bob")  # who has as many as the other is not robbed again
    desk.step(10)
    ((edge, ended),) = [pair for pair in zip(texts, asked, strict=True) if pair[1].is_answered]
    assert isinstance(ended.last, SessionNotFound) and "made way" in str(ended.last)
    assert ended.answers[0] == edge.judged(ended.job.call)  # type: ignore[arg-type]
    edge.took(ended)
    edge.epoch += 1
    again = desk.ask(edge.stream(7), "eve")
    (other,) = [each for each in asked if each is not ended]
    desk.stop_writing(other)
    desk.finish()
    assert again.answers[0] == edge.judged(again.job.call)  # type: ignore[arg-type]
    edge.took(again)
    assert len(again.written) == 7


@pytest.mark.parametrize("begin", BEGINNINGS)
@pytest.mark.parametrize("rate", [20.0, 50.0])
def test_a_text_takes_no_more_rows_than_its_rate_and_a_burst_and_holds_up_nobody(rate: float, begin: Begin) -> None:
    desk = desk_of()
    desk.ask(begin(Edge(1, 4, ENDLESS)), budget=RowBudget(rate, desk.clock))
    other = desk.ask(Edge(2, 4, ENDLESS).stream(), "bob")
    began, burst = desk.clock(), max(2 * rate, 64)
    for _ in range(1000):
        desk.step()
        desk.clock.now += 0.005
        num_rows, allowed = desk.engine.num_rows - len(other.answers), rate * (desk.clock.now - began)
        assert num_rows <= burst + allowed + 2 + 4  # four are judged at most
    assert num_rows > burst + allowed / 2  # slowed down, not stopped
    assert len(other.answers) > 980
