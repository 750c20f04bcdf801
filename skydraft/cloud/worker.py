"""The worker: the one thread that owns the engine and the sessions. Requests come in through one queue.

Read `Worker.step` first: it is the whole server, without the network.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import Protocol

from skydraft.cloud.jobs import Answer, Job
from skydraft.cloud.limits import Limits
from skydraft.cloud.scheduler import Scheduler
from skydraft.cloud.sessions import Sessions
from skydraft.config import Execution
from skydraft.decoding.verification import absorb_all
from skydraft.engines.base import Engine, Rows
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.errors import (
    CloudDraining,
    CloudFailure,
    CloudLost,
    EngineError,
    GrammarRefused,
    SessionNotFound,
    SkydraftError,
)
from skydraft.protocol.values import TargetId

log = logging.getLogger("skydraft.cloud")
_TICK_S = 0.5  # how often idle sessions are looked at
Batch = list[tuple[Job, TokenIds]]


class Observer(Protocol):
    """What the worker tells about itself, for metrics."""

    def queued(self, num_jobs: int, num_sessions: int) -> None:
        """How many jobs and seated sessions there are now."""

    def forward(self, num_jobs: int, num_rows: int, seconds: float) -> None:
        """A forward was run."""

    def answered(self, job: Job, answer: Answer) -> None:
        """A job got its last answer. One that was not `active` got it from memory."""

    def refused(self, job: Job) -> None:
        """A job found the queue full."""

    def closed(self, num_evicted: int, num_expired: int) -> None:
        """How many sessions had to go so far."""


class Worker:
    """Runs jobs on one engine. `submit`, `cancel`, `close_session` and `stop` may be called from any thread.

    `max_rows` bounds a forward: `engine.invariant_rows` for exact execution, `engine.max_output_rows` for throughput.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        *,
        execution: Execution = "exact",
        observer: Observer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.max_rows = engine.max_rows(execution)
        self._engine = engine
        self._observer = observer
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._scheduler = Scheduler(limits.max_queue)
        self._sessions = Sessions(engine, limits, clock, exact=execution == "exact")
        self._stopping = False
        self._close_later: set[tuple[int, str]] = set()
        self._next_tick = 0.0
        self.num_sessions = 0  # holding KV memory, as of the last step; for other threads to read

    @property
    def target_id(self) -> TargetId:
        """What decides the choices made here."""
        return self._sessions.target_id

    @property
    def vocab(self) -> Vocab:
        """The engine's; for other threads too."""
        return self._engine.vocab

    def submit(self, job: Job) -> None:
        """Take a job; it will be answered."""
        self._inbox.put(lambda: self._take(job))

    def cancel(self, job: Job) -> None:
        """Nobody reads the answers of a stream any more. Other jobs are finished, since they may be asked for again."""
        self._inbox.put(lambda: self._cancel(job))

    def close_session(self, number: int, owner: str) -> None:
        """End a session: at once, or when what was asked of it is answered."""
        self._inbox.put(lambda: self._close(number, owner))

    def stop(self) -> None:
        """Answer what is waiting or under way with CloudDraining, and let `run` return."""
        self._inbox.put(self._stop)

    def run(self) -> None:
        """Work until stopped. Whatever ends it, everybody who waits is answered."""
        try:
            while not self._stopping:
                self.receive(self._scheduler.idle_s(self._clock()))
                self.step()
        finally:
            self._stop()
            self.receive()  # what came in between is answered too
            self._sessions.close_all()

    def receive(self, idle_s: float = 0.0) -> None:
        """Take in what was submitted. If there is nothing, wait for it for `idle_s` seconds, but not for long."""
        try:
            if idle_s > 0:
                self._inbox.get(timeout=min(idle_s, _TICK_S))()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def step(self) -> None:
        """One forward for whoever waits: admit → prefill → schedule → forward and verify → commit."""
        self._expire()
        self._admit()
        self._prefill()
        batch = self._scheduler.batch(self.max_rows, self._clock())
        self._commit(self._forward(batch))
        self.num_sessions = len(self._sessions)

    def _take(self, job: Job) -> None:
        if self._stopping:
            job.answer(CloudDraining("The server is shutting down."))
            return
        try:
            self._sessions.check_ids(*_ids(job))  # once: it may wait for long
        except SkydraftError as error:
            self._end(job, error)
            return
        self._scheduler.add(job)
        if job.is_answered and self._observer:
            self._observer.refused(job)

    def _close(self, number: int, owner: str) -> None:
        if any(job.key == (number, owner) for job in self._scheduler.jobs):
            self._close_later.add((number, owner))
        else:
            self._sessions.close(number, owner)

    def _expire(self) -> None:
        now = self._clock()
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            if num_expired := self._sessions.expire(self._scheduler.busy):
                log.info("expired", extra={"sessions": num_expired})
            if self._observer:
                self._observer.queued(len(self._scheduler), len(self._sessions))
                self._observer.closed(self._sessions.num_evicted, self._sessions.num_expired)

    def _admit(self) -> None:
        """Give waiting jobs their sessions, where nobody is using them and there is room."""
        seatless: set[str] = set()  # owners for whom there is no seat now: what more they want waits unasked
        # Who has a session goes first: it must not be evicted for somebody else while its call is waiting.
        for job in sorted(self._scheduler.waiting, key=lambda job: job.call.opening is not None):
            is_theirs = self._sessions.is_theirs(job.call.session, job.owner)
            if is_theirs is not False and job.call.session in self._scheduler.busy:
                continue
            if is_theirs is None and job.owner in seatless:
                continue
            try:
                session = self._sessions.admit(job.call, job.owner, self._scheduler.busy)
                answer = job.begin(session) if session else None
            except EngineError as error:
                self._fail([job], error)
                continue
            except SkydraftError as error:
                self._end(job, error)
                continue
            except Exception as error:
                self._fail([job], error)
                continue
            if answer is not None:
                self._end(job, answer)
            elif session is not None:
                self._scheduler.activate(job)
                self._make_ready(job)
            else:
                seatless.add(job.owner)
                self._make_way(job)

    def _make_way(self, job: Job) -> None:
        """End a stream of an owner with more seats than that of `job` would have, so that it has one the next time.

        Streams go on for long, and others wait for their seats. Opened again, they lose nothing.
        """
        for stream in self._scheduler.streams:
            if self._sessions.has_more_seats(stream.owner, job.owner):
                self._end(stream, SessionNotFound("The session made way for somebody who had none."))
                return

    def _make_ready(self, job: Job) -> None:
        """Begin the work of a job whose prompt is in the cache."""
        try:
            if not job.session.target.needs_prefill and (answer := job.ready()) is not None:
                self._end(job, answer)
        except Exception as error:
            self._fail([job], error)

    def _prefill(self) -> None:
        """Feed one part of the next prompt that is not in the cache yet; others get their turn in between."""
        job = self._scheduler.next_prefill()
        if job is None:
            return
        try:
            self._scheduler.serve(job, job.prefill())
        except Exception as error:
            self._fail([job], error)
            return
        self._make_ready(job)

    def _forward(self, batch: Batch) -> list[Job]:
        """Let each job judge its rows of one forward; returns those that are done.

        A forward that fails says nothing about whose fault it is: then each feed is tried alone, and only who fails
        alone has failed. A failed forward leaves every sequence as it was.
        """
        if not batch:
            return []
        began = self._clock()
        try:
            rows = self._engine.extend_batch([(job.work.sequence, feed) for job, feed in batch if job.work])
        except Exception as error:
            if len(batch) == 1:
                self._fail([batch[0][0]], error)
                return []
            log.warning("a forward failed, and is tried one by one: %s", error)
            return [done for each in batch for done in self._forward([each])]
        seconds = self._clock() - began
        if self._observer:
            self._observer.forward(len(batch), sum(len(feed) for _, feed in batch), seconds)
        return self._verify(batch, rows, seconds)

    def _verify(self, batch: Batch, rows: list[Rows], seconds: float) -> list[Job]:
        for job, feed in batch:
            self._scheduler.serve(job, len(feed))
            job.account(feed, seconds, self._clock())
        judged = [(job, job.work, fed) for (job, _), fed in zip(batch, rows, strict=True) if job.work is not None]
        errors = absorb_all([(work, fed) for _, work, fed in judged])
        done = []
        for (job, work, _), error in zip(judged, errors, strict=True):
            if error:
                self._fail([job], error)
            elif work.next_feed(1) is None:
                done.append(job)
        return done

    def _commit(self, done: list[Job]) -> None:
        for job in done:
            try:
                answer = job.commit(self._clock())
            except Exception as error:
                self._fail([job], error)
                continue
            if answer is not None:
                self._end(job, answer)

    def _end(self, job: Job, answer: Answer) -> None:
        """Answer a job for the last time."""
        self._scheduler.drop(job)
        if job.streams and job.has_session:
            self._sessions.close(*job.key)
        if job.key in self._close_later and not any(other.key == job.key for other in self._scheduler.jobs):
            self._close_later.discard(job.key)
            self._sessions.close(*job.key)
        if job.has_session:
            job.session.touch(self._clock())
        job.answer(answer)
        if self._observer:
            self._observer.answered(job, answer)

    def _fail(self, jobs: list[Job], error: Exception) -> None:
        """Jobs that cannot go on lose their sessions too: what these hold may be half done.

        A grammar that takes too much on the way is its author's, who is told so.
        """
        refused = error if isinstance(error, GrammarRefused) else None
        if not refused:
            log.error("a job failed", exc_info=error)
        for job in jobs:
            self._sessions.close(*job.key, failed=True)
            self._end(job, refused or CloudFailure("The server failed; its log says why."))

    def _cancel(self, job: Job) -> None:
        if job.streams and not job.is_answered:
            self._end(job, CloudLost("The stream was cancelled."))

    def _stop(self) -> None:
        self._stopping = True
        for job in self._scheduler.jobs:
            self._end(job, CloudDraining("The server is shutting down."))


def _ids(job: Job) -> list[tuple[int, ...]]:
    call = job.call
    return [getattr(call, name) for name in ("catch_up_ids", "draft_ids") if hasattr(call, name)]
