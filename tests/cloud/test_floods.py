"""One owner's flood leaves places, seats and turns to the other owners, and hostile orders stop nobody."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.errors import CloudFailure, EngineError, SessionNotFound
from skydraft.protocol.values import OpenCall, Opened, VerifyCall
from skydraft.types import Verdict

from ..toys import law
from .worker_by_hand import ENDLESS, TO_THE_END, Asked, Desk, Edge, desk_of


def victims_desk(max_sessions: int = 4) -> Desk:
    return desk_of(1, part=8, max_sessions=max_sessions, max_rows=4)


def edge_of(number: int, length: int = 1) -> Edge:
    return Edge(number, 1, ENDLESS, prompt=(3,) * length)


def correction(edge: Edge) -> VerifyCall:
    """A block whose second draft is wrong, after which the target writes on."""
    return edge.call(draft=edge.likely(3, miss=1), opens=True, write=TO_THE_END)


# What one owner asks for all at once, of each of so many sessions.
FLOODS: dict[str, tuple[int, Callable[[int], OpenCall | VerifyCall]]] = {
    "alone": (0, lambda number: edge_of(number).open()),
    "openings": (255, lambda number: edge_of(number).open()),
    "long prompts": (39, lambda number: edge_of(number, 200).open()),
    "texts": (39, lambda number: edge_of(number).stream()),
    "blocks": (39, lambda number: edge_of(number).call((), edge_of(number).likely(8), opens=True)),
    "corrections": (39, lambda number: correction(edge_of(number))),
}


def rounds(flood: str) -> list[int]:
    """Steps that each of a victim's Open and Verifies waited for."""
    desk, edge, waits = victims_desk(), Edge(900, 1, ENDLESS), []
    num_sessions, call_of = FLOODS[flood]
    flooding = [call_of(number) for number in range(1, num_sessions + 1)]

    def asked(call: OpenCall | VerifyCall) -> Asked:
        for each in flooding:
            desk.ask(each, "eve")
        desk.step(1)
        waits.append(desk.steps_until(mine := desk.ask(call, "victim")))
        return mine

    assert isinstance(asked(edge.open()).last, Opened)
    for _ in range(10):
        call = edge.call((), edge.likely(3))
        answer = asked(call).last
        assert isinstance(answer, Verdict) and answer == edge.judged(call)  # its seat is never taken
    return waits


@pytest.mark.parametrize("flood", list(FLOODS)[1:])
def test_a_flood_of_one_owner_lets_another_wait_for_three_times_as_long_as_alone_at_most(flood: str) -> None:
    assert statistics.median(rounds(flood)) <= 3 * max(statistics.median(rounds("alone")), 1)


@pytest.mark.parametrize("begin", [Edge.stream, correction], ids=["stream", "correction"])
def test_texts_that_hold_all_seats_make_way_for_an_owner_who_has_none(begin: Callable[[Edge], VerifyCall]) -> None:
    desk = victims_desk()
    texts = [desk.ask(begin(edge_of(number)), "eve") for number in range(1, 5)]
    desk.step(6)  # each has its verdict
    assert desk.num_sessions == 4
    mine = [desk.ask(Edge(900 + number, 1, ENDLESS).open(), "victim") for number in range(3)]
    desk.step(6)
    # Two each: an owner with as many as the other is not robbed, so the third waits, or takes one of its own.
    assert all(isinstance(each.last, Opened) for each in mine[:2])
    ended = [text for text in texts if text.is_answered]
    assert len(ended) == 2 and all(isinstance(text.last, SessionNotFound) for text in ended)
    assert "made way" in str(ended[0].last)


def test_texts_of_one_owner_alone_are_never_ended_for_another_of_its_own() -> None:
    desk = victims_desk(2)
    texts = [desk.ask(edge_of(number).stream(), "eve") for number in range(1, 5)]
    desk.step(40)
    assert not any(text.is_answered for text in texts) and desk.num_sessions == 2


def test_nobody_takes_the_idle_seats_of_who_has_fewer() -> None:
    desk = victims_desk()
    idle = Edge(900, 1, ENDLESS)
    desk.answer(idle.open(), "victim")
    for number in range(1, 60):
        desk.answer(edge_of(number).open(), "eve")
    call = idle.call((), idle.likely(3))
    assert desk.answer(call, "victim") == idle.judged(call)


def test_an_owner_who_comes_back_has_not_saved_up_its_share() -> None:
    """Else it would stop everybody else until it had caught up."""
    desk = victims_desk()
    desk.answer(edge_of(900).open(), "late")
    text = desk.ask(edge_of(1).stream(), "busy")
    desk.step(200)
    for number in range(2, 30):
        desk.ask(edge_of(number, 30).open(), "late")
    before = len(text.answers)
    desk.step(40)
    assert len(text.answers) - before >= 15


def is_served(desk: Desk, owner: str = "victim") -> bool:
    """Whether somebody else's opening and block are answered, and rightly."""
    edge = Edge(900, 1, ENDLESS)
    opened = desk.ask(edge.open(), owner)
    desk.steps_until(opened)
    block = desk.ask(call := edge.call((), edge.likely(3)), owner)
    desk.steps_until(block)
    return isinstance(opened.last, Opened) and block.last == edge.judged(call)


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("order", ["open, write, close, leave", "write, close, open, leave", "close last"])
def test_a_close_and_a_text_that_is_left_in_the_middle_of_a_prefill_stop_nobody(num_steps: int, order: str) -> None:
    desk, edge = victims_desk(), edge_of(7, 400)
    if order.startswith("open"):
        desk.ask(edge.open())
        desk.step(num_steps)
    text = desk.ask(edge.stream())
    desk.step(num_steps)
    if order != "close last":
        desk.close(7)
    if order.startswith("write"):
        desk.ask(edge.open())
    desk.stop_writing(text)
    desk.step(2)
    desk.close(7)
    assert is_served(desk)
    desk.finish()  # everybody was answered
    desk.step(2)
    assert desk.num_sessions <= 1  # the victim's own


def test_a_forward_that_fails_because_of_one_feed_fails_that_one_alone() -> None:
    desk = desk_of(1, max_sessions=8)
    desk.engine.fails = lambda feeds: EngineError("no") if any(13 in tokens for tokens in feeds) else None
    victims, attacker = [Edge(number, 1, ENDLESS) for number in range(1, 5)], Edge(66, 1, ENDLESS)
    for edge in victims:
        desk.answer(edge.open(), "bob")
    desk.answer(attacker.open(), "eve")
    for _ in range(20):
        bad = desk.ask(attacker.call((), (13, 13)), "eve")
        calls = []
        for edge in victims:
            call = edge.call((), tuple(token_id for token_id in edge.likely(4) if token_id != 13)[:2])
            calls.append((edge, call, desk.ask(call, "bob")))
        desk.finish()
        for edge, call, asked in calls:
            expected = edge.judged(call)
            if 13 in edge.generated:
                return  # a victim's own text has come to the token that this engine refuses
            assert asked.last == expected
        assert isinstance(bad.last, CloudFailure)
        attacker.epoch += 1
        desk.answer(attacker.open(), "eve")


def judged_for(desk: Desk, edge: Edge, call: VerifyCall) -> Asked:
    """The victim's block; where its seat was taken meanwhile it opens again, and loses nothing."""
    mine = desk.ask(call, "victim")
    desk.steps_until(mine, 400)
    if isinstance(mine.last, SessionNotFound):
        mine = desk.ask(edge.reopened(call), "victim")
        desk.steps_until(mine, 400)
    return mine


actions = st.lists(
    st.tuples(st.sampled_from(["open", "write", "verify", "close", "leave", "step"]), st.integers(1, 3)), max_size=40
)


@law(25)
@given(actions, st.integers(0, 99))
def test_whatever_one_owner_does_the_other_is_answered_and_right(script: list[tuple[str, int]], seed: int) -> None:
    rng, desk, victim = random.Random(seed), victims_desk(), Edge(900, 1, ENDLESS)
    texts: list[Asked] = []
    desk.answer(victim.open(), "victim")
    for what, number in script:
        edge = edge_of(number, 60)
        edge.epoch = rng.randint(1, 3)
        if what == "open":
            desk.ask(edge.open(), "eve")
        elif what == "write" and len(texts) < 2:  # texts of their own may take all seats
            texts.append(desk.ask(edge.stream(), "eve"))
        elif what == "verify":
            desk.ask(edge_of(number, 2).call((), (1, 2)), "eve")
        elif what == "close":
            desk.close(number, "eve")
        elif what == "leave" and texts:
            desk.stop_writing(texts.pop(rng.randrange(len(texts))))
        else:
            desk.step()
    for _ in range(3):
        call = victim.call((), victim.likely(2))
        mine = judged_for(desk, victim, call)
        assert isinstance(mine.last, Verdict) and mine.last == victim.judged(call)
    for text in texts:
        desk.stop_writing(text)
    desk.finish()
