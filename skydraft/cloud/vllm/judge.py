"""The judge over vLLM: each verification is one request of the ids prefix + block, and vLLM batches the requests.

Read `VllmJudge.advance` and `VllmJudge._finish` first: an admitted job is sent to vLLM at once, and vLLM chooses the
requests that share a forward. The docket does everything else, as for the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from skydraft.cloud.docket import TICK_S, Docket, Job
from skydraft.cloud.limits import Limits
from skydraft.cloud.vllm.asking import ROWS_MISSING, UNKNOWN_CHOOSER, Asking, read_answer
from skydraft.cloud.vllm.engine import Pooled, VllmEngine
from skydraft.cloud.vllm.profile import forward_times
from skydraft.cloud.vllm.targets import Pending, VllmSeats, VllmTarget, own
from skydraft.engines.vocab import TokenIds
from skydraft.errors import EngineEnded, EngineError
from skydraft.types import Cost, Verdict

log = logging.getLogger("skydraft.cloud")
_MOST_STARTS = 3  # in a row of an engine that ends before its first answer


class VllmJudge:
    """Runs jobs on vLLM, on an event loop in the thread of `run`. Call `start` first; see `Judge` for the rest."""

    def __init__(self, engine: VllmEngine, limits: Limits, clock: Callable[[], float] = time.perf_counter) -> None:
        self.served = engine.served  # its times are measured in `start`
        self.on_health: Callable[[bool], None] = lambda is_well: None
        self._engine = engine
        self._clock = clock
        self.docket = Docket(VllmSeats(engine.served), limits, clock)
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._is_well = asyncio.Event()
        self._over = asyncio.Event()
        self._restart: asyncio.Task[None] | None = None
        self._failure: Exception | None = None  # the reason to end
        self._num_starts = 0  # since the last answer
        self._generation = 0  # counts the starts: a new worker knows no parameters

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` on the judge's thread, then `advance`."""

        def do() -> None:
            work()
            self.advance()
            if self.docket.is_stopping:
                self._over.set()

        self._loop.call_soon_threadsafe(do)

    def start(self) -> None:
        """Start vLLM. Call this before `run`. Raises EngineError."""
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self._engine.start()
        self._is_well.set()
        self.served = replace(self.served, forward_ms=await forward_times(self._engine))

    def run(self) -> None:
        """Serve until stopped. Every waiting job is answered, even after a failure."""
        try:
            self._loop.run_until_complete(self._work())
        finally:
            self.docket.stop()
            self.docket.sessions.close_all()

    def close(self) -> None:
        """End vLLM's processes."""
        if not self._loop.is_closed():
            self._engine.stop()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _work(self) -> None:
        while not self._over.is_set():
            self.advance()
            if self._engine.has_ended:
                self._mend()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), TICK_S)
        tasks = [*self._tasks.values(), *([self._restart] if self._restart else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure:
            raise self._failure

    def advance(self) -> None:
        """React to any change: expire → admit → start a request for each newly admitted job."""
        self.docket.expire()
        self.docket.admit()
        for job in self.docket.active:
            if job not in self._tasks and not self._over.is_set():
                self._tasks[job] = self._loop.create_task(self._serve(job))

    async def _serve(self, job: Job) -> None:
        try:
            await self._finish(job)
        except asyncio.CancelledError:
            return
        except Exception as error:
            if not job.is_answered:
                self.docket.fail([job], error)
        finally:
            del self._tasks[job]
        self.advance()

    async def _finish(self, job: Job) -> None:
        """Bring a job to its last answer: prefill → (wait for its turn → ask → commit)*."""
        target = own(job.session.target)
        if target.needs_prefill:
            job.cost += await self._prefill(target)
            if job.is_answered:
                return  # a later epoch has the session
            self.docket.make_ready(job)
        while not job.is_answered and isinstance(work := job.work, Pending):
            await asyncio.sleep(max(job.turn - self._clock(), 0))
            if job.is_answered:
                return
            began = self._clock()
            verdict = await self._ask(target, work)
            if job.is_answered:
                return
            work.answered = verdict
            self.docket.serve(job, work.num_rows)
            job.account(work.num_rows, self._clock() - began, self._clock())
            self.docket.commit([job])

    async def _prefill(self, target: VllmTarget) -> Cost:
        began = self._clock()
        pooled = Pooled(b"", 0)
        if len(token_ids := target.token_ids[:-1]):
            pooled = await self._pool(token_ids, target.salt, None)
        target.needs_prefill = False
        ms = (self._clock() - began) * 1e3
        return Cost(forward_ms=ms, prefill_ms=ms, num_cached=pooled.num_cached)

    async def _ask(self, target: VllmTarget, work: Pending) -> Verdict:
        """The verdict on a block. Raises EngineError, or GrammarRefused."""
        knows = target.known_to == self._generation
        data = await self._pooled(target, work, target.asking(work, with_params=not knows))
        if data == UNKNOWN_CHOOSER:  # forgotten, or the engine was started again
            data = await self._pooled(target, work, target.asking(work, with_params=True))
        target.known_to = self._generation
        return read_answer(data, work.block, work.catch_up, self.served.vocab.size)

    async def _pooled(self, target: VllmTarget, work: Pending, asking: Asking) -> bytes:
        """The answer of vLLM's worker; if rows are missing, the request is repeated.

        vLLM gives no rows for tokens in its prefix cache. Rows are missing if the same text was judged before under
        the same salt. Then the session reads its text once under a new salt of its own, and keeps that salt.
        """
        pooled = await self._pool(work.token_ids, target.salt, asking)
        if pooled.data == ROWS_MISSING:
            target.keep_apart()
            pooled = await self._pool(work.token_ids, target.salt, asking)
        if pooled.data == ROWS_MISSING:
            pooled = await self._pool(work.token_ids, target.salt, asking, skip_cache=True)
        return pooled.data

    async def _pool(self, token_ids: TokenIds, salt: str, asking: Asking | None, *, skip_cache: bool = False) -> Pooled:
        """Ask vLLM, and once more if it ended meanwhile. A request during two ends may be their cause, so it fails."""
        for _ in range(2):
            await self._is_well.wait()
            began = self._clock()
            try:
                pooled = await self._engine.pool(token_ids, salt, asking, skip_cache=skip_cache)
            except EngineEnded:
                self._mend()
                continue
            self._num_starts = 0
            if metrics := self.docket.metrics:
                metrics.forward(1, len(token_ids) - pooled.num_cached, self._clock() - began)
            return pooled
        raise EngineError("vLLM's engine ended twice during one request.")

    def _mend(self) -> None:
        """Start the engine again, unless that is under way. Requests wait meanwhile; sessions stay."""
        if not self._over.is_set() and (self._restart is None or self._restart.done()):
            self._is_well.clear()
            self.on_health(False)
            self._restart = self._loop.create_task(self._start_again())

    async def _start_again(self) -> None:
        log.error("vLLM's engine ended, and is started again: %s", self._engine.cause or "it did not say why")
        self._num_starts += 1
        try:
            if self._num_starts > _MOST_STARTS:
                raise EngineError("vLLM's engine ended again and again.", hint="Its log says why.")
            await asyncio.to_thread(self._engine.stop)
            await asyncio.to_thread(self._engine.start)
        except Exception as error:
            self._failure = error
            self._over.set()
            return
        self._generation += 1
        self._is_well.set()
        self.on_health(True)
