"""The event loop on which the edge waits for servers: one for the process, in one thread.

Deadlines, signs of life and cancelling are timers and tasks there, so the number of threads does not grow with the
number of generations.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from skydraft.errors import CloudLost

T = TypeVar("T")
_END_S = 0.3  # the interpreter waits this long for closing work at its end
_TICK_S, _UNSEEN_S = 0.1, 0.3  # a longer pause between two ticks is none of the servers'


@dataclass(frozen=True, slots=True)
class Waiting:
    """Times of waiting for an answer, in seconds: after `quick_s` the edge pings the server, and each ping may take
    `ping_s`; after `timeout_s` the answer is too late."""

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
        _ = task.cancelled() or task.exception()  # the result may never be asked for
        self._done.release()

    def cancel(self) -> None:
        """Make `result` raise CloudLost. Any thread may call this; it never waits."""
        self._is_cancelled = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: self.task.cancel())

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
        """Seconds during which it ticked."""
        return self._seen + min(self._clock() - self._last, _UNSEEN_S)

    def tick(self) -> None:
        """Go on for a moment."""
        self._seen, self._last = self.now(), self._clock()


class EventLoop:
    """An event loop in a daemon thread, for callers that block. `now` is the time during which it ran, in seconds."""

    def __init__(self) -> None:
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
        """Start work on the loop. Raises CloudLost while the interpreter ends."""
        return Awaited(self._loop, work)

    def post(self, work: Callable[[], Any]) -> None:
        """Run `work` on the loop, unless the interpreter is ending. Never waits, so a finalizer may call this."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def _stop(self) -> None:
        self.post(lambda: self._loop.create_task(self._wind_up()))
        self._thread.join(2.0)
        if not self._thread.is_alive():
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
    """The event loop of this process."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = EventLoop()
        return _shared


def _forget_loop() -> None:
    global _shared
    _shared = None


os.register_at_fork(after_in_child=_forget_loop)  # the thread of the loop stays behind
