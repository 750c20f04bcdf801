"""The judge over vLLM: each verification is one request of the ids prefix + block, to an engine that batches them.

Read `VllmJudge.advance` and `VllmJudge._finish` first: who is admitted is asked about at once, and vLLM decides which
of the requests share a forward. All that is not asking is the docket's, as it is for the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from skydraft.cloud.docket import TICK_S, Docket
from skydraft.cloud.jobs import Job
from skydraft.cloud.judge import Observer
from skydraft.cloud.limits import Limits
from skydraft.cloud.vllm.asking import ROWS_MISSING, UNKNOWN_CHOOSER, Asking, read_answer
from skydraft.cloud.vllm.engine import Pooled, VllmEngine
from skydraft.cloud.vllm.profile import forward_times
from skydraft.cloud.vllm.targets import Pending, VllmSeats, VllmTarget, own
from skydraft.engines.vocab import TokenIds
from skydraft.errors import EngineEnded, EngineError
from skydraft.types import Cost, Verdict

log = logging.getLogger("skydraft.cloud")
_MOST_STARTS = 3  # of an engine that ends again before it has answered anything


class VllmJudge:
    """Runs jobs on vLLM, on an event loop in the thread of `run`. `start` comes first; see `Judge` for the rest."""

    def __init__(self, engine: VllmEngine, limits: Limits, clock: Callable[[], float] = time.perf_counter) -> None:
        self.served = engine.served  # its times are known after the start
        self.on_health: Callable[[bool], None] = lambda is_well: None
        self.num_sessions = 0
        self._engine = engine
        self._clock = clock
        self._docket = Docket(VllmSeats(engine.served), limits, clock)
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._is_well = asyncio.Event()
        self._over = asyncio.Event()
        self._restart: asyncio.Task[None] | None = None
        self._failure: Exception | None = None  # why it cannot go on
        self._num_starts = 0  # since something was answered
        self._generation = 0  # counts the starts: a worker that was started knows no parameters

    @property
    def observer(self) -> Observer | None:
        """Who is told what happens."""
        return self._docket.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._docket.observer = observer

    def submit(self, job: Job) -> None:
        """Take a job; it will be answered."""
        self._post(lambda: self._docket.take(job))

    def cancel(self, job: Job) -> None:
        """Nobody reads the answers of a stream any more."""
        self._post(lambda: self._docket.cancel(job))

    def close_session(self, number: int, owner: str) -> None:
        """End a session: at once, or when what was asked of it is answered."""
        self._post(lambda: self._docket.close(number, owner))

    def stop(self) -> None:
        """Answer what is waiting or under way with CloudDraining, and let `run` return."""
        self._post(self._stop)

    def _post(self, work: Callable[[], None]) -> None:
        def do() -> None:
            work()
            self.advance()

        self._loop.call_soon_threadsafe(do)

    def _stop(self) -> None:
        self._docket.stop()
        self._over.set()

    def start(self) -> None:
        """Start vLLM; before `run`. Raises EngineError."""
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self._engine.start()
        self._is_well.set()
        self.served = replace(self.served, forward_ms=await forward_times(self._engine))

    def run(self) -> None:
        """Work until stopped. Whatever ends it, everybody who waits is answered."""
        try:
            self._loop.run_until_complete(self._work())
        finally:
            self._docket.stop()
            self._docket.sessions.close_all()

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
        """Whatever has changed: expire → admit → ask for those who are not asked for yet."""
        self._docket.expire()
        self._docket.admit()
        for job in self._docket.scheduler.active:
            if job not in self._tasks and not self._over.is_set():
                self._tasks[job] = self._loop.create_task(self._serve(job))
        self.num_sessions = len(self._docket.sessions)

    async def _serve(self, job: Job) -> None:
        try:
            await self._finish(job)
        except asyncio.CancelledError:
            return
        except Exception as error:
            if not job.is_answered:
                self._docket.fail([job], error)
        finally:
            del self._tasks[job]
        self.advance()

    async def _finish(self, job: Job) -> None:
        """One job to its last answer: prefill → (wait for its turn → ask → commit)*."""
        target = own(job.session.target)
        if target.needs_prefill:
            job.spend(await self._prefill(target))
            if job.is_answered:
                return  # a later epoch has the session
            self._docket.make_ready(job)
        while not job.is_answered and isinstance(work := job.work, Pending):
            await asyncio.sleep(max(job.turn - self._clock(), 0))
            if job.is_answered:
                return
            began = self._clock()
            verdict = await self._ask(target, work)
            if job.is_answered:
                return
            work.found = verdict
            self._docket.scheduler.serve(job, work.num_rows)
            job.account(work.num_rows, self._clock() - began, self._clock())
            self._docket.commit([job])

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
        if data == UNKNOWN_CHOOSER:  # forgotten, or the engine was started anew
            data = await self._pooled(target, work, target.asking(work, with_params=True))
        target.known_to = self._generation
        return read_answer(data, work.block, work.catch_up, self.served.vocab.size)

    async def _pooled(self, target: VllmTarget, work: Pending, asking: Asking) -> bytes:
        """The answer of vLLM's worker, with all rows that it needs.

        Of what is in the prefix cache there are no rows. That happens where the same text was judged before under the
        same salt: then the session reads its text under a salt of its own, once, and goes on under that.
        """
        pooled = await self._pool(work.token_ids, target.salt, asking)
        if pooled.data == ROWS_MISSING:
            target.keep_apart()
            pooled = await self._pool(work.token_ids, target.salt, asking)
        if pooled.data == ROWS_MISSING:
            pooled = await self._pool(work.token_ids, target.salt, asking, skip_cache=True)
        return pooled.data

    async def _pool(self, token_ids: TokenIds, salt: str, asking: Asking | None, *, skip_cache: bool = False) -> Pooled:
        """Ask vLLM; once more where it ended meanwhile. Who asks when it ends a second time may be why it does."""
        for _ in range(2):
            await self._is_well.wait()
            began = self._clock()
            try:
                pooled = await self._engine.pool(token_ids, salt, asking, skip_cache=skip_cache)
            except EngineEnded:
                self._mend()
                continue
            self._num_starts = 0
            if self.observer:
                self.observer.forward(1, len(token_ids) - pooled.num_cached, self._clock() - began)
            return pooled
        raise EngineError("vLLM's engine ended twice during one request.")

    def _mend(self) -> None:
        """Start the engine again, unless that is under way. Who asks meanwhile waits; sessions stay as they are."""
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
