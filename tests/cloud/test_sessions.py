"""Sessions: what is refused changes nothing, who has to make room, and what is remembered of those that are gone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft import errors
from skydraft.access.limits import Limits
from skydraft.cloud.sessions import CloudSession, ServedModel, Sessions
from skydraft.config import DecodingParams
from skydraft.protocol.codec import digest
from skydraft.protocol.values import OpenCall, Opened, Opening, VerifyCall
from skydraft.types import Prompt
from tests import toys
from tests.cloud.driver import ENDLESS, FINGERPRINT, Clock, Desk, Edge, Watched, desk_of, opened
from tests.toys import VOCAB, law

SHORT = DecodingParams(max_new_tokens=1)


def reopening(edge: Edge, call: VerifyCall, epoch: int, **fields: Any) -> VerifyCall:
    """The block with an opening of which some fields are changed."""
    return replace(call, epoch=epoch, opening=replace(edge.opening(), **fields))


Wrong = tuple[type[errors.SkydraftError], Callable[[Edge, VerifyCall], VerifyCall | OpenCall], str]
WRONG: list[Wrong] = [
    (errors.Diverged, lambda e, c: replace(c, digest=c.digest ^ 1), "ann"),
    (errors.Diverged, lambda e, c: replace(c, digest=digest(toys.array([*e.generated, *c.catch_up_ids]))), "ann"),
    (errors.BaseMismatch, lambda e, c: replace(c, base=c.base + 1), "ann"),
    (errors.BaseMismatch, lambda e, c: replace(c, catch_up_ids=(*c.catch_up_ids, 1)), "ann"),
    (errors.ProtocolError, lambda e, c: replace(c, draft_ids=(1, VOCAB.size)), "ann"),
    (errors.SessionNotFound, lambda e, c: replace(c, epoch=4), "ann"),
    (errors.SessionNotFound, lambda e, c: replace(c, session=77), "ann"),
    (errors.SessionNotFound, lambda e, c: c, "bob"),
    (errors.SessionTaken, lambda e, c: reopening(e, c, 9, prompt=Prompt((1,) * len(e.prompt))), "ann"),
    (errors.SessionTaken, lambda e, c: reopening(e, c, 9, num_best=1), "ann"),
    (errors.VocabularyMismatch, lambda e, c: reopening(e, c, 9, fingerprint="00" * 8), "ann"),
    (errors.ProtocolError, lambda e, c: reopening(e, c, 9, committed_ids=(VOCAB.size,)), "ann"),
    (errors.SessionNotFound, lambda e, c: OpenCall(0, 2, e.opening()), "ann"),
    (errors.SessionTaken, lambda e, c: OpenCall(0, 9, Opening(FINGERPRINT, Prompt((1,)))), "ann"),
]


def beginning(**fields: Any) -> Callable[..., OpenCall]:
    """Of another session, which may want the only seat."""
    given = {"fingerprint": FINGERPRINT, "prompt": Prompt((0, 3)), **fields}
    return lambda edge, call: OpenCall(5, 1, Opening(**given))


WRONG += [
    (errors.PromptError, beginning(prompt=Prompt(())), "ann"),
    (errors.ContextExceeded, beginning(prompt=Prompt((1,) * 20)), "ann"),
    (errors.ProtocolError, beginning(prompt=Prompt((1, VOCAB.size))), "ann"),
    (errors.ProtocolError, beginning(committed_ids=(2**31 - 1,)), "ann"),
    (errors.LimitExceeded, beginning(committed_ids=(1,), params=SHORT), "ann"),
    (errors.LimitExceeded, beginning(committed_ids=(1,) * 18), "ann"),
    (errors.VocabularyMismatch, beginning(fingerprint=FINGERPRINT[:8]), "ann"),
]


@pytest.mark.parametrize(("kind", "spoil", "owner"), WRONG)
def test_a_refusal_changes_nothing(kind: type[errors.SkydraftError], spoil: Callable[..., Any], owner: str) -> None:
    desk = Desk(toys.toy(3, kind=Watched, context_len=20), max_sessions=1)
    edge = Edge(0, 3, replace(ENDLESS, max_new_tokens=18))
    edge.epoch = 3
    opened(desk, edge)
    call = edge.call(edge.likely(2), edge.likely(5, miss=3)[2:])
    before = len(desk.engine.batches)
    answer = desk.answer(spoil(edge, call), owner)
    assert type(answer) is kind and "\n" not in str(answer)
    assert len(desk.engine.batches) == before
    assert desk.answer(call) == edge.judged(call)
    assert desk.engine.num_prefills == 1 and desk.num_sessions == 1 and desk.tick().num_evicted == 0


def finished(desk: Desk, number: int) -> tuple[Edge, VerifyCall]:
    """A session that has said its only token."""
    edge = Edge(number, 3, SHORT)
    call = edge.call(opens=True)
    answer, expected = desk.answer(call), edge.judged(call)
    assert answer == expected and answer.finish
    return edge, call


def test_a_finished_session_has_no_seat_repeats_its_verdict_and_takes_no_more() -> None:
    desk = desk_of(3)
    edge, call = finished(desk, 0)
    assert desk.engine.num_open == desk.num_sessions == 0
    num_forwards = len(desk.engine.batches)
    assert desk.answer(call) == desk.answer(replace(call, opening=None)) == desk.all_asked[0].last
    assert type(desk.answer(edge.call())) is errors.LimitExceeded
    assert type(desk.answer(edge.call(draft=(1, 2)))) is errors.LimitExceeded
    assert type(desk.answer(replace(call, draft_ids=(1,)))) is errors.BaseMismatch
    assert desk.answer(OpenCall(0, 1, call.opening or edge.opening())) == Opened(1)
    assert len(desk.engine.batches) == num_forwards


def test_of_finished_sessions_four_per_seat_are_remembered() -> None:
    desk = desk_of(3, max_sessions=1)
    calls = [finished(desk, number)[1] for number in range(7)]
    answers = [desk.answer(replace(call, opening=None)) for call in calls]
    assert [isinstance(answer, errors.SessionNotFound) for answer in answers] == [True] * 2 + [False] * 5


def test_to_open_again_keeps_the_cache_and_what_was_left_out_is_cut_off() -> None:
    desk, edge = desk_of(3), Edge(0, 3, ENDLESS, prompt=(0, 3) * 10)
    opened(desk, edge)
    assert desk.answer(edge.open()) == Opened(1)  # the same epoch: nothing changes
    call = edge.call(draft=edge.likely(6))
    expected = desk.answer(call)
    again = edge.reopened(call)  # as it was before that verdict
    assert desk.answer(again) == expected == edge.judged(call)
    assert desk.engine.num_prefills == 1 and desk.engine.num_open == 1
    assert type(desk.answer(replace(call, draft_ids=()))) is errors.SessionNotFound  # of the epoch before
    follow_up = edge.call(draft=edge.likely(3, miss=1))
    assert desk.answer(follow_up) == edge.judged(follow_up)


def test_closing_ends_ones_own_session_and_what_is_asked_of_it_and_nothing_else() -> None:
    desk, edge = desk_of(3, max_rows=2), Edge(0, 3, ENDLESS)
    opened(desk, edge)
    desk.close(0, "bob")
    desk.close(99)
    assert desk.answer(call := edge.call(draft=edge.likely(5))) == edge.judged(call)
    asked = desk.ask(edge.call(draft=edge.likely(5)))
    desk.step()
    desk.close(0)
    desk.finish()
    assert type(asked.last) is type(desk.answer(edge.call())) is errors.SessionNotFound
    assert desk.engine.num_open == 0


ops = st.tuples(
    st.sampled_from(["open", "open", "open", "expire", "close"]),
    st.integers(0, 7),
    st.sets(st.integers(0, 7), max_size=5),
    st.sampled_from([0.0, 0.3, 4.0, 9.0]),
)


def key(number: int) -> tuple[int, str]:
    return number, ("ann", "bob")[number % 2]


@law(150)
@given(st.integers(1, 4), st.lists(ops, min_size=5, max_size=40))
def test_who_has_the_most_makes_room(max_sessions: int, script: list[Any]) -> None:
    """Against a model: number → when it was last used. Even numbers are ann's, odd ones bob's."""
    clock = Clock()
    engine = toys.toy(3, kind=Watched)
    limits = Limits(max_sessions=max_sessions, session_ttl_s=30)
    sessions = Sessions(ServedModel(engine), limits, clock)
    used: dict[int, float] = {}
    admitted: dict[int, CloudSession] = {}
    for verb, number, busy, pause in script:
        clock.now += pause
        owner = key(number)[1]
        if verb == "expire":
            gone = {n for n, at in used.items() if at < clock.now - 30 and n not in busy}
            sessions.expire({key(n) for n in busy})
            used = {n: at for n, at in used.items() if n not in gone}
        elif verb == "close":
            sessions.close((number, owner if pause else "carl"))
            used = {n: at for n, at in used.items() if n != number or not pause}
        else:
            busy = busy - {number}
            full = list(used) if len(used) >= max_sessions else []
            held = {parity: sum(n % 2 == parity for n in used) for parity in (0, 1)}
            idle = [
                n
                for n in full
                if n not in busy and (used[n] < clock.now - 10 or n % 2 == number % 2 or held[n % 2] > held[number % 2])
            ]
            session = sessions.admit(
                OpenCall(number, 1, Opening(FINGERPRINT, Prompt((1, 2)))), owner, {key(n) for n in busy}
            )
            if number not in used and full and not idle:
                assert session is None
                continue
            assert session is not None and session.key == key(number)
            if number not in used and full:
                del used[min(idle, key=lambda n: (used[n] >= clock.now - 10, -held[n % 2], used[n]))]
            used[number] = clock.now
            assert session.used_at == clock.now
            admitted[number] = session
        assert {number for number, session in admitted.items() if session.target.is_seated} == set(used)
        assert engine.num_open == len(sessions) == len(used) <= max_sessions
    sessions.close_all()
    assert engine.num_open == len(sessions) == 0


@pytest.mark.parametrize("error", [errors.EngineError, RuntimeError])
@pytest.mark.parametrize(
    ("stage", "has_begun"), [("allocate", False), ("forward", False), ("forward", True), ("roll_back", True)]
)
def test_an_engine_raises(stage: str, has_begun: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs one answer, and the others go on."""

    def broken(*_: Any, **__: Any) -> None:
        monkeypatch.undo()  # it breaks once
        raise error("the secret path")

    desk, victim, other = desk_of(5, max_rows=4), Edge(0, 5, ENDLESS), Edge(1, 5, ENDLESS)
    opened(desk, other)
    if has_begun:
        first = victim.call(draft=victim.likely(3, miss=0), opens=True)
        assert desk.answer(first) == victim.judged(first)
    monkeypatch.setattr(desk.engine, stage, broken)
    call = victim.call(draft=victim.likely(3), opens=not has_begun)
    answer = desk.answer(call)
    assert isinstance(answer, errors.CloudFailure) and "secret" not in str(answer)
    follow_up = other.call(draft=other.likely(3, miss=1))
    assert desk.answer(follow_up) == other.judged(follow_up)
    again = victim.reopened(call)
    assert desk.answer(again) == victim.judged(again)
    assert desk.engine.num_open == desk.num_sessions == 2
