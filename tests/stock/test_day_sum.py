"""The sum of a day holds what came to the server, however a process ends and whatever becomes of clocks and locks."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft.decoding.prices import Prices
from skydraft.edge.budget import Budget, DaySum
from skydraft.errors import BudgetSpent
from skydraft.types import LinkCost
from tests.hostile.texts import LENGTH, TARGET, write
from tests.stock.fakes import Fake, fake
from tests.stock.front import Front


@pytest.fixture
def front() -> Iterator[Front]:
    with fake("llama-server", TARGET, token_s=0.02) as server, Front(server.url) as front:
        yield front


def process(front: Front, home: Path, does: str) -> subprocess.Popen[str]:
    """Another process, in which a written token costs 1."""
    begins = (
        "import os, skydraft, sys, time\n"
        "from tests.hostile.texts import write\n"
        "cloud = skydraft.connect(sys.argv[1], price='0,0,1e6')\n"
    )
    env = os.environ | {"SKYDRAFT_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", begins + does, front.url]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def day_sum(home: Path) -> float:
    return sum(json.loads((home / "spent.json").read_text())["costs"].values())


def num_written(front: Front) -> int:
    return sum(post.num_written(TARGET.vocab.encode) for post in front.generating)


@pytest.mark.parametrize(
    ("does", "least"),
    [
        ("write(cloud, 'cloud').run()", LENGTH),
        ("tokens = iter(write(cloud, 'cloud'))\n[next(tokens) for _ in range(5)]", 5),
        ("generation = write(cloud, 'cloud')\nnext(iter(generation))\ngeneration.close()", 1),
    ],
    ids=["a whole text", "a text under way", "a text that was closed"],
)
def test_a_process_that_closes_nothing_leaves_its_cost(front: Front, does: str, least: int, tmp_path: Path) -> None:
    """What was read is in it, and nothing is complained about."""
    with process(front, tmp_path, does) as ended:
        assert ended.communicate(timeout=30)[1] == ""
    assert day_sum(tmp_path) >= least


def test_a_process_that_is_killed_in_a_long_text_leaves_its_cost(front: Front, tmp_path: Path) -> None:
    """A moment of it may be missing."""
    with process(front, tmp_path, "write(cloud, 'cloud', length=1000).run()") as killed:
        Fake.wait_until(lambda: num_written(front) > 120)
        killed.kill()
        killed.communicate()
    assert day_sum(tmp_path) >= 40


def test_a_clock_that_was_ahead_lets_no_more_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that had seen it took the sum of all others back to 0 with each request, as they did with its own."""
    days = [5000.5]
    monkeypatch.setattr(time, "time", lambda: days[0] * 86400)

    async def spend(budget: Budget) -> None:
        await budget.settle()
        budget.take()
        budget.pay(LinkCost(tokens_out=1))
        await budget.settle()

    async def all_days() -> None:
        day_sum = DaySum(tmp_path / "spent.json", "it")
        budgets = [Budget(Prices(0, 0, 1e6), max_cost=5.0, day_sum=day_sum) for _ in range(2)]
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


def test_a_call_of_yesterday_that_did_not_go_out_leaves_no_more_today(monkeypatch: pytest.MonkeyPatch) -> None:
    days, budget = [100.9], Budget(max_calls=1)
    monkeypatch.setattr(time, "time", lambda: days[0] * 86400)
    yesterday = budget.take()
    days[0] = 101.1
    budget.take()
    budget.give_back(yesterday)
    with pytest.raises(BudgetSpent):
        budget.take()


def test_a_sum_that_is_locked_costs_no_text_without_a_limit(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    monkeypatch.setattr("skydraft.edge.budget.LOCK_S", 1.0)
    tries = list[float]()

    def add(day_sum: DaySum, day: int, cost: float, add: Any = DaySum.add) -> Any:
        tries.append(cost)
        return add(day_sum, day, cost)

    monkeypatch.setattr(DaySum, "add", add)
    with (tmp_path / "spent.json.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with closing(skydraft.connect(front.url, price="0,0,1e6", timeout_s=5)) as cloud:
            texts = [write(cloud, plan).run() for plan in ("gated", "cloud")]
            assert all(len(text.token_ids) == LENGTH and text.receipt.calls for text in texts)
            assert len(tries) < sum(text.receipt.calls for text in texts)  # each call waited twice
            fcntl.flock(held, fcntl.LOCK_UN)
            Fake.wait_until(lambda: (tmp_path / "spent.json").exists())
    assert day_sum(tmp_path) >= num_written(front) and not caplog.records
