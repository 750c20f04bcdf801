"""Sessions: what is refused changes nothing, who has to make room, and what is remembered of those that are gone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from skydraft import errors
from skydraft.config import DecodingParams
from skydraft.protocol.codec import digest
from skydraft.protocol.values import OpenCall, Opened, Opening, VerifyCall
from skydraft.types import Prompt
from tests import toys
from tests.cloud.driver import ENDLESS, FINGERPRINT, Desk, Edge, Watched, desk_of, opened
from tests.toys import VOCAB

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
