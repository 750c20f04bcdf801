"""Legal calls in hostile order: one client must not stop the server, nor fail what another asks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.cloud.jobs import GenerateJob, OpenJob
from skydraft.errors import CloudFailure, EngineError, SessionNotFound
from skydraft.protocol.values import Opened, Opening, SessionCall
from skydraft.types import Prompt, Verdict
from tests import toys
from tests.cloud.worker_by_hand import ENDLESS, FINGERPRINT, Asked, Desk, Edge, Watched
from tests.toys import law


def desk_of(max_sessions: int = 4) -> Desk:
    engine: Any = toys.toy(1, kind=Watched)
    engine.max_batch_rows = 8  # a long prompt takes many steps
    return Desk(engine, max_sessions=max_sessions)


def long_call(number: int, length: int = 400) -> SessionCall:
    return SessionCall(number, 1, Opening(FINGERPRINT, Prompt((3,) * length), params=ENDLESS))


def served(desk: Desk, owner: str = "victim") -> bool:
    """Whether somebody else's Open and Verify are answered, and rightly."""
    edge = Edge(900, 1, ENDLESS)
    opened = desk.answer(edge.open(), owner, OpenJob)
    call = edge.call((), edge.likely(3))
    return isinstance(opened, Opened) and desk.answer(call, owner) == edge.judged(call)


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("order", ["open, generate, close, cancel", "generate, close, open, cancel", "close last"])
def test_a_close_and_a_cancelled_stream_in_the_middle_of_a_prefill_stop_nobody(num_steps: int, order: str) -> None:
    desk, call = desk_of(), long_call(7)
    if order.startswith("open"):
        desk.ask(call, "ann", OpenJob)
        desk.step(num_steps)
    stream = desk.ask(call, "ann", GenerateJob)
    desk.step(num_steps)
    if order != "close last":
        desk.worker.close_session(7, "ann")
    if order.startswith("generate"):
        desk.ask(call, "ann", OpenJob)
    desk.worker.cancel(stream.job)
    desk.step(2)
    desk.worker.close_session(7, "ann")
    assert served(desk)
    desk.finish()  # everybody was answered
    desk.clock.now += 1
    desk.step(2)
    assert desk.worker.num_sessions <= 1  # the victim's own


def test_a_forward_that_fails_because_of_one_feed_fails_that_one_alone() -> None:
    engine: Any = toys.toy(1, kind=Watched)
    engine.fails = lambda feeds: EngineError("no") if any(13 in tokens for tokens in feeds) else None
    desk = Desk(engine, max_sessions=8)
    victims = [Edge(number, 1, ENDLESS) for number in range(1, 5)]
    for edge in victims:
        desk.answer(edge.open(), "bob", OpenJob)
    attacker = Edge(66, 1, ENDLESS)
    desk.answer(attacker.open(), "eve", OpenJob)
    for _ in range(20):
        bad = desk.ask(attacker.call((), (13, 13)), "eve")
        calls = []
        for edge in victims:
            draft = tuple(token_id for token_id in edge.likely(4) if token_id != 13)[:2]
            calls.append((edge, edge.call((), draft), desk.ask(edge.call((), draft), "bob")))
        desk.finish()
        for edge, call, asked in calls:
            expected = edge.judged(call)
            if 13 in edge.generated:
                return  # a victim's own text has come to the token that this engine refuses
            assert asked.last == expected
        assert isinstance(bad.last, CloudFailure)
        attacker.epoch += 1
        desk.answer(attacker.open(), "eve", OpenJob)


actions = st.lists(
    st.tuples(st.sampled_from(["open", "generate", "verify", "close", "cancel", "step"]), st.integers(1, 3)),
    max_size=40,
)


@law(25)
@given(actions, st.integers(0, 99))
def test_whatever_one_owner_does_the_other_is_answered_and_right(script: list[tuple[str, int]], seed: int) -> None:
    rng, desk = random.Random(seed), desk_of(max_sessions=4)
    victim, streams = Edge(900, 1, ENDLESS), list[Asked]()
    asked: list[Asked] = []
    desk.answer(victim.open(), "victim", OpenJob)
    for what, number in script:
        call = SessionCall(number, rng.randint(1, 3), long_call(number, 60).opening)
        if what == "open":
            asked.append(desk.ask(call, "eve", OpenJob))
        elif what == "generate" and len(streams) < 2:  # streams of their own may take all seats
            streams.append(desk.ask(call, "eve", GenerateJob))
        elif what == "verify":
            asked.append(desk.ask(Edge(number, 1, ENDLESS).call((), (1, 2)), "eve"))
        elif what == "close":
            desk.worker.close_session(number, "eve")
        elif what == "cancel" and streams:
            desk.worker.cancel(streams.pop(rng.randrange(len(streams))).job)
        else:
            desk.step()
    for _ in range(3):
        call = victim.call((), victim.likely(2))
        mine = desk.ask(call, "victim")
        for _ in range(400):
            desk.step()
            if mine.is_answered:
                break
        assert mine.is_answered
        if isinstance(mine.last, SessionNotFound):  # its seat was taken meanwhile: it opens again and loses nothing
            mine = desk.ask(victim.reopened(call), "victim")
            for _ in range(400):
                desk.step()
                if mine.is_answered:
                    break
        assert isinstance(mine.last, Verdict) and mine.last == victim.judged(call)
    for stream in streams:
        desk.worker.cancel(stream.job)
    for _ in range(300):
        if all(each.is_answered for each in asked):
            break
        desk.step()
    assert all(each.is_answered for each in asked)
