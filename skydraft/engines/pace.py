"""Fewer threads while other processes keep the cores: threads that spin for each other wait for whole time slices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from skydraft.engines.llama_library import is_busy

_NUM_STEPS = 5  # whose median counts
_FAR_LONGER = 4.0  # times the usual; a long text costs less than twice as much
_NUM_BEFORE_LOOK = 64  # steps with one thread


class Pace:
    """Chooses the threads of an engine by how long its steps take.

    A step of one row usually takes `usual_ms` with `num_threads`. It goes on with one thread once steps take far
    longer, and returns as soon as the machine has cores to spare. The number of threads changes no bit of a row.
    """

    def __init__(self, usual_ms: float, num_threads: int, notify: Callable[[str], None]) -> None:
        self._usual_ms = usual_ms
        self._all = num_threads
        self._times: deque[float] = deque(maxlen=_NUM_STEPS)
        self._num_alone = 0  # steps with one thread
        self._notify: Callable[[str], None] | None = notify
        self.num_threads = num_threads

    def observe(self, step_ms: float) -> bool:
        """Take in the time of a step of one row, milliseconds; returns whether `num_threads` has changed."""
        self._times.append(step_ms)
        before, now_ms = self.num_threads, median(self._times)
        if before > 1 and len(self._times) == _NUM_STEPS and now_ms > _FAR_LONGER * self._usual_ms:
            self.num_threads = 1
            self._say(now_ms)
        elif before < self._all:
            self._num_alone += 1
            if self._num_alone % _NUM_BEFORE_LOOK == 0 and not is_busy():
                self.num_threads = self._all
                self._times.clear()
        return self.num_threads != before

    def _say(self, now_ms: float) -> None:
        if self._notify:
            self._notify(
                f"other programs slow this one down: a step takes {now_ms:.0f} ms instead of {self._usual_ms:.0f} ms. "
                "It goes on with one thread until they are done."
            )
        self._notify = None
