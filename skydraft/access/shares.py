"""Fairness between owners: the places that each may hold, the order of turns, and the order of giving way.

An owner is the client of a token or key. Servers, gateways and their queues all decide by these two classes.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


class Shares:
    """Counts how many of `total` places each owner holds; `held` lists the owner of each taken one.

    If owners are not `apart`, all callers count as one owner and may take every place. Otherwise an owner with places
    must leave `spare` places free, by default as many as it then holds: so its flood never locks out another.
    """

    def __init__(self, total: int, *, apart: bool = True, spare: int | None = None, held: Iterable[str] = ()) -> None:
        self._total = total
        self._apart = apart
        self._spare = spare
        self._held = Counter(held)  # places, by owner

    @property
    def num_free(self) -> int:
        return self._total - self._held.total()

    def may_take(self, owner: str, num: int = 1) -> bool:
        spare = self._held[owner] + num if self._spare is None else self._spare
        return num + (spare if self._apart and self._held[owner] else 0) <= self.num_free

    def next_of(self, waiting: Iterable[T], owner_of: Callable[[T], str]) -> T | None:
        """The next to serve: the first one of the owner with the fewest places; None if that owner may take none."""
        first = min(waiting, key=lambda each: self._held[owner_of(each)], default=None)
        return None if first is None or not self.may_take(owner_of(first)) else first

    def take(self, owner: str, num: int = 1) -> None:
        self._held[owner] += num

    def give_back(self, owner: str, num: int = 1) -> None:
        self._held[owner] -= num
        if self._held[owner] <= 0:
            del self._held[owner]

    def gives_way(self, owner: str, to: str, num_apart: int = 1) -> bool:
        """Whether `owner` gives up a place for `to`: always if both are the same, else if it has `num_apart` more."""
        return owner == to or self._held[owner] >= self._held[to] + num_apart

    def largest_first(self, holders: Iterable[T], owner_of: Callable[[T], str]) -> list[T]:
        """`holders` in the order of giving way: first those of the owner with the most places, else in given order."""
        return sorted(holders, key=lambda holder: -self._held[owner_of(holder)])


class WorkShares:
    """Counts the work done for each owner; the owner with less work goes first (start-time fair queueing)."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def of(self, owner: str) -> float:
        return self._served.get(owner, 0.0)

    def serve(self, owner: str, work: float) -> None:
        self._served[owner] = self.of(owner) + work

    def enter(self, owner: str, present: Iterable[str]) -> None:
        """Add an owner. It begins level with the least served of `present` ones: unused shares are not saved up."""
        others = set(present)
        if owner in others:
            return
        least = min(map(self.of, others), default=0.0)
        self._served = {name: work for name, work in self._served.items() if name in others or work > least}
        self._served[owner] = max(self.of(owner), least) if others else 0.0
