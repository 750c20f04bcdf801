"""A lock that threads get in the order in which they asked for it."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from skydraft.errors import EngineError

_RLock: Any = type(threading.RLock())


class FairLock(_RLock):  # type: ignore[misc]
    """For `with`, once a thread (see `Engine.floor`). Once it is closed, `with` raises EngineError.

    Ctrl-C may interrupt a thread between any two steps of Python. So all that others wait for are locks in C, whose
    `with` releases them in one step; `__exit__` is that of RLock.
    """

    def __init__(self) -> None:
        self.is_closed = False  # only `close` changes it
        self._last = threading.Lock()  # which the thread that came last holds until it has this one
        self._swap = threading.Lock()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has it."""
        return bool(self._is_owned())

    def __enter__(self) -> None:
        assert not self.is_mine, "it would wait for itself"
        mine = threading.Lock()
        try:
            with mine:
                with self._swap:
                    before, self._last = self._last, mine
                with before:
                    self.acquire()
            self.check_open()
        except BaseException:  # Ctrl-C, above all
            self._give_up()
            raise

    def if_free(self, work: Callable[[], object]) -> None:
        """Do some work with the lock, if it is open and no thread has it, not even this one. It never waits, since the
        garbage collector may close a sequence anywhere."""
        if self.is_mine or self.is_closed:
            return
        try:
            if self.acquire(blocking=False):
                work()
                self.release()
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        if self.is_mine:
            self.release()

    def close(self) -> bool:
        """Close it for all threads, once its owner has released it; returns whether it was open."""
        with suppress(EngineError), self:
            self.is_closed = True
            return True
        return False

    def check_open(self) -> None:
        if self.is_closed:
            raise EngineError("The model is closed.")
