import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from filelock import FileLock
from pydantic import Field, TypeAdapter

from skydraft.decoding.accounts.prices import Prices
from skydraft.errors import BudgetSpent, OptionError
from skydraft.files import log, read_file, write_whole
from skydraft.types import LinkCost

_Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_LOCK_S = 1.0  # others hold it for milliseconds
_SOON_S = 1.0  # a process that is killed takes what it paid since with it


@dataclass(frozen=True, slots=True)
class _Spent:
    """What requests to each server cost on a day, which counts from 1970 in UTC."""

    day: int = 0
    costs: dict[str, _Cost] = field(default_factory=dict)


_SPENT = TypeAdapter(_Spent)


@dataclass(frozen=True, slots=True)
class DaySum:
    """The sum of all processes for one server, in a file."""

    path: Path
    server: str

    def add(self, day: int, cost: float) -> tuple[int, float]:
        """The day by the file's and this clock, and the sum on it, this cost included. Raises OSError. A clock that
        stepped back begins no new day. One that was far ahead delays the next one by a day."""
        with FileLock(f"{self.path}.lock", timeout=_LOCK_S):  # its Timeout is an OSError
            known = self._known()
            today = min(max(known.day, day), day + 1)
            known = known if known.day >= day else _Spent()
            total = known.costs.get(self.server, 0.0) + cost
            now = _Spent(today, known.costs | {self.server: total})
            if now != known:
                write_whole(self.path, _SPENT.dump_json(now, indent=1))
        return today, total

    def _known(self) -> _Spent:
        try:
            return _SPENT.validate_json(read_file(self.path))
        except FileNotFoundError:
            return _Spent()
        except ValueError:
            log.warning("skydraft: %s is damaged: what was spent today counts from 0.", self.path)
            return _Spent()


class Budget:
    """What servers may be asked in one day (UTC). Used on the event loop only.

    Texts go on without them after `max_calls` calls of this process, or once the requests have cost `max_cost` by
    `prices`: those of this process, or with `day_sum` those of all processes. `spent` is what texts needed in this
    process, as their clients may know. Raises OptionError.
    """

    def __init__(
        self, prices: Prices | None = None, max_cost: float | None = None, max_calls: int | None = None,
        day_sum: DaySum | None = None,
    ) -> None:  # fmt: skip
        if max_cost is not None and (prices is None or not max_cost > 0):
            raise OptionError("--max-cost must be above 0, and needs --price HIT,MISS,OUT.")
        if max_calls is not None and not max_calls >= 1:  # NaN is no number of calls
            raise OptionError(f"--max-calls must be 1 or more, not {max_calls}.")
        self.prices, self._day_sum = prices, day_sum
        self._max_cost, self._max_calls = max_cost, max_calls
        self.spent = LinkCost()
        self.bounds_calls = max_calls is not None
        self._day, self._num_calls = 0, 0
        self._settled = self._unsettled = 0.0  # costs that are in the sum of the day, and those that are not yet
        self._due = 0.0  # when the next cost is brought into it at once

    @property
    def cost(self) -> float:
        return self._settled + self._unsettled

    def check(self) -> None:
        """Raise BudgetSpent if nothing more may be asked today."""
        self.settle()
        if self._max_cost is not None and self.cost >= self._max_cost:
            raise BudgetSpent(f"Today's requests have cost {self.cost:.4g}, and --max-cost is {self._max_cost:g}.")
        if self._max_calls is not None and self._num_calls >= self._max_calls:
            raise BudgetSpent(f"Today's {self._max_calls} calls are used up.")

    def take(self) -> int:
        """Count a call that is about to be made; returns its day. Raises BudgetSpent instead."""
        self.check()
        self._num_calls += 1
        return self._day

    def give_back(self, day: int) -> None:
        self._num_calls -= day == self._day and self._num_calls > 0

    def pay(self, link: LinkCost, told: LinkCost | None = None) -> None:
        """Note the price of a request, which comes into the sum of the day at most a moment later. `told` is what
        clients may know of it, if not all."""
        self.spent += told or link
        if self.prices is not None and (cost := self.prices.of(link)):
            self._begin_day()
            self._unsettled += cost
            if time.monotonic() >= self._due:
                with suppress(BudgetSpent):  # `check` finds out
                    self.settle()

    def settle(self) -> None:
        """Bring what was paid into the sum of the day, and learn that. Raises BudgetSpent if it cannot be kept."""
        today = self._begin_day()
        if self._day_sum is None:
            return
        self._due = time.monotonic() + _SOON_S
        try:
            self._day, self._settled = self._day_sum.add(today, self._unsettled)
        except OSError as error:
            hint = f"Writing to {self._day_sum.path} failed: {error}."
            raise BudgetSpent("The sum of today's costs cannot be kept.", hint=hint) from error
        self._unsettled = 0.0

    def _begin_day(self) -> int:
        """Today by the clock. One that stepped back or was ahead is treated as in `DaySum.add`. What is to come into a
        sum comes into that of the new day."""
        if (today := int(time.time() // 86400)) > self._day:
            self._num_calls, self._settled = 0, 0.0
            self._unsettled = self._unsettled if self._day_sum else 0.0
        self._day = max(min(self._day, today + 1), today)
        return today
