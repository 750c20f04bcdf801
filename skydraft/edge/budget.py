import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

from filelock import FileLock
from pydantic import Field, TypeAdapter

from skydraft.decoding.prices import Prices
from skydraft.errors import BudgetSpent, OptionError
from skydraft.files import read_file, set_aside, write_whole
from skydraft.types import LinkCost

T = TypeVar("T")
_Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LOCK_S = 5.0
_SOON_S = 1.0  # a process that is killed takes what it paid since with it


@dataclass(frozen=True, slots=True)
class _Spent:
    """What requests to each server cost on a day, which counts from 1970 in UTC; and the part of each owner of it."""

    day: int = 0
    costs: dict[str, _Cost] = field(default_factory=dict)
    owners: dict[str, dict[str, _Cost]] = field(default_factory=dict)


_SPENT = TypeAdapter(_Spent)


@dataclass(frozen=True, slots=True)
class DaySum:
    """The sum of all processes for one server, in a file."""

    path: Path
    server: str

    def add(self, day: int, costs: Mapping[str, float]) -> tuple[int, dict[str, float]]:
        """The day by the file's and this clock, and the sums on it by owner, these costs included. Raises OSError. A
        clock that stepped back begins no new day. One that was far ahead delays the next one by a day."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock", timeout=LOCK_S):  # its Timeout is an OSError
            known = self._known()
            today = min(max(known.day, day), day + 1)
            known = known if known.day >= day else _Spent()
            parts = known.owners.get(self.server, {})
            rest = known.costs.get(self.server, 0.0) - sum(parts.values())  # of no owner
            sums = {owner: max(cost, 0.0) for owner, cost in _plus({**parts, "": rest}, costs).items()}
            named = {owner: cost for owner, cost in sums.items() if owner}
            owners = known.owners | ({self.server: named} if named else {})
            now = _Spent(today, known.costs | {self.server: sum(sums.values())}, owners)
            if now != known:
                write_whole(self.path, _SPENT.dump_json(now, indent=1))
        return now.day, sums

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
    `prices`: those of this process, or with `day_sum` those of all processes. So do those of an owner for whom
    `max_cost_of` says less. `spent` is what each owner's texts needed in this process, as they may know. Raises
    OptionError.
    """

    def __init__(
        self, prices: Prices | None = None, max_cost: float | None = None, max_calls: int | None = None,
        day_sum: DaySum | None = None, max_cost_of: Callable[[str], float | None] = lambda owner: None,
    ) -> None:  # fmt: skip
        if max_cost is not None and (prices is None or not max_cost > 0):
            raise OptionError("--max-cost must be above 0, and needs --price HIT,MISS,OUT.")
        if max_calls is not None and not max_calls >= 1:  # NaN is no number of calls
            raise OptionError(f"--max-calls must be 1 or more, not {max_calls}.")
        self.prices, self.day_sum = prices, day_sum
        self._max_cost, self._max_calls, self._max_cost_of = max_cost, max_calls, max_cost_of
        self.spent: dict[str, LinkCost] = {}
        self.bounds_calls = max_calls is not None
        self._settling = asyncio.Lock()
        self._day, self._num_calls = 0, 0
        self._settled: dict[str, float] = {}  # costs by owner that are in the sum of the day
        self._unsettled: dict[str, float] = {}  # and those that are not yet
        self._soon: asyncio.Task[None] | None = None
        self._error: OSError | None = None  # why the sum could not be kept, the last time

    @property
    def cost(self) -> float:
        return sum(self._settled.values()) + sum(self._unsettled.values())

    def check(self, owner: str = "") -> None:
        """Raise BudgetSpent if nothing more may be asked today for this owner."""
        self._begin_day()
        if self._max_cost is not None and self.cost >= self._max_cost:
            raise BudgetSpent(f"Today's requests have cost {self.cost:.4g}, and --max-cost is {self._max_cost:g}.")
        most, cost = self._max_cost_of(owner), _plus(self._settled, self._unsettled).get(owner, 0.0)
        if most is not None and cost >= most:
            raise BudgetSpent(f"The key {owner} has spent its max-cost of {most:g} for today.")
        if self._max_calls is not None and self._num_calls >= self._max_calls:
            raise BudgetSpent(f"Today's {self._max_calls} calls are used up.")

    def take(self, owner: str = "") -> int:
        """Count a call that is about to be made; returns its day. Raises BudgetSpent instead."""
        self.check(owner)
        self._num_calls += 1
        return self._day

    def give_back(self, day: int) -> None:
        self._num_calls -= day == self._day and self._num_calls > 0

    def pay(self, link: LinkCost, owner: str = "", told: LinkCost | None = None) -> None:
        """Note the price of a request, which comes into the sum of the day soon, if nobody settles before. `told` is
        what its owner may know of it, if not all."""
        self.spent[owner] = self.spent.get(owner, LinkCost()) + (told or link)
        if self.prices is None or not (cost := self.prices.of(link)):
            return
        self._begin_day()
        self._unsettled = _plus(self._unsettled, {owner: cost})
        if self.day_sum is not None and (self._soon is None or self._soon.done()):
            self._soon = asyncio.ensure_future(self._settle_soon(self.day_sum))

    async def settle(self, owner: str = "") -> None:
        """Where costs have a limit, bring them into the sum of the day, and learn it. Raises BudgetSpent if it cannot
        be kept. Without a limit no text waits for the sum."""
        if self.day_sum is None or (self._max_cost is None and self._max_cost_of(owner) is None):
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
            today = self._begin_day()
            costs, self._unsettled = self._unsettled, {}
            self._settled = _plus(self._settled, costs)
            try:
                self._day, self._settled = await _in_thread(lambda: day_sum.add(today, costs))
                self._error = None
            except OSError as error:
                self._settled, self._error = _plus(self._settled, costs, -1), error
                self._unsettled = _plus(self._unsettled, costs)

    def _begin_day(self) -> int:
        """Today by the clock. One that stepped back or was ahead is treated as in `DaySum.add`."""
        if (today := int(time.time() // 86400)) > self._day:
            self._num_calls, self._settled, self._unsettled = 0, {}, {}
        self._day = max(min(self._day, today + 1), today)
        return today


def _plus(costs: Mapping[str, float], more: Mapping[str, float], sign: int = 1) -> dict[str, float]:
    return {owner: costs.get(owner, 0.0) + sign * more.get(owner, 0.0) for owner in {**costs, **more}}


async def _in_thread(work: Callable[[], T]) -> T:
    """The result of work that may wait; it is done here when the interpreter ends and has no threads left."""
    try:
        working = asyncio.get_running_loop().run_in_executor(None, work)
    except RuntimeError:
        return work()
    return await working
