"""One owner's flood leaves places, seats and turns to the other owners, and hostile orders stop nobody."""

import statistics
from collections.abc import Callable

import pytest

from skydraft.errors import CloudFailure, EngineError
from skydraft.protocol.values import OpenCall, Opened, VerifyCall
from skydraft.types import Verdict

from ..toys import VOCAB
from .driver import ENDLESS, Asked, Desk, Edge, desk_of, opened


def victims_desk(max_sessions: int = 4) -> Desk:
    return desk_of(1, part=8, max_sessions=max_sessions, max_rows=4)


def edge_of(number: int, length: int = 1) -> Edge:
    return Edge(number, 1, ENDLESS, prompt=(3,) * length)


# What one owner asks for all at once, of each of so many sessions.
FLOODS: dict[str, tuple[int, Callable[[int], OpenCall | VerifyCall]]] = {
    "alone": (0, lambda number: edge_of(number).open()),
    "openings": (255, lambda number: edge_of(number).open()),
    "long prompts": (39, lambda number: edge_of(number, 200).open()),
    "texts": (39, lambda number: edge_of(number).stream()),
    "blocks": (39, lambda number: edge_of(number).call((), edge_of(number).likely(8), opens=True)),
    "corrections": (39, lambda number: edge_of(number).correction()),
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


def test_texts_of_one_owner_alone_are_never_ended_for_another_of_its_own() -> None:
    desk = victims_desk(2)
    texts = [desk.ask(edge_of(number).stream(), "eve") for number in range(1, 5)]
    desk.step(40)
    assert not any(text.is_answered for text in texts) and desk.num_sessions == 2


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


def test_a_forward_that_fails_because_of_one_feed_fails_that_one_alone() -> None:
    desk, attacker, victims = desk_of(1), Edge(66, 1, ENDLESS), [Edge(number, 1, ENDLESS) for number in range(1, 5)]
    opened(desk, attacker, *victims)
    bad = min({*range(VOCAB.size)} - {*attacker.generated, *victims[0].likely(9)})
    desk.engine.fails = lambda feeds: EngineError("no") if any(bad in tokens for tokens in feeds) else None
    spoilt = desk.ask(attacker.call((), (bad, bad)))
    calls = [edge.call((), edge.likely(3)) for edge in victims]
    asked = [desk.ask(call) for call in calls]
    desk.finish()
    assert isinstance(spoilt.last, CloudFailure)
    assert [one.last for one in asked] == [edge.judged(call) for edge, call in zip(victims, calls, strict=True)]
