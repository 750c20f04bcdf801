"""What the target writes after a verdict: its own tokens, until it is told to stop, in a session that goes on."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.access.limits import RowBudget
from skydraft.errors import SessionNotFound
from skydraft.protocol.values import Opened, VerifyCall
from skydraft.types import Verdict
from tests import toys
from tests.cloud.driver import ENDLESS, Desk, Edge, desk_of
from tests.toys import law

Begin = Callable[[Edge], VerifyCall]
BEGINNINGS = [pytest.param(Edge.stream, id="stream"), pytest.param(Edge.correction, id="correction")]


def goes_on(desk: Desk, edge: Edge, **options: Any) -> None:
    """The next block needs no opening."""
    call = edge.call(draft=edge.likely(3, **options))
    assert desk.answer(call) == edge.judged(call)


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
