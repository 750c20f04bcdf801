"""Whoever asks for much gets what others leave: places, seats and turns are shared by owner."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skydraft.cloud.jobs import GenerateJob, OpenJob
from skydraft.edge.link import Link, LinkOptions
from skydraft.errors import CloudBusy, SessionNotFound
from skydraft.protocol import codec
from skydraft.protocol.values import Opened, Opening, SessionCall
from skydraft.types import Prompt, Verdict
from tests import toys
from tests.cloud.worker_by_hand import ENDLESS, FINGERPRINT, Asked, Desk, Edge, Watched
from tests.serving import serving

MAX_STEPS = 2000


def desk_of(max_sessions: int = 4) -> Desk:
    engine: Any = toys.toy(1, kind=Watched)
    engine.max_batch_rows = 8
    return Desk(engine, max_sessions=max_sessions, max_rows=4, max_queue=1000)


def opening(number: int, length: int = 1) -> SessionCall:
    return SessionCall(number, 1, Opening(FINGERPRINT, Prompt((3,) * length), params=ENDLESS))


def steps_until(desk: Desk, asked: Asked) -> int:
    for number in range(MAX_STEPS):
        if asked.is_answered:
            return number
        desk.step()
    raise AssertionError("it was never answered")


def flood_opens(desk: Desk) -> None:
    for number in range(1, 256):
        desk.ask(opening(number), "eve", OpenJob)


def flood_long_prompts(desk: Desk) -> None:
    for number in range(1, 40):
        desk.ask(opening(number, 200), "eve", OpenJob)


def flood_streams(desk: Desk) -> None:
    for number in range(1, 40):
        desk.ask(opening(number), "eve", GenerateJob)


def flood_blocks(desk: Desk) -> None:
    for number in range(1, 40):
        edge = Edge(number, 1, ENDLESS)
        desk.ask(edge.call((), edge.likely(8), opens=True), "eve")


def nothing(desk: Desk) -> None:
    """Alone."""


def rounds(flood: Callable[[Desk], None]) -> list[int]:
    """Steps that each of a victim's Open and Verifies waited for."""
    desk, edge, waits = desk_of(), Edge(900, 1, ENDLESS), []
    flood(desk)
    desk.step(3)
    waits.append(steps_until(desk, opened := desk.ask(edge.open(), "victim", OpenJob)))
    assert isinstance(opened.last, Opened)
    for _ in range(12):
        flood(desk)
        call = edge.call((), edge.likely(3))
        waits.append(steps_until(desk, mine := desk.ask(call, "victim")))
        assert isinstance(mine.last, Verdict) and mine.last == edge.judged(call)  # its seat is never taken
        desk.step()  # the time on the way
    return waits


@pytest.mark.parametrize("flood", [flood_opens, flood_long_prompts, flood_streams, flood_blocks])
def test_a_flood_of_one_owner_lets_another_wait_for_three_times_as_long_as_alone_at_most(flood: Any) -> None:
    assert statistics.median(rounds(flood)) <= 3 * max(statistics.median(rounds(nothing)), 1)


def test_streams_that_hold_all_seats_make_way_for_an_owner_who_has_none() -> None:
    desk = desk_of(4)
    streams = [desk.ask(opening(number), "eve", GenerateJob) for number in range(1, 5)]
    desk.step(3)
    assert desk.worker.num_sessions == 4
    mine = [desk.ask(Edge(900 + number, 1, ENDLESS).open(), "victim", OpenJob) for number in range(3)]
    desk.step(6)
    # Two each: an owner with as many as the other is not robbed, so the third waits, or takes one of its own.
    assert all(isinstance(each.last, Opened) for each in mine[:2])
    ended = [stream for stream in streams if stream.is_answered]
    assert len(ended) == 2 and all(isinstance(stream.last, SessionNotFound) for stream in ended)
    assert "made way" in str(ended[0].last)


def test_streams_of_one_owner_alone_are_never_ended_for_another_of_its_own() -> None:
    desk = desk_of(2)
    streams = [desk.ask(opening(number), "eve", GenerateJob) for number in range(1, 5)]
    desk.step(40)
    assert not any(stream.is_answered for stream in streams) and desk.worker.num_sessions == 2


def test_nobody_takes_the_idle_seats_of_who_has_fewer() -> None:
    desk = desk_of(4)
    idle = Edge(900, 1, ENDLESS)
    desk.answer(idle.open(), "victim", OpenJob)
    for number in range(1, 60):
        desk.answer(opening(number), "eve", OpenJob)
    call = idle.call((), idle.likely(3))
    assert desk.answer(call, "victim") == idle.judged(call)


def test_an_owner_who_comes_back_has_not_saved_up_its_share() -> None:
    """Else it would stop everybody else until it had caught up."""
    desk = desk_of()
    early = Edge(900, 1, ENDLESS)
    desk.answer(early.open(), "late", OpenJob)
    stream = desk.ask(opening(1), "busy", GenerateJob)
    desk.step(200)
    for number in range(2, 30):
        desk.ask(opening(number, 30), "late", OpenJob)
    before = len(stream.answers)
    desk.step(40)
    assert len(stream.answers) - before >= 15


def test_a_token_leaves_places_to_the_others(tmp_path: Path) -> None:
    keys = tmp_path / "tokens"
    keys.write_text("eve 0123456789abcdef0\nbob 0123456789abcdef1\n")
    engine = toys.toy(1)

    def slow(feeds: Any, *, want_logits: bool) -> Any:
        time.sleep(0.2)
        return type(engine).forward(engine, feeds, want_logits=want_logits)

    engine.forward = slow  # type: ignore[method-assign]
    with serving(engine, max_queue=12, max_sessions=2, token_file=keys) as server:
        links = [Link(LinkOptions(server.address, token=f"0123456789abcdef{number}")) for number in (0, 1)]

        def ask(link: Link, number: int) -> bool:
            try:
                link.call("Open", codec.encode_session_call(opening(number, 20)), 30)
            except CloudBusy:
                return False
            return True

        with ThreadPoolExecutor(40) as pool:
            first = [pool.submit(ask, links[0], number) for number in range(1, 16)]
            time.sleep(0.1)
            assert all(pool.map(ask, [links[1]] * 3, (900, 901, 902)))  # at once, beside the flood
            num_taken = sum(each.result() for each in first)
            assert 1 <= num_taken <= 6  # half of the places
        for link in links:
            link.close()
