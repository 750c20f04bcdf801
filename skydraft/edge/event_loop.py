"""All waiting of a process for servers is on one event loop, in one thread.

Deadlines, signs of life and cancelling are timers and tasks there: a generation needs no thread of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from skydraft.errors import CloudLost, CloudTimeout, OptionError

T = TypeVar("T")
_END_S = 0.3  # for what is under way at the interpreter's end
_TICK_S, _UNSEEN_S = 0.1, 0.3  # a longer pause between two ticks is none of the servers'


@dataclass(frozen=True, slots=True)
class Waiting:
    """Seconds: pings begin after `quick_s`, each may take `ping_s`; after `timeout_s` the answer is too late."""

    timeout_s: float
    quick_s: float
    ping_s: float


class Awaited(Generic[T]):
    """Work on the event loop, for which a thread waits.

    It is a lock and one task: the two chained futures of concurrent.futures take 0.03 ms more in every round.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._work = work
        self._is_cancelled = False
        self._done = threading.Lock()
        self._done.acquire()
        try:
            loop.call_soon_threadsafe(self._start)
        except RuntimeError as error:
            work.close()
            raise CloudLost("The interpreter is ending.") from error

    def _start(self) -> None:
        self.task = self._loop.create_task(self._work)  # only the loop may use it
        self.task.add_done_callback(self._end)
        if self._is_cancelled:
            self.task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        seen(task)  # the result may never be asked for
        self._done.release()

    def cancel(self) -> None:
        """Make `result` raise CloudLost. Any thread may call this; it never waits."""
        self._is_cancelled = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: self.task.cancel())

    def wait(self, timeout_s: float) -> None:
        if self._done.acquire(timeout=timeout_s):
            self._done.release()

    def result(self) -> T:
        """Wait until the work is done. Raises the error of the work, or CloudLost if it was cancelled."""
        try:
            self._done.acquire()
        except BaseException:
            self.cancel()
            raise
        try:
            return self.task.result()
        except asyncio.CancelledError as error:
            raise CloudLost("The generation was cancelled.") from error


class WatchedTime:
    """A clock that stands still while nobody ticks: a stopped process, or a machine that sleeps, hears no server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen, self._last = 0.0, clock()

    def now(self) -> float:
        return self._seen + min(self._clock() - self._last, _UNSEEN_S)

    def tick(self) -> None:
        self._seen, self._last = self.now(), self._clock()


class EventLoop:
    """An event loop in a daemon thread, for callers that block. `now` is the time during which it ran, in seconds."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._watch = WatchedTime()
        self.now = self._watch.now
        self._loop.call_soon(self._tick)
        self._thread = threading.Thread(target=self._loop.run_forever, name="skydraft edge", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def _tick(self) -> None:
        self._watch.tick()
        self._loop.call_later(_TICK_S, self._tick)

    def begin(self, work: Coroutine[Any, Any, T]) -> Awaited[T]:
        """Start work on the loop. Raises CloudLost while the interpreter ends, OptionError in a forked process."""
        if self._pid != os.getpid():  # the thread stayed behind, and gRPC runs on no other loop
            work.close()
            raise OptionError(
                "This process was forked after a cloud was used, so it cannot use a cloud.",
                hint="Start processes with the method spawn, or use the cloud in them alone.",
            )
        return Awaited(self._loop, work)

    def post(self, work: Callable[[], Any]) -> None:
        """Run `work` on the loop, unless the interpreter is ending. Never waits, so a finalizer may call this."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def _stop(self) -> None:
        self.post(lambda: self._loop.create_task(self._wind_up()))
        self._thread.join(2.0)
        if not self._thread.is_alive() and not self._loop.is_running():  # after a fork it is neither
            self._loop.close()

    async def _wind_up(self) -> None:
        """End what is under way: what is left over would be complained about."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        _, late = await asyncio.wait(others, timeout=_END_S) if others else ((), ())
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        self._loop.stop()


_lock = threading.Lock()
_shared: EventLoop | None = None


def shared_loop() -> EventLoop:
    """The event loop of this process. In a forked process it is that of the parent, which begins nothing there."""
    global _shared
    with _lock:
        _shared = _shared or EventLoop()
        return _shared


async def sign_of_life(ask: Callable[[float], Awaitable[object]], timeout_s: float) -> float:
    """Milliseconds until a server answers what `ask` asks within a time. Raises CloudLost where it does not."""
    now = shared_loop().now
    while True:
        began, ran = time.perf_counter(), now()
        try:
            await ask(timeout_s)
        except CloudTimeout as error:
            if now() - ran >= timeout_s / 2:  # else this process was stopped meanwhile
                raise CloudLost(f"no sign of life in {timeout_s:g} s.") from error
        else:
            return (time.perf_counter() - began) * 1e3


def seen(task: asyncio.Future[Any]) -> None:
    """Look at the end of work for which perhaps nobody waits: else asyncio would complain about its error."""
    _ = task.cancelled() or task.exception()
