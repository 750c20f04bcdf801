"""The worker: the judge over an engine in this process, and the one thread that owns it. Jobs come through one queue.

Read `Worker.step` first: it is the whole server, without the network.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable

from skydraft.cloud.docket import TICK_S, Docket
from skydraft.cloud.jobs import Job
from skydraft.cloud.judge import Observer, Served, SessionTarget
from skydraft.cloud.limits import Limits
from skydraft.cloud.scheduler import Batch
from skydraft.config import Execution
from skydraft.decoding.verification import TargetSession, absorb_all
from skydraft.engines.base import Engine, Rows
from skydraft.protocol.values import Opening
from skydraft.types import Reuse

log = logging.getLogger("skydraft.cloud")


class EngineSeats:
    """Sequences of an engine in this process, as seats."""

    def __init__(self, engine: Engine, execution: Execution = "exact") -> None:
        self._engine = engine
        self.served = Served(
            name=engine.name,
            weights=engine.fingerprint,
            vocab=engine.vocab,
            context_len=engine.context_len,
            execution=execution,
            max_rows=engine.max_rows(execution),
            invariant_rows=engine.invariant_rows,
            forward_ms=engine.profile.forward_ms,
            takes_audio=engine.takes_audio,
        )

    def target(self, opening: Opening) -> TargetSession:
        """The target's side of a new session, without a sequence. Raises UsageError."""
        return TargetSession(
            self._engine, opening.prompt, opening.params, top=opening.top, committed=opening.committed_ids
        )

    def seat(self, target: SessionTarget, opening: Opening, reuse: Reuse | None) -> None:
        """Give it a sequence of its own. Raises PromptError."""
        _own(target).adopt(self._engine.begin(opening.prompt.token_ids, opening.prompt.media, reuse))

    def hand_over(self, before: SessionTarget, target: SessionTarget) -> None:
        """Give it the sequence of an earlier epoch: the prompt is the same, and the rest is compared."""
        _own(target).adopt(_own(before).release())

    def forget_kept(self, older_than_s: float) -> None:
        """Release what was kept for reuse for so long."""
        self._engine.forget_kept(older_than_s)


def _own(target: SessionTarget) -> TargetSession:
    assert isinstance(target, TargetSession)  # no others are made here
    return target


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
        seats = EngineSeats(engine, execution)
        self.served = seats.served
        self.max_rows = seats.served.max_rows
        self.on_health: Callable[[bool], None] = lambda is_well: None  # it is well for as long as it runs
        self._engine = engine
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._docket = Docket(seats, limits, clock)
        self._scheduler = self._docket.scheduler
        self.observer = observer
        self.num_sessions = 0  # holding KV memory, as of the last step; for other threads to read

    @property
    def observer(self) -> Observer | None:
        """Who is told what happens."""
        return self._docket.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._docket.observer = observer

    def submit(self, job: Job) -> None:
        """Take a job; it will be answered."""
        self._inbox.put(lambda: self._docket.take(job))

    def cancel(self, job: Job) -> None:
        """Nobody reads the answers of a stream any more. Other jobs are finished, since they may be asked for again."""
        self._inbox.put(lambda: self._docket.cancel(job))

    def close_session(self, number: int, owner: str) -> None:
        """End a session: at once, or when what was asked of it is answered."""
        self._inbox.put(lambda: self._docket.close(number, owner))

    def stop(self) -> None:
        """Answer what is waiting or under way with CloudDraining, and let `run` return."""
        self._inbox.put(self._docket.stop)

    def run(self) -> None:
        """Work until stopped. Whatever ends it, everybody who waits is answered."""
        try:
            while not self._docket.is_stopping:
                self.receive(self._scheduler.idle_s(self._clock()))
                self.step()
        finally:
            self._docket.stop()
            self.receive()  # what came in between is answered too
            self._docket.sessions.close_all()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def receive(self, idle_s: float = 0.0) -> None:
        """Take in what was submitted. If there is nothing, wait for it for `idle_s` seconds, but not for long."""
        try:
            if idle_s > 0:
                self._inbox.get(timeout=min(idle_s, TICK_S))()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def step(self) -> None:
        """One forward for whoever waits: admit → prefill → schedule → forward and verify → commit."""
        self._docket.expire()
        self._docket.admit()
        self._prefill()
        batch = self._scheduler.batch(self.max_rows, self._clock())
        self._docket.commit(self._forward(batch))
        self.num_sessions = len(self._docket.sessions)

    def _prefill(self) -> None:
        """Feed one part of the next prompt that is not in the cache yet; others get their turn in between."""
        job = self._scheduler.next_prefill()
        if job is None:
            return
        target = _own(job.session.target)
        before = target.num_in_cache
        try:
            job.spend(target.prefill())
            self._scheduler.serve(job, target.num_in_cache - before)
        except Exception as error:
            self._docket.fail([job], error)
            return
        self._docket.make_ready(job)

    def _forward(self, batch: Batch) -> list[Job]:
        """Let each job judge its rows of one forward; returns those that are done.

        A forward that fails says nothing about whose fault it is: then each feed is tried alone, and only who fails
        alone has failed. A failed forward leaves every sequence as it was.
        """
        if not batch:
            return []
        began = self._clock()
        try:
            rows = self._engine.extend_batch([(work.sequence, feed) for _, work, feed in batch])
        except Exception as error:
            if len(batch) == 1:
                self._docket.fail([batch[0][0]], error)
                return []
            log.warning("a forward failed, and is tried one by one: %s", error)
            return [done for each in batch for done in self._forward([each])]
        seconds = self._clock() - began
        if self.observer:
            self.observer.forward(len(batch), sum(len(feed) for *_, feed in batch), seconds)
        return self._verify(batch, rows, seconds)

    def _verify(self, batch: Batch, rows: list[Rows], seconds: float) -> list[Job]:
        for job, _, feed in batch:
            self._scheduler.serve(job, len(feed))
            job.account(len(feed), seconds, self._clock())
        errors = absorb_all([(work, fed) for (_, work, _), fed in zip(batch, rows, strict=True)])
        done = []
        for (job, work, _), error in zip(batch, errors, strict=True):
            if error:
                self._docket.fail([job], error)
            elif work.next_feed(1) is None:
                done.append(job)
        return done
