"""What forwards of n rows cost on this machine: which to pad with rows that are thrown away, and how to part feeds."""

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
    """Measured on this machine. `invariant_rows`: how many rows one forward may hold and still be bit-identical to one
    row at a time. `forward_ms[n - 1]`: best time of a forward of n rows."""

    invariant_rows: int
    forward_ms: tuple[float, ...]

    @property
    def is_sound(self) -> bool:
        """Whether a probe may have measured it: a file may hold anything."""
        return 0 < self.invariant_rows <= len(self.forward_ms) and all(0 < ms < math.inf for ms in self.forward_ms)

    def limit(self, num_rows: int) -> int:
        """Up to how many rows that many may be padded: they keep their bits if they had them."""
        return self.invariant_rows if num_rows <= self.invariant_rows else len(self.forward_ms)


NOT_PROBED = RowProfile(invariant_rows=1, forward_ms=(1.0,))
_KEPT, _ENOUGH = 32, 8  # times of one number of rows
_SAVES = 0.95  # of the time, at most, is worth the padding
_PARTED = 2.0


class Pass(NamedTuple):
    """Rows of several sequences in one forward: `num_rows` of each of `feeds`. Those that a feed lacks are padding."""

    feeds: tuple[int, ...]
    num_rows: int


class RowCosts:
    """A stored profile, and medians of the forwards since. One line in the log says where the two part: the profile was
    measured on a busy machine, or the machine is another one now."""

    def __init__(self, profile: RowProfile, name: str) -> None:
        self.profile, self._ms, self._name, self._is_told = profile, profile.forward_ms, name, False
        self._seen: list[deque[float]] = [deque(maxlen=_KEPT) for _ in self._ms]

    @property
    def forward_ms(self) -> tuple[float, ...]:
        """Times of 1, 2, … rows with what they are padded to."""
        return tuple(map(self.ms, range(1, len(self._ms) + 1)))

    def padded(self, num_rows: int) -> int:
        """The cheapest number of rows that holds so many."""
        limit = min(self.profile.limit(num_rows), len(self._ms))
        if not 1 < num_rows < limit:
            return num_rows
        best = min(range(num_rows, limit + 1), key=lambda num: self._ms[num - 1])
        return best if self._ms[best - 1] < _SAVES * self._ms[num_rows - 1] else num_rows

    def ms(self, num_rows: int) -> float:
        known = self._ms
        return known[self.padded(num_rows) - 1] if num_rows <= len(known) else num_rows * known[-1] / len(known)

    def passes(self, sizes: Seq[int]) -> list[Pass]:
        """The cheaper of two ways to feed these sizes. llama.cpp takes as many rows of each sequence into a forward, so
        sequences with few rows are padded, or what is left of the others comes in forwards of their own."""
        padded = Pass(tuple(range(len(sizes))), max(sizes))
        steps = pairwise((0, *sorted(set(sizes))))
        parted = [Pass(tuple(i for i, size in enumerate(sizes) if size > done), end - done) for done, end in steps]
        if len(sizes) * max(sizes) > self.profile.limit(sum(sizes)):
            return parted
        return min([padded], parted, key=lambda ways: sum(self.ms(len(each.feeds) * each.num_rows) for each in ways))

    def note(self, num_rows: int, ms: float) -> None:
        """Take in how long a forward took, padding included."""
        if num_rows > len(self._seen):
            return
        self._seen[num_rows - 1].append(ms)
        known = {num: median(seen) for num, seen in enumerate(self._seen, 1) if len(seen) >= _ENOUGH}
        if num_rows not in known:
            return
        profile = self.profile.forward_ms
        typical = known[min(known)] / profile[min(known) - 1]
        self._ms = tuple(known.get(num, typical * ms) for num, ms in enumerate(profile, 1))
        stored_ms = typical * profile[num_rows - 1]
        if not (self._is_told or 1 / _PARTED < known[num_rows] / stored_ms < _PARTED):
            self._is_told = True
            log.info(f"{self._name}: {num_rows} rows take {known[num_rows]:.0f} ms, {stored_ms:.0f} by the profile.")
