"""Sessions: who goes next in a forward and who has to make room, one answer to each job and nobody who waits for ever,
what is refused and changes nothing, and what is remembered of sessions that are gone.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skydraft import errors
from skydraft.config import DecodingParams
from skydraft.errors import CloudDraining, SessionNotFound
from skydraft.protocol.codec import digest
from skydraft.protocol.values import OpenCall, Opened, Opening, VerifyCall
from skydraft.types import Prompt

from .. import toys
from ..toys import VOCAB, law
from .driver import ENDLESS, FINGERPRINT, TO_THE_END, Desk, Edge, Watched, desk_of, opened

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
    (errors.SessionNotFound, lambda e, c: replace(c, epoch=4), "ann"),
    (errors.SessionNotFound, lambda e, c: replace(c, session=77), "ann"),
    (errors.SessionNotFound, lambda e, c: c, "bob"),
    (errors.SessionTaken, lambda e, c: reopening(e, c, 9, prompt=Prompt((1,) * len(e.prompt))), "ann"),
    (errors.SessionTaken, lambda e, c: reopening(e, c, 9, num_best=1), "ann"),
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
    (errors.LimitExceeded, beginning(committed_ids=(1,), params=SHORT), "ann"),
    (errors.LimitExceeded, beginning(committed_ids=(1,) * 18), "ann"),
    (errors.VocabularyMismatch, beginning(fingerprint=FINGERPRINT[:8]), "ann"),
]


@law(40)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=7), st.randoms(use_true_random=False), st.integers(1, 30))
def test_a_forward_is_filled_by_the_oldest_each_once(num_drafts: list[int], rng: Any, max_rows: int) -> None:
    desk = desk_of(max_rows=max_rows)
    edges = [Edge(number, 4, ENDLESS) for number in range(len(num_drafts))]
    opened(desk, *edges)
    rng.shuffle(edges)
    for edge in edges:
        desk.ask(edge.call(draft=(1,) * num_drafts[edge.number]))
    desk.step()
    fed, wanted = [len(feed) for _, feed in desk.engine.batches[-1]], [num_drafts[edge.number] + 1 for edge in edges]
    assert sum(fed) == min(max_rows, sum(wanted)) and fed[:-1] == wanted[: len(fed) - 1]
    desk.check_batches()


def test_two_owners_who_drew_the_same_number_have_a_session_each() -> None:
    """The second is served at once, however long the first one's text is, and each closes only its own."""
    desk, edge = desk_of(), Edge(5, 4, ENDLESS)
    text = desk.ask(edge.stream(), "eve")
    desk.step(3)
    assert desk.steps_until(asked := desk.ask(edge.open(), "bob")) < 5 and asked.last == Opened(0)
    desk.close(5, "bob")
    desk.close(99, "eve")
    desk.step()
    assert not text.is_answered and desk.num_sessions == 1
    desk.close(5, "eve")
    desk.step()
    assert type(text.last) is type(desk.answer(edge.call(), "eve")) is SessionNotFound
    assert desk.engine.num_open == 0


def test_a_later_epoch_ends_what_the_earlier_one_asked() -> None:
    desk = desk_of(part=1)
    edges = [Edge(number, 4, ENDLESS, prompt=(1, 2, 3, 4)) for number in (1, 2, 3)]
    earlier = [desk.ask(edges[0].open()), desk.ask(edges[1].call(opens=True)), desk.ask(edges[2].stream())]
    desk.step()
    waiting = desk.ask(edges[0].call(draft=(1,)))
    others = [desk.ask(edges[0].open(), "bob"), desk.ask(Edge(4, 4, ENDLESS).open())]
    for edge in edges:
        edge.epoch = 2
    later = [desk.ask(edge.open()) for edge in edges]
    desk.finish()
    assert all(isinstance(one.last, SessionNotFound) and len(one.said) == 1 for one in (*earlier, waiting))
    assert [one.last for one in (*later, *others)] == [Opened(0)] * 5


@pytest.mark.parametrize("max_rows", [1, 2, 8, 64])
@pytest.mark.parametrize("has_begun", [True, False], ids=["catch-up", "prompt"])
def test_what_is_long_takes_turns_with_others(has_begun: bool, max_rows: int) -> None:
    desk = desk_of(part=4, max_rows=max_rows)
    short, long = Edge(0, 4, ENDLESS), Edge(1, 4, ENDLESS, prompt=(0, 3, 5) * (1 if has_begun else 70))
    opened(desk, short, *[long] * has_begun)
    late = long.call(long.likely(200, miss=100)) if has_begun else long.open()
    behind, delays = desk.ask(late), list[int]()
    desk.step()
    while not behind.is_answered:
        call = short.call(draft=short.likely(1))
        asked, began = desk.ask(call), len(desk.engine.batches)
        desk.steps_until(asked)
        delays.append(len(desk.engine.batches) - began)
        assert asked.last == short.judged(call)
        assert len(delays) < 100  # nor do the short ones keep the long one waiting for ever
    assert len(delays) > 1 and max(delays) <= -(-16 // max_rows) + 2
    assert behind.last == (long.judged(late) if isinstance(late, VerifyCall) else Opened(0))


class Died(BaseException):
    """What no worker survives."""


@pytest.mark.parametrize("dies", [False, True])
def test_a_worker_that_stops_or_dies_answers_everybody_and_frees_everything(dies: bool) -> None:
    desk = desk_of(6, max_rows=2, max_sessions=1)
    edges = [Edge(number, 6, ENDLESS) for number in range(4)]
    begun = desk.ask(edges[0].call(edges[0].likely(30), opens=True))
    desk.step(3)
    waits = [desk.ask(edges[1].call(opens=True)), desk.ask(edges[2].stream())]
    desk.step()
    if dies:
        desk.engine.fails = lambda feeds: Died()
        with pytest.raises(Died):
            desk.worker.run()
    else:
        desk.worker.post(desk.docket.stop)
        waits.append(desk.ask(edges[3].open()))
        desk.worker.run()
    assert [[type(answer) for answer in asked.answers] for asked in (begun, *waits)] == [[CloudDraining]] * (4 - dies)
    assert desk.engine.num_open == 0


def test_who_waits_for_a_seat_is_looked_at_once_and_not_in_every_step() -> None:
    """One owner with every seat lets 100 requests wait: each step looks at one of them."""
    desk = desk_of(max_sessions=1)
    desk.ask(Edge(1, 4, ENDLESS).stream(), "eve")
    desk.step()
    for number in range(2, 102):
        desk.ask(VerifyCall(number, 0, 3, (2, 2, 2), (), 0, Opening(FINGERPRINT, Prompt((1,)))), "eve")
    desk.step()
    sessions = desk.docket.sessions
    with patch.object(sessions, "admit", wraps=sessions.admit) as admit:
        desk.step(10)
    assert 0 < admit.call_count <= 10


hostile = st.tuples(
    st.sampled_from(["open", "verify", "verify", "write", "again", "stop", "leave", "close", "step", "step"]),
    st.integers(0, 2),  # session
    st.sampled_from([1, 1, 1, 2]),  # epoch
    st.sampled_from(["ann", "ann", "ann", "bob"]),
    st.booleans(),  # with an opening
    st.sampled_from([(), (), (3, 4), (3, 99)]),  # to catch up
    st.lists(st.integers(0, 44), max_size=3).map(tuple),  # drafts
)


@settings(law(150), report_multiple_bugs=False)
@given(st.lists(hostile, min_size=5, max_size=40), st.integers(1, 3), st.integers(1, 4))
def test_the_worker_answers_each_once_whatever_is_asked(script: list[Any], max_sessions: int, max_rows: int) -> None:
    desk = desk_of(part=2, max_sessions=max_sessions, max_rows=max_rows)
    for verb, number, epoch, owner, opens, catch_up, draft in script:
        prompt, params = Prompt((1, 2, 3, 4, 5, 6)), DecodingParams(max_new_tokens=(1, 5, 40)[number])
        opening = Opening(FINGERPRINT, prompt, params=params)
        crc = digest(toys.array([*prompt.token_ids, *catch_up]))
        write = (TO_THE_END if number else 3) if verb == "write" else 0
        call = VerifyCall(number, epoch, len(catch_up), catch_up, draft, crc, opening if opens else None, write)
        if verb in ("verify", "write"):
            desk.ask(call, owner)
        elif verb == "open":
            desk.ask(OpenCall(number, epoch, opening), owner)
        elif verb == "close":
            desk.close(number, owner)
        elif verb == "step":
            desk.step()
        elif desk.all_asked:
            old = desk.all_asked[(7 * number + epoch) % len(desk.all_asked)]
            if verb == "again":
                desk.ask(old.job.call, old.job.owner)
            else:
                desk.stop_writing(old)
    desk.finish()
    desk.check_batches()
    desk.step()
    assert desk.engine.num_open == desk.num_sessions <= max_sessions
    assert not desk.docket.jobs
    desk.shut_down()
    assert desk.engine.num_open == 0


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
