"""Seats: what generations hold of engines that have a fixed number of sequences. Others wait in order of arrival."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable

from skydraft.engines.model import Model
from skydraft.errors import EngineBusy, EngineError

_lock = threading.RLock()  # reentrant: the garbage collector may give seats back anywhere in here
_moved = threading.Condition(_lock)
_LOOK_S = 0.2  # of those that wait: whether an engine was closed
_line: list[Seats] = []  # those that wait, the first to come first
_held: set[Seats] = set()


class Seats:
    """The seats of one generation, taken all at once: so no two generations hold what the other one waits for."""

    def __init__(self, engines: Iterable[Model | None]) -> None:
        self._wanted = Counter(each for each in engines if each is not None and each.has_seats)
        self._thread = 0  # that used it last
        self._is_over = False

    def take(self) -> bool:
        """Wait for all seats. Returns whether it holds them: not if the wait was ended. Raises EngineError."""
        if not self._wanted:
            return True
        with _lock:
            self._thread = threading.get_ident()
            if self in _held or self._is_over:
                return self in _held
            late_at = time.monotonic() + min(each.wait_s for each in self._wanted)
            try:
                _line.append(self)
                while not self._is_over and (full := self._full()) is not None:
                    self._check(full, left_s := late_at - time.monotonic())
                    _moved.wait(min(left_s, _LOOK_S))
                _held.update(() if self._is_over else (self,))
            finally:
                _line[:] = [each for each in _line if each is not self]
                _moved.notify_all()
            return self in _held

    def end_wait(self) -> None:
        """Take none from now on. Any thread may call this, and the next one."""
        with _lock:
            self._is_over = True
            _moved.notify_all()

    def give_back(self) -> None:
        with _lock:
            _held.discard(self)
            self.end_wait()

    def _full(self) -> Model | None:
        """An engine that has no seat left for this, after those that hold one and those that came before."""
        before = (*_held, *_line[: _line.index(self)])
        for engine, num in self._wanted.items():
            if sum(each._wanted[engine] for each in before) + num > engine.max_sequences:
                return engine
        return None

    def _check(self, full: Model, left_s: float) -> None:
        for engine, num in self._wanted.items():
            engine.floor.check_open()
            if num > engine.max_sequences:
                raise EngineError(
                    f"This text needs {num} sequences of {engine.name}.", hint=f"Load it with parallel={num}."
                )
        holders = {each._thread for each in _held if each._wanted[full]}
        # The main thread is in no pool, whose other threads may go on with what one of them began.
        is_own = holders == {self._thread} and self._thread == threading.main_thread().ident
        if is_own or left_s <= 0:
            why = "by a text that this thread has not ended" if is_own else f"and none was free in {full.wait_s:g} s"
            raise EngineBusy(
                f"All sequences of {full.name} are in use, {why}.",
                hint="End or close() each generation, or load the model with more: parallel=4.",
            )
