import time

from skydraft.decoding.accounts.prices import Prices
from skydraft.errors import BudgetSpent, OptionError
from skydraft.types import LinkCost


class Budget:
    """The limits on a process's requests to servers in one day (UTC). Used on the event loop only.

    After `max_calls` calls, or once `cost` reaches `max_cost` at `prices`, texts go on without the servers. `cost` is
    today's; `spent` is the cost of all texts, as clients may see it. Raises OptionError.
    """

    def __init__(
        self, prices: Prices | None = None, max_cost: float | None = None, max_calls: int | None = None
    ) -> None:
        if max_cost is not None and (prices is None or not max_cost > 0):
            raise OptionError("--max-cost must be above 0, and needs --price HIT,MISS,OUT.")
        if max_calls is not None and not max_calls >= 1:  # this form rejects NaN, too
            raise OptionError(f"--max-calls must be 1 or more, not {max_calls}.")
        self.prices, self._max_cost, self._max_calls = prices, max_cost, max_calls
        self.spent, self.cost = LinkCost(), 0.0
        self._day, self._num_calls, self.bounds_calls = 0, 0, max_calls is not None

    def check(self) -> None:
        """Raise BudgetSpent if today's budget is used up."""
        self._begin_day()
        if self._max_cost is not None and self.cost >= self._max_cost:
            raise BudgetSpent(f"Today's requests have cost {self.cost:.4g}, and --max-cost is {self._max_cost:g}.")
        if self._max_calls is not None and self._num_calls >= self._max_calls:
            raise BudgetSpent(f"Today's {self._max_calls} calls are used up.")

    def take(self) -> int:
        """Count a call and return its day. Raises BudgetSpent instead."""
        self.check()
        self._num_calls += 1
        return self._day

    def give_back(self, day: int) -> None:
        """Uncount a call of that day that was not made."""
        self._num_calls -= day == self._day

    def pay(self, link: LinkCost, told: LinkCost | None = None) -> None:
        """Note a request's cost. `told` is the part that clients may see, by default all."""
        self._begin_day()
        self.spent += told or link
        self.cost += self.prices.of(link) if self.prices else 0.0

    def _begin_day(self) -> None:
        if (today := int(time.time() // 86400)) > self._day:  # a clock that steps back starts no new day
            self._day, self._num_calls, self.cost = today, 0, 0.0
