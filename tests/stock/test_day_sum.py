"""The sum of a day holds what came to the server, however a process ends and whatever becomes of clocks and locks."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from skydraft.decoding.prices import Prices
from skydraft.edge.budget import Budget, DaySum
from skydraft.errors import BudgetSpent
from skydraft.types import LinkCost


def test_a_clock_that_was_ahead_lets_no_more_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that had seen it took the sum of all others back to 0 with each request, as they did with its own."""
    days = [5000.5]
    monkeypatch.setattr(time, "time", lambda: days[0] * 86400)

    async def spend(budget: Budget) -> None:
        await budget.settle()
        budget.take()
        budget.pay(LinkCost(tokens_out=1))
        await budget.settle(is_known=True)

    async def all_days() -> None:
        budgets = [Budget(Prices(0, 0, 1e6), max_cost=5.0) for _ in range(2)]
        for budget in budgets:
            budget.day_sum = DaySum(tmp_path / "spent.json", "it")
        await spend(budgets[0])
        days[0] = 103.5
        for number in range(4):
            await spend(budgets[number % 2])
        for budget in budgets:
            with pytest.raises(BudgetSpent):
                await spend(budget)
        days[0] = 105.0
        for budget in budgets:
            await spend(budget)

    asyncio.run(all_days())
