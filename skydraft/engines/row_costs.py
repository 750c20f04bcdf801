"""The times of forwards of n rows on this machine; they decide when to pad with unused rows and how to split feeds."""

import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from skydraft.files import log


@dataclass(frozen=True, slots=True)
class RowProfile:
    """Measured on this machine. Forwards of up to `invariant_rows` rows are bit-identical to one row at a time.
    `forward_ms[n - 1]` is the best time of a forward of n rows."""

    invariant_rows: int
    forward_ms: tuple[float, ...]

    @property
    def is_sound(self) -> bool:
        """Whether the values are plausible: a file may hold anything."""
        return 0 < self.invariant_rows <= len(self.forward_ms) and all(0 < ms < math.inf for ms in self.forward_ms)

    def limit(self, num_rows: int) -> int:
        """Return the limit for padding that many rows. Exact rows stay exact."""
        return self.invariant_rows if num_rows <= self.invariant_rows else len(self.forward_ms)


NOT_PROBED = RowProfile(invariant_rows=1, forward_ms=(1.0,))
_KEPT, _ENOUGH = 32, 8  # times to keep, and to need, for each number of rows
_SAVES = 0.95  # padding must reduce the time to this share
_PARTED = 2.0


class Pass(NamedTuple):
    """Rows of several sequences in one forward: `num_rows` of each feed. Missing rows are padding."""

    feeds: tuple[int, ...]
    num_rows: int


class RowCosts:
    """A stored profile, and median times since. The log gets one line if they differ: the machine was busy when
    profiled, or has changed."""

    def __init__(self, profile: RowProfile, name: str) -> None:
        self.profile, self._name, self._is_told = profile, name, False
        self._ms: Seq[float] = profile.forward_ms
        self._known: dict[int, float] = {}  # medians by number of rows
        self._seen: list[deque[float]] = [deque(maxlen=_KEPT) for _ in self._ms]

    @property
    def forward_ms(self) -> tuple[float, ...]:
        """Milliseconds for 1, 2, … rows, padding included."""
        return tuple(map(self.ms, range(1, len(self._ms) + 1)))

    def padded(self, num_rows: int) -> int:
        """Return the cheapest number of rows, at least `num_rows`."""
        limit = min(self.profile.limit(num_rows), len(self._ms))
        if not 1 < num_rows < limit:
            return num_rows
        best = min(range(num_rows, limit + 1), key=lambda num: self._ms[num - 1])
        return best if self._ms[best - 1] < _SAVES * self._ms[num_rows - 1] else num_rows

    def ms(self, num_rows: int) -> float:
        known = self._ms
        return known[self.padded(num_rows) - 1] if num_rows <= len(known) else num_rows * known[-1] / len(known)

    def passes(self, sizes: Seq[int]) -> list[Pass]:
        """Return the cheaper of two ways to feed these sizes. llama.cpp takes the same number of rows of each sequence
        into a forward. So either short sequences are padded, or further forwards take the rest of the longer ones."""
        if len(sizes) == 1:
            return [Pass((0,), sizes[0])]
        padded = Pass(tuple(range(len(sizes))), max(sizes))
        steps = pairwise((0, *sorted(set(sizes))))
        parted = [Pass(tuple(i for i, size in enumerate(sizes) if size > done), end - done) for done, end in steps]
        if len(sizes) * max(sizes) > self.profile.limit(sum(sizes)):
            return parted
        return min([padded], parted, key=lambda ways: sum(self.ms(len(each.feeds) * each.num_rows) for each in ways))

    def note(self, num_rows: int, ms: float) -> None:
        """Record the time of a forward, padding included."""
        if num_rows > len(self._seen):
            return
        (seen := self._seen[num_rows - 1]).append(ms)
        if len(seen) < _ENOUGH:
            return
        known, profile = self._known, self.profile.forward_ms
        known[num_rows] = median(seen)
        typical = known[min(known)] / profile[min(known) - 1]
        self._ms = [known.get(num, typical * ms) for num, ms in enumerate(profile, 1)]
        stored_ms = typical * profile[num_rows - 1]
        if not (self._is_told or 1 / _PARTED < known[num_rows] / stored_ms < _PARTED):
            self._is_told = True
            log.info(f"{self._name}: {num_rows} rows take {known[num_rows]:.0f} ms, {stored_ms:.0f} by the profile.")
