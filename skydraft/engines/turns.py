"""Who uses an engine: `Turns` refuses a second one at once, `Floor` lets those who know of each other wait in line."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from skydraft.errors import EngineError


class Turns:
    """`with turns:` is one use of the engine called `name`, with no other inside.

    Nobody waits: raises EngineError at once while another thread has its turn, and when there are no more turns.
    """

    def __init__(self, name: str) -> None:
        self.is_over = False  # only `Engine.close` changes it
        self._name = name
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise EngineError(f"Another thread is using {self._name}.", hint="Let one call end before the next begins.")
        if self.is_over:
            self._lock.release()
            self.check()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def check(self) -> None:
        """Raise EngineError if the engine is closed."""
        if self.is_over:
            raise EngineError(f"{self._name} is closed.")


class Floor:
    """`with floor:` is a stretch of work on an engine whose rows must not be overwritten by another's.

    Threads get it in the order in which they asked, so that a short text is not stuck behind a long one. It is no
    substitute for `Turns`: who never asks for it may still use the engine.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close a sequence, which tries to take the floor, anywhere in here.
        self._lock = threading.RLock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    @contextmanager
    def spare(self) -> Iterator[bool]:
        """It for a moment in which nobody else has it; whether that was so. Never waits."""
        is_free = self.try_acquire()
        try:
            yield is_free
        finally:
            if is_free:
                self.release()

    def acquire(self) -> None:
        """Wait for it."""
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            mine.acquire()  # released by whoever had the floor before, and hands it on
        except BaseException:  # Ctrl-C, above all
            with self._lock:
                is_mine = mine not in self._waiting
                if not is_mine:
                    self._waiting.remove(mine)
            if is_mine:
                self.release()
            raise

    def try_acquire(self) -> bool:
        """Take it if nobody has it; returns whether that was so."""
        with self._lock:
            is_free = not self._is_taken
            self._is_taken = True
        return is_free

    def release(self) -> None:
        """Give it up, or hand it on."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
