"""The docket: jobs from their arrival to their last answer, and the sessions that they are about.

It belongs to one thread, that of its judge, which calls `expire`, `admit` and `commit` around its own work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from skydraft.cloud.jobs import Answer, Job
from skydraft.cloud.judge import Observer, Seats
from skydraft.cloud.limits import Limits
from skydraft.cloud.scheduler import Scheduler
from skydraft.cloud.sessions import Sessions
from skydraft.errors import (
    CloudDraining,
    CloudFailure,
    CloudLost,
    EngineError,
    GrammarRefused,
    SessionNotFound,
    SkydraftError,
)

log = logging.getLogger("skydraft.cloud")
TICK_S = 0.5  # how often idle sessions are looked at


class Docket:
    """Each job is answered once, whatever happens to it. `clock` is in seconds."""

    def __init__(self, seats: Seats, limits: Limits, clock: Callable[[], float]) -> None:
        self.scheduler = Scheduler(limits.max_queue)
        self.sessions = Sessions(seats, limits, clock)
        self.observer: Observer | None = None
        self.is_stopping = False
        self._clock = clock
        self._close_later: set[tuple[int, str]] = set()
        self._next_tick = 0.0

    def take(self, job: Job) -> None:
        """Queue a job, or answer at once that this cannot be."""
        if self.is_stopping:
            job.answer(CloudDraining("The server is shutting down."))
            return
        try:
            self.sessions.check_ids(*_ids(job))  # once: it may wait for long
        except SkydraftError as error:
            self.end(job, error)
            return
        self.scheduler.add(job)
        if job.is_answered and self.observer:
            self.observer.refused(job)

    def close(self, number: int, owner: str) -> None:
        """End a session: at once, or when what was asked of it is answered."""
        if any(job.key == (number, owner) for job in self.scheduler.jobs):
            self._close_later.add((number, owner))
        else:
            self.sessions.close(number, owner)

    def expire(self) -> None:
        """Close sessions that were idle for too long, now and then."""
        now = self._clock()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            if num_expired := self.sessions.expire(self.scheduler.busy):
                log.info("expired", extra={"sessions": num_expired})
            if self.observer:
                self.observer.queued(len(self.scheduler), len(self.sessions))
                self.observer.closed(self.sessions.num_evicted, self.sessions.num_expired)

    def admit(self) -> None:
        """Give waiting jobs their sessions, where nobody is using them and there is room."""
        seatless: set[str] = set()  # owners for whom there is no seat now: what more they want waits unasked
        # Who has a session goes first: it must not be evicted for somebody else while its call is waiting.
        for job in sorted(self.scheduler.waiting, key=lambda job: job.call.opening is not None):
            is_theirs = self.sessions.is_theirs(job.call.session, job.owner)
            if is_theirs is not False and job.call.session in self.scheduler.busy:
                continue
            if is_theirs is None and job.owner in seatless:
                continue
            try:
                session = self.sessions.admit(job.call, job.owner, self.scheduler.busy)
                answer = job.begin(session) if session else None
            except EngineError as error:
                self.fail([job], error)
                continue
            except SkydraftError as error:
                self.end(job, error)
                continue
            except Exception as error:
                self.fail([job], error)
                continue
            if answer is not None:
                self.end(job, answer)
            elif session is not None:
                self.scheduler.activate(job)
                self.make_ready(job)
            else:
                seatless.add(job.owner)
                self._make_way(job)

    def _make_way(self, job: Job) -> None:
        """End a stream of an owner with more seats than that of `job` would have, so that it has one the next time.

        Streams go on for long, and others wait for their seats. Opened again, they lose nothing.
        """
        for stream in self.scheduler.streams:
            if self.sessions.has_more_seats(stream.owner, job.owner):
                self.end(stream, SessionNotFound("The session made way for somebody who had none."))
                return

    def make_ready(self, job: Job) -> None:
        """Begin the work of a job whose prompt is in the cache."""
        try:
            if not job.session.target.needs_prefill and (answer := job.ready()) is not None:
                self.end(job, answer)
        except Exception as error:
            self.fail([job], error)

    def commit(self, done: Iterable[Job]) -> None:
        """Make the work of jobs final, and answer those that do not go on."""
        for job in done:
            try:
                answer = job.commit(self._clock())
            except Exception as error:
                self.fail([job], error)
                continue
            if answer is not None:
                self.end(job, answer)

    def end(self, job: Job, answer: Answer) -> None:
        """Answer a job for the last time."""
        self.scheduler.drop(job)
        if job.streams and job.has_session:
            self.sessions.close(*job.key)
        if job.key in self._close_later and not any(other.key == job.key for other in self.scheduler.jobs):
            self._close_later.discard(job.key)
            self.sessions.close(*job.key)
        if job.has_session:
            job.session.touch(self._clock())
        job.answer(answer)
        if self.observer:
            self.observer.answered(job, answer)

    def fail(self, jobs: Iterable[Job], error: Exception) -> None:
        """Jobs that cannot go on lose their sessions too: what these hold may be half done.

        A grammar that takes too much on the way is its author's, who is told so.
        """
        refused = error if isinstance(error, GrammarRefused) else None
        if not refused:
            log.error("a job failed", exc_info=error)
        for job in jobs:
            self.sessions.close(*job.key, failed=True)
            self.end(job, refused or CloudFailure("The server failed; its log says why."))

    def cancel(self, job: Job) -> None:
        """End a stream that nobody reads any more."""
        if job.streams and not job.is_answered:
            self.end(job, CloudLost("The stream was cancelled."))

    def stop(self) -> None:
        """Answer everything that is not answered, and whatever comes from now on."""
        self.is_stopping = True
        for job in self.scheduler.jobs:
            self.end(job, CloudDraining("The server is shutting down."))


def _ids(job: Job) -> list[tuple[int, ...]]:
    call = job.call
    return [getattr(call, name) for name in ("catch_up_ids", "draft_ids") if hasattr(call, name)]
