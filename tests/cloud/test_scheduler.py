"""Who goes next: the order of a forward, one answer to each job, and nobody who waits for ever."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skydraft.cloud.jobs import Answer, GenerateJob, Job, OpenJob
from skydraft.cloud.scheduler import Scheduler
from skydraft.config import DecodingParams
from skydraft.errors import CloudBusy, CloudDraining, CloudFailure, CloudLost, SessionNotFound, SessionTaken
from skydraft.protocol.codec import digest
from skydraft.protocol.values import Emission, Opened, Opening, SessionCall, VerifyCall
from skydraft.types import Prompt
from tests import reference, toys
from tests.cloud.worker_by_hand import ENDLESS, FINGERPRINT, Asked, Desk, Edge, Watched, opened
from tests.toys import law


class Rows:
    """Work that wants so many rows."""

    def __init__(self, num_rows: int) -> None:
        self.left = list(range(num_rows))

    def next_feed(self, max_rows: int) -> Any:
        return self.left[:max_rows] or None


class WithRows(OpenJob):
    """A job whose work is told; None while its prompt is not in the cache."""

    rows: Rows | None = None

    @property
    def work(self) -> Any:
        return self.rows

    @property
    def feeding(self) -> Any:
        return self.rows


def job(session: int, *, turn: float = 0.0, epoch: int = 1, owner: str = "ann", kind: type[Job] = OpenJob) -> Asked:
    answers: list[Answer] = []
    return Asked(kind(SessionCall(session, epoch, Opening("", Prompt((1,)))), owner, answers.append, turn), answers)


@law(100)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9) | st.none()), max_size=12), st.integers(1, 30))
def test_a_forward_is_filled_by_the_oldest_each_once_and_the_last_may_be_cut(
    wanted: list[tuple[int, int | None]], max_rows: int
) -> None:
    scheduler = Scheduler(99)
    jobs = []
    for session, (turn, num_rows) in enumerate(wanted):
        jobs.append(cast(WithRows, job(session, turn=turn, kind=WithRows).job))
        scheduler.add(jobs[-1])
        scheduler.activate(jobs[-1])
        jobs[-1].rows = None if num_rows is None else Rows(num_rows)
    batch = scheduler.batch(max_rows, 40.0)
    oldest = [one for one in sorted(jobs, key=lambda one: one.turn) if one.work and one.work.next_feed(1)]
    assert [one for one, *_ in batch] == oldest[: len(batch)]
    num_wanted = [len(one.work.left) for one in oldest]
    assert sum(len(feed) for *_, feed in batch) == min(max_rows, sum(num_wanted))
    assert [len(feed) for *_, feed in batch[:-1]] == num_wanted[: max(len(batch) - 1, 0)]
    waiting_for_prefill = [one for one in jobs if one.work is None]
    assert scheduler.next_prefill() is min(waiting_for_prefill, key=lambda one: one.turn, default=None)


def test_jobs_wait_in_order_and_make_their_session_busy_when_active() -> None:
    scheduler = Scheduler(9)
    asked = [job(session).job for session in (5, 2, 5)]
    for one in asked:
        scheduler.add(one)
    assert scheduler.waiting == (asked[0], asked[1]) and len(scheduler) == 2  # the third repeats the first
    scheduler.activate(asked[1])
    assert scheduler.waiting == (asked[0],) and scheduler.busy == {2} and len(scheduler) == 2
    scheduler.drop(asked[1])
    scheduler.drop(asked[0])
    assert (scheduler.waiting, scheduler.busy, len(scheduler)) == ((), frozenset(), 0)


def test_a_session_that_is_worked_on_is_not_given_to_another_job() -> None:
    scheduler = Scheduler(9)
    first, second = job(5), job(5, owner="bob")
    for one in (first, second):
        scheduler.add(one.job)
    scheduler.activate(first.job)
    with pytest.raises(CloudFailure, match="being worked on"):
        scheduler.activate(second.job)
    assert scheduler.waiting == (second.job,) and scheduler.busy == {5} and len(scheduler) == 2
    scheduler.drop(first.job)
    scheduler.activate(second.job)
    assert scheduler.waiting == () and scheduler.busy == {5} and not second.answers


def test_a_full_queue_refuses_and_still_lets_repeats_share_an_answer() -> None:
    scheduler = Scheduler(2)
    asked = [job(session) for session in (1, 2, 3, 1)]
    for one in asked:
        scheduler.add(one.job)
    assert [type(answer) for answer in asked[2].answers] == [CloudBusy]
    assert len(scheduler) == 2
    scheduler.drop(asked[0].job)
    asked[0].job.answer(7)
    assert asked[0].answers == asked[3].answers == [7]
    scheduler.add((more := job(4)).job)
    assert not more.answers


def test_only_the_same_call_of_the_same_owner_shares_an_answer() -> None:
    scheduler = Scheduler(99)
    different = [job(1), job(2), job(1, owner="bob"), job(1, epoch=2, owner="carl"), job(3, kind=GenerateJob)]
    different.append(job(3, kind=GenerateJob))  # each reader of a stream has one of its own
    for one in different:
        scheduler.add(one.job)
    assert len(scheduler) == len(different)


def test_a_later_epoch_ends_what_the_earlier_one_asked() -> None:
    scheduler = Scheduler(99)
    active, waiting, stream = job(1), job(2), job(3, kind=GenerateJob)
    others = [job(1, owner="bob"), job(2, epoch=2, owner="bob"), job(4)]
    for one in (active, waiting, stream, *others):
        scheduler.add(one.job)
    scheduler.activate(active.job)
    for session in (1, 2, 3):
        scheduler.add(job(session, epoch=2).job)
    for one in (active, waiting, stream):
        assert [type(answer) for answer in one.answers] == [SessionNotFound]
    assert not any(one.answers for one in others) and len(scheduler) == 6


def test_a_flood_is_refused_beyond_the_queue_and_the_rest_is_served() -> None:
    desk = Desk(toys.toy(4, kind=Watched), max_rows=8, max_queue=5)
    edges = [Edge(number, 4, ENDLESS) for number in range(8)]
    asked = [desk.ask(edge.call(opens=True)) for edge in edges]
    desk.finish()
    assert [type(one.last) for one in asked[5:]] == [CloudBusy] * 3
    for edge, one in zip(edges[:5], asked[:5], strict=True):
        assert one.last == edge.judged(cast(VerifyCall, one.job.call))


@pytest.mark.parametrize("max_rows", [1, 2, 8, 64])
def test_a_long_catch_up_takes_turns_with_others(max_rows: int) -> None:
    desk = Desk(toys.toy(4, kind=Watched), max_rows=max_rows)
    long, short = Edge(0, 4, ENDLESS), Edge(1, 4, ENDLESS)
    opened(desk, long, short)
    written = long.likely(200, miss=100)
    late = long.call(written)
    behind = desk.ask(late)
    expected = long.judged(late)
    desk.step()
    delays = []
    while not behind.is_answered:
        call = short.call(draft=short.likely(1))
        asked, began = desk.ask(call), len(desk.engine.batches)
        while not asked.is_answered:
            desk.step()
        delays.append(len(desk.engine.batches) - began)
        assert asked.last == short.judged(call)
        assert len(delays) < 100  # nor do the short ones keep the long one waiting for ever
    assert max(delays) <= -(-16 // max_rows) + 2
    assert behind.last == expected


def test_a_long_prompt_takes_turns_with_others() -> None:
    desk = Desk(toys.toy(4, kind=Watched), max_rows=4)
    desk.engine.max_batch_rows = 4
    short, long = Edge(0, 4, ENDLESS), Edge(1, 4, ENDLESS, prompt=(0, 3, 5) * 70)
    opened(desk, short)
    opening = desk.ask(long.open(), kind=OpenJob)
    for _ in range(20):
        call = short.call(draft=short.likely(2))
        asked = desk.ask(call)
        desk.step()
        assert asked.last == short.judged(call) and not opening.is_answered
    desk.finish()
    assert opening.last == Opened(0) and desk.engine.num_prefills == 53 + 1  # 209 tokens in parts of 4, and 1


def test_the_oldest_goes_first_into_a_forward() -> None:
    desk = Desk(toys.toy(4, kind=Watched), max_rows=3)
    everyone = [Edge(number, 4, ENDLESS) for number in range(4)]
    opened(desk, *everyone)
    desk.engine.batches.clear()
    order = [everyone[index] for index in (2, 0, 3, 1)]
    asked = [desk.ask(edge.call(draft=edge.likely(1))) for edge in order]
    answered = []
    while len(answered) < 4:
        desk.step()
        answered += [index for index in range(4) if asked[index].is_answered and index not in answered]
    assert answered == [0, 1, 2, 3]
    assert [[len(tokens) for _, tokens in batch] for batch in desk.engine.batches] == [[2, 1], [1, 2], [2]]


def test_stopping_answers_everybody_and_frees_everything() -> None:
    desk = Desk(toys.toy(6, kind=Watched), max_rows=2, max_sessions=1)
    edges = [Edge(number, 6, ENDLESS) for number in range(4)]
    call = edges[0].call(edges[0].likely(30), opens=True)
    begun = desk.ask(call)
    desk.step(3)
    waits = [desk.ask(edges[1].call(opens=True)), desk.ask(edges[2].open(), kind=GenerateJob)]
    desk.step()
    desk.worker.stop()
    late = desk.ask(edges[3].open(), kind=OpenJob)
    desk.worker.run()
    for asked in (begun, *waits, late):
        assert [type(answer) for answer in asked.answers] == [CloudDraining]
    assert desk.engine.num_open == 0


def test_an_idle_worker_stops_at_once() -> None:
    desk = Desk(toys.toy(6, kind=Watched))
    desk.worker.stop()
    desk.worker.run()
    assert not desk.engine.batches


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_a_cancelled_stream_ends_at_once_and_gives_back_its_seat(num_steps: int) -> None:
    desk = Desk(toys.toy(4, kind=Watched), max_sessions=1)
    stream, other = Edge(0, 4, ENDLESS), Edge(1, 4, ENDLESS)
    asked = desk.ask(stream.open(), kind=GenerateJob)
    desk.step(num_steps)
    waits = desk.ask(call := other.call(opens=True))
    desk.step(2 * (num_steps > 0))
    assert not waits.answers
    desk.worker.cancel(asked.job)
    desk.finish()
    assert isinstance(asked.last, CloudLost) and waits.last == other.judged(call)
    assert desk.tally().num_evicted == 0 and desk.engine.num_open == 1
    num_answers = len(asked.answers)
    desk.worker.cancel(asked.job)  # once more, after the end
    desk.step(3)
    assert len(asked.answers) == num_answers


def test_cancelling_what_is_no_stream_changes_nothing() -> None:
    desk = Desk(toys.toy(4, kind=Watched))
    edge = Edge(0, 4, ENDLESS)
    asked = desk.ask(call := edge.call(opens=True))
    desk.worker.cancel(asked.job)
    desk.finish()
    assert asked.answers == [edge.judged(call)]


hostile = st.tuples(
    st.sampled_from(["open", "verify", "verify", "generate", "again", "cancel", "close", "step", "step"]),
    st.integers(0, 2),  # session
    st.sampled_from([1, 1, 1, 2]),  # epoch
    st.sampled_from(["ann", "ann", "ann", "bob"]),
    st.booleans(),  # with an opening
    st.sampled_from([(), (), (3, 4), (3, 99)]),  # to catch up
    st.lists(st.integers(0, 44), max_size=3).map(tuple),  # drafts
)


@settings(law(150), report_multiple_bugs=False)
@given(st.lists(hostile, min_size=5, max_size=40), st.integers(1, 3), st.integers(1, 4))
def test_whatever_is_asked_the_worker_lives_and_answers_each_once(
    script: list[Any], max_sessions: int, max_rows: int
) -> None:
    desk = Desk(toys.toy(4, kind=Watched), max_sessions=max_sessions, max_rows=max_rows, max_queue=8)
    desk.engine.max_batch_rows = 2
    for verb, number, epoch, owner, opens, catch_up, draft in script:
        prompt, params = Prompt((1, 2, 3, 4, 5, 6)), DecodingParams(max_new_tokens=(1, 5, 40)[number])
        opening = Opening(FINGERPRINT, prompt, params=params)
        crc = digest(toys.array([*prompt.token_ids, *catch_up]))
        call = VerifyCall(number, epoch, len(catch_up), catch_up, draft, crc, opening if opens else None)
        if verb == "verify":
            desk.ask(call, owner)
        elif verb in ("open", "generate"):
            desk.ask(SessionCall(number, epoch, opening), owner, OpenJob if verb == "open" else GenerateJob)
        elif verb == "close":
            desk.worker.close_session(number, owner)
        elif verb == "step":
            desk.step()
        elif desk.asked:
            old = desk.asked[(7 * number + epoch) % len(desk.asked)].job
            if verb == "cancel":
                desk.worker.cancel(old)
            else:
                desk.ask(old.call, old.owner, type(old))
    desk.finish()
    desk.step()
    assert desk.engine.num_open == desk.worker.num_sessions <= max_sessions
    tally = desk.tally()
    assert (tally.num_jobs, tally.num_sessions) == (0, desk.engine.num_open)
    desk.worker.stop()
    desk.worker.run()
    assert desk.engine.num_open == 0


def stream_and_double(desk: Desk, edge: Edge) -> tuple[Asked, Asked]:
    """A stream that has begun, and another one for the same session that waits for it."""
    first = desk.ask(edge.open(), kind=GenerateJob)
    desk.step()
    second = desk.ask(edge.open(), kind=GenerateJob)
    desk.step()
    return first, second


def finite(seed: int = 9) -> DecodingParams:
    return DecodingParams(temperature=0.7, seed=seed, max_new_tokens=12, min_new_tokens=12)


def tokens(asked: Asked) -> tuple[int, ...]:
    return tuple(i for answer in asked.answers if isinstance(answer, Emission) for i in answer.token_ids)


def test_a_second_reader_gets_the_whole_stream_when_the_first_has_it() -> None:
    desk, edge = Desk(toys.toy(4, kind=Watched)), Edge(0, 4, finite())
    both = stream_and_double(desk, edge)
    desk.finish()
    assert [tokens(one) for one in both] == [reference.plain(toys.toy(4), edge.prompt, edge.params)[0]] * 2


@pytest.mark.parametrize("part", [1, 64])
def test_to_cancel_a_stream_that_waits_hurts_nobody_else(part: int) -> None:
    desk = Desk(toys.toy(4, kind=Watched), max_rows=8)
    desk.engine.max_batch_rows = part
    edge, other = Edge(0, 4, finite(), prompt=(0, 3, 5, 7, 1, 2)), Edge(1, 4, finite(8), prompt=(1, 2, 3))
    first, second = stream_and_double(desk, edge)
    bystander = desk.ask(other.open(), kind=GenerateJob)
    desk.step()
    desk.worker.cancel(second.job)
    desk.finish()
    assert [type(answer) for answer in second.answers] == [CloudLost]
    for one, asker in ((bystander, other), (first, edge)):
        assert tokens(one) == reference.plain(toys.toy(4), asker.prompt, asker.params)[0]


def test_a_worker_that_dies_answers_everybody_first() -> None:
    class Died(BaseException):
        """What no worker survives."""

    desk, edge = Desk(toys.toy(4, kind=Watched)), Edge(0, 4, finite())
    first, second = stream_and_double(desk, edge)
    desk.engine.fails = lambda feeds: Died()
    with pytest.raises(Died):
        desk.worker.run()
    assert [type(asked.answers[-1]) for asked in (first, second)] == [CloudDraining] * 2
    assert desk.engine.num_open == 0


def test_a_stream_is_no_repeat_of_an_open_with_the_same_fields() -> None:
    desk, edge = Desk(toys.toy(4, kind=Watched)), Edge(0, 4, finite())
    opening = desk.ask(edge.open(), kind=OpenJob)
    stream = desk.ask(edge.open(), kind=GenerateJob)
    for _ in range(40):
        desk.step()
    assert opening.answers == [Opened(0)]
    assert tokens(stream) == reference.plain(toys.toy(4), edge.prompt, edge.params)[0]


def test_the_same_call_while_it_is_under_way_is_judged_once_and_answered_twice() -> None:
    desk, edge = Desk(toys.toy(4, kind=Watched), max_rows=1), Edge(0, 4, ENDLESS)
    call = edge.call(draft=edge.likely(5), opens=True)
    asked = [desk.ask(call)]
    desk.step(3)
    asked.append(desk.ask(call))
    desk.finish()
    asked.append(desk.ask(call))  # and once more from memory
    desk.finish()
    assert [one.answers for one in asked] == [[edge.judged(call)]] * 3
    assert len(desk.engine.batches) == 6
    follow_up = edge.call(draft=edge.likely(2))
    assert desk.answer(follow_up) == edge.judged(follow_up)


def test_another_owner_does_not_share_an_answer() -> None:
    desk, edge = Desk(toys.toy(4, kind=Watched), max_rows=1), Edge(0, 4, ENDLESS)
    call = edge.call(draft=edge.likely(3), opens=True)
    asked = desk.ask(call)
    desk.step()
    assert isinstance(desk.answer(call, owner="bob"), SessionTaken)
    assert asked.answers == [edge.judged(call)]
