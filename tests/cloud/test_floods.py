"""One owner's flood leaves streams, seats and turns to the other owners, and hostile orders stop nobody."""

import asyncio
import statistics
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from skydraft.access.keys import Keyring
from skydraft.access.limits import Limits
from skydraft.cloud.sessions import ServedModel, Sessions
from skydraft.cloud.streams import Streams
from skydraft.errors import CloudBusy, CloudFailure, CloudLost, EngineError
from skydraft.protocol.values import OpenCall, Opened, Opening, VerifyCall
from skydraft.types import Prompt, Verdict

from .. import toys
from ..serving import PATIENCE_S
from ..toys import VOCAB
from .driver import ENDLESS, FINGERPRINT, Asked, Clock, Desk, Edge, desk_of, opened

# --- Places


def streams_ended(owners: str, newcomer: str, tokens: Path) -> list[str]:
    """Whose streams end when another begins, where so many are open; those of capitals are being answered."""
    tokens.write_text("".join(f"{name} {name * 20}\n" for name in "abcdef"))
    made_way = list[str]()

    async def stay(streams: Streams, name: str, number: int) -> None:
        try:
            with streams.entered(f"Bearer {name.lower() * 20}") as stream:
                stream.is_busy = name.isupper()
                await asyncio.sleep(PATIENCE_S)
        except CloudLost:
            made_way.append(f"{name}{number}")

    async def crowd() -> None:
        streams = Streams(Keyring(tokens), Limits(max_queue=2), Clock())  # eight
        tasks = [asyncio.create_task(stay(streams, name, number)) for number, name in enumerate(owners)]
        await asyncio.sleep(0)
        with suppress(CloudBusy), streams.entered(f"Bearer {newcomer * 20}"):
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()

    asyncio.run(crowd())
    return made_way


def eight_seats(clock: Clock) -> tuple[Sessions, Callable[..., Any]]:
    """Sessions, and what opens one by number and owner's name."""
    sessions = Sessions(ServedModel(toys.toy(3)), Limits(max_sessions=8), clock)

    def admit(number: int, name: str, busy: Container[tuple[int, str]] = ()) -> Any:
        return sessions.admit(OpenCall(number, 1, Opening(FINGERPRINT, Prompt((1, 2)))), name.lower(), busy)

    return sessions, admit


def seats_taken(owners: str, newcomer: str, _: Path) -> list[str]:
    sessions, admit = eight_seats(Clock())
    for number, name in enumerate(owners):
        admit(number, name)
    seated = admit(99, newcomer, {(number, name.lower()) for number, name in enumerate(owners) if name.isupper()})
    gone = [f"{name}{number}" for number, name in enumerate(owners) if (number, name.lower()) not in sessions]
    assert len(sessions) == 8 and sessions.num_evicted == len(gone) == (seated is not None)
    return gone


@pytest.mark.parametrize("ended_by", [streams_ended, seats_taken])
@pytest.mark.parametrize(("owners", "newcomer", "ended"), [
    ("aaabbcde", "d", "a0"),  # of whoever has the most, the one used least recently
    ("aaabbcde", "a", "a0"),
    ("Aaabbcde", "d", "a1"),  # not one that is being answered
    ("AAAbbcde", "d", "b3"),
    ("AAAbcdef", "b", "b3"),  # its own, since the others have no more
    ("AAAABbcd", "e", "b5"),
    ("AAABCDEF", "f", None),
    ("AAABBCcd", "b", None),  # those of who has fewer are not taken
])  # fmt: skip
def test_whose_place_goes_to_a_newcomer(
    ended_by: Callable[..., list[str]], owners: str, newcomer: str, ended: str | None, tmp_path: Path
) -> None:
    assert ended_by(owners, newcomer, tmp_path / "tokens") == ([ended] if ended else [])


def test_a_seat_that_was_left_goes_first_and_ends_with_its_time() -> None:
    sessions, admit = eight_seats(clock := Clock())
    for number, name in enumerate("abbccccc"):
        admit(number, name)
        clock.now += 11 * (number == 0)  # the first one is left by then
    assert admit(99, "b") and (0, "a") not in sessions
    assert admit(98, "d") and (1, "b") in sessions and (3, "c") not in sessions
    clock.now += Limits().session_ttl_s
    sessions.expire({(1, "b")})
    assert len(sessions) == 1 and (1, "b") in sessions


# --- Turns


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
