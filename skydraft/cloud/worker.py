"""The worker computes verdicts on an engine. One thread owns the engine; work arrives through one queue.

Read `Worker.step` first: it is the whole server without the network.
"""

import queue
import time
from collections.abc import Callable

from skydraft.access.limits import Limits
from skydraft.cloud import log
from skydraft.cloud.docket import TICK_S, Batch, Docket, Job
from skydraft.cloud.sessions import ServedModel
from skydraft.config import Execution
from skydraft.decoding.race.cost_model import row_ms
from skydraft.engines.base import Engine
from skydraft.engines.vocab import Rows


class Worker:
    """Serves the jobs of a docket on one engine. Any thread may call `post`. A forward has at most
    `engine.invariant_rows` rows for exact execution, `engine.max_output_rows` for throughput."""

    def __init__(
        self, engine: Engine, limits: Limits, *, execution: Execution | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.served = ServedModel(engine, execution or engine.default_execution)
        self.max_rows = engine.max_rows(execution)
        self.docket = Docket(self.served, limits, clock)
        self._engine, self.clock = engine, clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.post = self._inbox.put  # runs work on the worker's thread before the next step

    def run(self) -> None:
        """Serve until stopped. Every waiting job gets an answer, even after a failure."""
        try:
            while not self.docket.is_stopping:
                self.receive(self.docket.idle_s())
                self.step()
        finally:
            self.docket.stop()
            self.receive()  # also answers jobs that arrived meanwhile
            self.docket.sessions.close_all()

    def receive(self, idle_s: float = 0.0) -> None:
        """Run the posted work; wait for up to `idle_s` seconds if there is none."""
        try:
            if idle_s > 0:
                self._inbox.get(timeout=min(idle_s, TICK_S))()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def step(self) -> None:
        """Run one forward for the waiting jobs: admit → prefill → schedule → forward and verify → commit."""
        self.docket.expire()
        self.docket.admit()
        self._prefill()
        batch = self.docket.batch(self.max_rows, lambda num_rows: row_ms(self._engine.forward_ms, num_rows))
        self.docket.commit(self._forward(batch))

    def _prefill(self) -> None:
        """Feed one part of the next uncached prompt; other jobs run between the parts."""
        if (job := self.docket.next_prefill()) is None:
            return
        target = job.target
        before = target.num_in_cache
        with self.docket.failing(job):
            job.cost += target.prefill()
            self.docket.work_done.serve(job.owner, target.num_in_cache - before)
            self.docket.make_ready(job)

    def _forward(self, batch: Batch) -> list[Job]:
        """Judge the rows of all jobs in one forward; if it fails, in one forward each. Returns the finished jobs. A
        failed forward leaves every sequence unchanged."""
        if not batch:
            return []
        began = self.clock()
        with self._engine.floor:  # held until the rows are judged, since another forward would overwrite them
            try:
                rows = self._engine.extend_batch([(work.sequence, feed) for _, work, feed in batch])
            except Exception as error:
                if len(batch) == 1:
                    self.docket.fail(batch[0][0], error)
                    return []
                log.warning("a forward failed; its jobs are tried one by one: %s", error)
                return [done for each in batch for done in self._forward([each])]
            return self._verify(batch, rows, self.clock() - began)

    def _verify(self, batch: Batch, rows: list[Rows], seconds: float) -> list[Job]:
        self.docket.totals.forward(sum(len(feed) for *_, feed in batch), seconds)
        done = []
        for (job, work, feed), fed in zip(batch, rows, strict=True):
            # Drafts are not counted, since they only use left-over rows.
            self.docket.work_done.serve(job.owner, 1 if job.has_verdict else len(feed))
            job.account(len(feed), seconds, self.clock())
            with self.docket.failing(job):
                work.absorb(fed)
                if work.next_feed(1) is None:
                    done.append(job)
        return done
