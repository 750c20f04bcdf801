"""The lock of an engine."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

from skydraft.errors import EngineError


class Floor:
    """The lock of one engine, for `with`. Threads get it in the order in which they asked; its owner may take it again.

    While a thread has it no other can overwrite rows. Once it is closed, `with` raises EngineError.
    """

    def __init__(self, name: str) -> None:
        self.is_closed = False  # only `close` changes it
        self._name = name
        self._line: deque[int] = deque()  # ids of threads: the first has the lock, the others wait
        self._num_again = 0  # how often the first has taken it again
        # Reentrant: the garbage collector may close a sequence, which calls `try_acquire`, anywhere in here.
        self._moved = threading.Condition(threading.RLock())

    def __enter__(self) -> None:
        self.acquire()
        if self.is_closed:
            self.release()
            self.check_open()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        me = threading.get_ident()
        with self._moved:
            if me in self._line:
                self._num_again += 1
                return
            try:
                self._line.append(me)
                self._moved.wait_for(lambda: self._line[0] == me)
            except BaseException:  # Ctrl-C, above all
                self._line.remove(me)
                self._moved.notify_all()
                raise

    def try_acquire(self) -> bool:
        """Take the lock if it is open and no thread has it, not even this one; returns whether that was so."""
        with self._moved:
            if self._line or self.is_closed:
                return False
            self._line.append(threading.get_ident())
            return True

    def release(self) -> None:
        """Undo one `acquire`; the last one hands the lock to the thread that has waited longest."""
        with self._moved:
            if self._num_again:
                self._num_again -= 1
            else:
                self._line.popleft()
                self._moved.notify_all()

    def close(self) -> bool:
        """Close the lock for all threads, once its owner has released it; returns whether it was open."""
        with suppress(EngineError), self:
            self.is_closed = True
            return True
        return False

    def check_open(self) -> None:
        if self.is_closed:
            raise EngineError(f"{self._name} is closed.")
