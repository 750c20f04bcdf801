import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from filelock import FileLock
from pydantic import Field, TypeAdapter

from skydraft.decoding.prices import Prices
from skydraft.errors import BudgetSpent, OptionError
from skydraft.files import read_file, set_aside, write_whole
from skydraft.types import LinkCost

_Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LOCK_S = 5.0
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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock", timeout=LOCK_S):  # its Timeout is an OSError
            known = self._known()
            today = min(max(known.day, day), day + 1)
            known = known if known.day >= day else _Spent()
            total = known.costs.get(self.server, 0.0) + cost
            now = _Spent(today, known.costs | {self.server: total})
            if now != known:
                write_whole(self.path, _SPENT.dump_json(now, indent=1))
        return today, total

    async def add_in_thread(self, day: int, cost: float) -> tuple[int, float]:
        """`add`, which may wait; it is done here when the interpreter ends and has no threads left."""
        try:
            adding = asyncio.get_running_loop().run_in_executor(None, self.add, day, cost)
        except RuntimeError:
            return self.add(day, cost)
        return await adding

    def _known(self) -> _Spent:
        try:
            return _SPENT.validate_json(read_file(self.path))
        except FileNotFoundError:
            return _Spent()
        except ValueError:
            set_aside(self.path, "what was spent today counts from 0")
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
        self.prices, self.day_sum = prices, day_sum
        self._max_cost, self._max_calls = max_cost, max_calls
        self.spent = LinkCost()
        self.bounds_calls = max_calls is not None
        self._settling = asyncio.Lock()
        self._day, self._num_calls = 0, 0
        self._settled = self._unsettled = 0.0  # costs that are in the sum of the day, and those that are not yet
        self._soon: asyncio.Task[None] | None = None
        self._error: OSError | None = None  # why the sum could not be kept, the last time

    @property
    def cost(self) -> float:
        return self._settled + self._unsettled

    def check(self) -> None:
        """Raise BudgetSpent if nothing more may be asked today."""
        self._begin_day()
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
        """Note the price of a request, which comes into the sum of the day soon, if nobody settles before. `told` is
        what clients may know of it, if not all."""
        self.spent += told or link
        if self.prices is None or not (cost := self.prices.of(link)):
            return
        self._begin_day()
        self._unsettled += cost
        if self.day_sum is not None and (self._soon is None or self._soon.done()):
            self._soon = asyncio.ensure_future(self._settle_soon(self.day_sum))

    async def settle(self) -> None:
        """Where costs have a limit, bring them into the sum of the day, and learn it. Raises BudgetSpent if it cannot
        be kept. Without a limit no text waits for the sum."""
        if self.day_sum is None or self._max_cost is None:
            return
        await asyncio.shield(self._add(self.day_sum))  # which ends whoever is cancelled meanwhile
        if (error := self._error) is not None:
            hint = f"Writing to {self.day_sum.path} failed: {error}."
            raise BudgetSpent("The sum of today's costs cannot be kept.", hint=hint) from error
        if self._soon is not None and not self._unsettled:
            self._soon.cancel()

    async def _settle_soon(self, day_sum: DaySum) -> None:
        """Settle in a moment, or at once when the process ends; again and again until it is done."""
        is_last = False
        while self._unsettled and not is_last:
            try:
                await asyncio.sleep(_SOON_S)
            except asyncio.CancelledError:
                is_last = True
            if self._unsettled:
                await asyncio.shield(self._add(day_sum))

    async def _add(self, day_sum: DaySum) -> None:
        async with self._settling:
            while True:  # midnight may pass meanwhile
                today, cost, self._unsettled = self._begin_day(), self._unsettled, 0.0
                self._settled += cost
                try:
                    now, self._error = await day_sum.add_in_thread(today, cost), None
                except OSError as error:
                    now, self._error = (self._day, self._settled - cost), error
                    self._unsettled += cost
                if self._begin_day() == today:
                    self._day, self._settled = now
                    return

    def _begin_day(self) -> int:
        """Today by the clock. One that stepped back or was ahead is treated as in `DaySum.add`. What is to come into a
        sum comes into that of the new day."""
        if (today := int(time.time() // 86400)) > self._day:
            self._num_calls, self._settled = 0, 0.0
            self._unsettled = self._unsettled if self.day_sum else 0.0
        self._day = max(min(self._day, today + 1), today)
        return today
