"""Fairness between owners, in one place: how many places each may hold, whose turn is next, and who gives way.

An owner is whoever a token or key belongs to. Servers, gateways and their queues decide by these two classes alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


class Shares:
    """Who holds how many of `total` places.

    Where owners are not `apart`, all callers are one owner, and a place is free or it is not.
    """

    def __init__(self, total: int, *, apart: bool = True) -> None:
        self._total = total
        self._apart = apart
        self._held: Counter[str] = Counter()

    def held(self, owner: str) -> int:
        """How many places an owner holds."""
        return self._held[owner]

    @property
    def num_free(self) -> int:
        """How many places nobody holds."""
        return self._total - self._held.total()

    def may_take(self, owner: str, num: int = 1) -> bool:
        """Whether `num` more places are free for this owner.

        An owner who holds none may take what is free. Any other leaves as many places free as it then holds, so that a
        flood of one owner never keeps another out.
        """
        if num > self.num_free or not self._apart or not self._held[owner]:
            return num <= self.num_free
        return self._held[owner] + num <= self.num_free - num

    def take(self, owner: str, num: int = 1) -> None:
        """Note that an owner holds `num` more."""
        self._held[owner] += num

    def give_back(self, owner: str, num: int = 1) -> None:
        """Note that an owner holds `num` fewer."""
        self._held[owner] -= num
        if self._held[owner] <= 0:
            del self._held[owner]

    def gives_way(self, owner: str, to: str, num_apart: int = 1) -> bool:
        """Whether `owner` gives up a place for `to`: for itself always, for others while it holds `num_apart` more."""
        return owner == to or self._held[owner] >= self._held[to] + num_apart

    def largest_first(self, holders: Iterable[T], owner_of: Callable[[T], str]) -> list[T]:
        """`holders` in the order in which they give way: those of whoever holds the most first, else as they came."""
        return sorted(holders, key=lambda holder: -self._held[owner_of(holder)])


class Served:
    """How much work was done for each owner; whoever had less goes first (start-time fair queueing)."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def of(self, owner: str) -> float:
        """The owner's place in the order: the lowest goes first."""
        return self._served.get(owner, 0.0)

    def serve(self, owner: str, work: float) -> None:
        """Note that work was done for an owner."""
        self._served[owner] = self.of(owner) + work

    def enter(self, owner: str, present: Iterable[str]) -> None:
        """Let an owner in beside those who are `present`.

        One who was away begins where the least served of them is: what was not used is not saved up.
        """
        others = set(present)
        if owner in others:
            return
        least = min(map(self.of, others), default=0.0)
        self._served = {name: work for name, work in self._served.items() if name in others or work > least}
        self._served[owner] = max(self.of(owner), least) if others else 0.0
