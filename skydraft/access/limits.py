"""Limits of one server: in total, for each session and for each token."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from skydraft.errors import OptionError, RateLimited

_BURST_S = 2.0  # seconds of its rate that a token may use at once
_MIN_BURST_ROWS = 64.0  # but always a whole block


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in tokens, rows, bytes and seconds; 0 is no limit where it is a default.

    `max_sessions` limits the sessions with KV memory, `max_queue` the waiting requests, and `session_ttl_s` the time
    that a session may be idle. `rows_per_s` (of the target) applies to each bearer token.
    """

    max_sessions: int = 8
    max_prompt: int = 4096
    max_queue: int = 256
    session_ttl_s: float = 300.0
    rows_per_s: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if not (value := getattr(self, each.name)) > 0 and not value == each.default == 0:
                name = each.name if each.name == "rows_per_s" else each.name.removesuffix("_s")
                raise OptionError(f"--{name.replace('_', '-')} must be positive.")


class RowBudget:
    """Target rows per second for each label: a bucket that fills at `rows_per_s` and holds two seconds of it."""

    def __init__(self, rows_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rows_per_s
        self._burst = max(_BURST_S * rows_per_s, _MIN_BURST_ROWS)
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # rows and when that was, by label
        self._lock = threading.Lock()  # requests are charged where they arrive, streams where they are computed

    def spend(self, label: str, num_rows: int) -> None:
        """Take rows from the bucket; it may go below zero once. Raises RateLimited while it is empty."""
        if wait_s := self.charge(label, 0):
            raise RateLimited(f"The token {label} has used up its {self._rate:g} rows a second.", retry_after_s=wait_s)
        self.charge(label, num_rows)

    def charge(self, label: str, num_rows: int) -> float:
        """Take rows even from an empty bucket; returns the seconds until it holds a row again."""
        if not self._rate:
            return 0.0
        with self._lock:
            now = self._clock()
            left, before = self._left.get(label, (self._burst, now))
            left = min(left + (now - before) * self._rate, self._burst) - num_rows
            self._left[label] = left, now
        return 0.0 if left > 0 else (1 - left) / self._rate

    def has_spare(self, label: str) -> bool:
        """Whether the bucket is more than half full: texts do not need these rows themselves."""
        self.charge(label, 0)
        return not self._rate or self._left[label][0] > self._burst / 2
