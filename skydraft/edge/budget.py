"""What servers may be asked in one day."""

from __future__ import annotations

import time

from skydraft.decoding.prices import Prices
from skydraft.errors import BudgetSpent, OptionError
from skydraft.types import LinkCost


class Budget:
    """The calls of one process in one day (UTC), and what all requests cost. Used on the event loop only.

    Texts go on without the server after `max_calls` calls, or once the requests have cost `max_cost` by `prices`.
    Raises OptionError.
    """

    def __init__(
        self, prices: Prices | None = None, max_cost: float | None = None, max_calls: int | None = None
    ) -> None:
        if max_cost is not None and (prices is None or not max_cost > 0):
            raise OptionError("--max-cost must be above 0, and needs --price HIT,MISS,OUT.")
        if max_calls is not None and not max_calls >= 1:  # NaN is no number of calls
            raise OptionError(f"--max-calls must be 1 or more, not {max_calls}.")
        self.prices = prices
        self._max_cost, self._max_calls = max_cost, max_calls
        self._day, self._cost, self._num_calls = 0, 0.0, 0

    def check(self) -> None:
        """Raise BudgetSpent if nothing more may be asked today."""
        self._begin_day()
        if self._max_cost is not None and self._cost >= self._max_cost:
            raise BudgetSpent(f"the requests of today cost {self._cost:.4g}, and may cost {self._max_cost:g}.")
        if self._max_calls is not None and self._num_calls >= self._max_calls:
            raise BudgetSpent(f"today's {self._max_calls} calls are used up.")

    def take(self) -> None:
        """Count a call that is about to be made. Raises BudgetSpent instead if it may not be made."""
        self.check()
        self._num_calls += 1

    def give_back(self) -> None:
        """Take back a call that could not be sent."""
        self._num_calls = max(self._num_calls - 1, 0)

    def pay(self, link: LinkCost) -> None:
        """Note the price of a request."""
        self._begin_day()
        self._cost += self.prices.of(link) if self.prices else 0.0

    def _begin_day(self) -> None:
        if (today := int(time.time() // 86400)) != self._day:
            self._day, self._cost, self._num_calls = today, 0.0, 0
