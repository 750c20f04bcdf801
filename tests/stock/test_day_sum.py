"""The sum of a day holds what came to the server, however a process ends and whatever becomes of clocks and locks."""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

import skydraft
from skydraft.decoding.accounts.prices import Prices
from skydraft.edge.budget import Budget, DaySum
from skydraft.errors import BudgetSpent
from skydraft.types import LinkCost
from tests.hostile.texts import LENGTH, TARGET, TEXT, write
from tests.stock.fakes import Fake, fake
from tests.stock.front import Front


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    with fake("llama-server", TARGET, token_s=0.02) as server, Front(server.url) as front:
        yield front


def process(front: Front, does: str, how: str = "price='0,0,1e6', max_cost=1e9") -> subprocess.Popen[str]:
    begins = "import atexit, os, skydraft, sys, time\nfrom tests.hostile.texts import write\n"
    begins += f"cloud = skydraft.connect(sys.argv[1], {how})\n"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", begins + does, front.url]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def sum_in(home: Path) -> float:
    return sum(json.loads((home / "spent.json").read_text())["costs"].values())


def num_written(front: Front) -> int:
    return sum(post.num_written(TARGET.vocab.encode) for post in front.generating)


@pytest.mark.parametrize(("does", "least"), [
    ("write(cloud, 'cloud').run()", LENGTH),
    ("generation = write(cloud, 'cloud')\nnext(iter(generation))\ngeneration.close()", 1),
    ("text = write(cloud, 'cloud')\nnext(iter(text))\natexit.register(text.close)", 1),
], ids=["a whole text", "a text that was closed", "a text that is closed as the process ends"])  # fmt: skip
def test_a_process_that_closes_nothing_leaves_its_cost(front: Front, does: str, least: int, tmp_path: Path) -> None:
    """What was read is in it, and nothing is complained about."""
    with process(front, does) as ended:
        assert ended.communicate(timeout=30)[1] == ""
    assert sum_in(tmp_path) >= least


def test_a_process_that_is_killed_in_a_long_text_leaves_its_cost(front: Front, tmp_path: Path) -> None:
    """A moment of it may be missing."""
    with process(front, "write(cloud, 'cloud', length=1000).run()") as killed:
        Fake.wait_until(lambda: num_written(front) > 120)
        killed.kill()
        killed.communicate()
    assert sum_in(tmp_path) >= 40


def test_under_a_limit_what_a_killed_process_sent_is_in_the_sum(front: Front, tmp_path: Path) -> None:
    """It is noted before the first byte leaves."""
    front.fates += ["silent"] * 3
    with process(front, "write(cloud, 'cloud').run()", "price='0,1e6,0', max_cost=1e9") as killed:
        Fake.wait_until(lambda: bool(front.generating))
        killed.kill()
        killed.communicate()
    assert len(front.generating) == 1 and sum_in(tmp_path) == len(TARGET.vocab.encode(TEXT))


def test_a_day_is_capped_over_processes(front: Front) -> None:
    num_written = 0
    for number in range(4):  # each as a process that writes one text
        with closing(skydraft.connect(front.url, price="0,0,1", max_cost=50e-6)) as cloud:
            try:
                num_written += len(write(cloud, "cloud").run().token_ids)
            except BudgetSpent as error:
                assert number == 2 and "Today's requests have cost" in str(error)
                break
    assert num_written == 80
    with closing(skydraft.connect(f"{front.url}/v1/", price="0,0,1", max_cost=1e-3)) as cloud:
        assert write(cloud, "cloud").run().token_ids


NEW = -1  # a budget of a process that has just begun
# (day, which budget, what is spent, whether more may be asked then), one after the other; 5 is the limit.
DAYS: dict[str, list[tuple[float, int, int, bool]]] = {
    "it steps back": [(100.9, 0, 6, False), (99.5, 0, 1, False), (99.5, NEW, 1, False), (101.0, 0, 4, True),
                      (101.5, NEW, 1, False)],
    "it was far ahead": [(5000.0, NEW, 1, True), (103.0, NEW, 5, False), (105.0, NEW, 0, True)],
    "others had not seen it": [(5000.5, 0, 1, True), (103.5, 0, 1, True), (103.5, 1, 1, True), (103.5, 0, 1, True),
                               (103.5, 1, 1, False), (103.5, 0, 0, False), (105.0, 0, 1, True), (105.0, 1, 1, True)],
}  # fmt: skip


@pytest.mark.parametrize("clock", DAYS)
def test_a_clock_that_is_wrong_lets_no_more_out(clock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def budget() -> Budget:
        return Budget(Prices(0, 0, 1e6), max_cost=5.0, day_sum=DaySum(tmp_path / "spent.json", "it"))

    def may_ask_more(made: Budget, cost: int) -> bool:
        with suppress(BudgetSpent):
            made.take()
            made.pay(LinkCost(tokens_out=cost))
        try:
            made.check()
        except BudgetSpent:
            return False
        return True

    budgets = [budget(), budget()]
    for day, which, cost, may_ask in DAYS[clock]:
        monkeypatch.setattr(time, "time", lambda day=day: day * 86400.0)
        assert may_ask_more(budget() if which == NEW else budgets[which], cost) is may_ask, (day, which)


def test_what_is_noted_after_midnight_counts_for_the_new_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day = [100.9]
    monkeypatch.setattr(time, "time", lambda: day[0] * 86400)
    budget = Budget(Prices(0, 0, 1e6), max_cost=50.0, day_sum=DaySum(tmp_path / "spent.json", "it"))
    budget.settle()
    budget.pay(LinkCost(tokens_out=51))
    day[0] = 101.1
    with pytest.raises(BudgetSpent, match="have cost 51"):
        budget.take()
    assert sum_in(tmp_path) == 51


@pytest.mark.parametrize(("first", "then"), [(100.9, 101.1), (100.5, 99.5)])
def test_calls_of_a_day_are_no_more_with_any_clock(first: float, then: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of yesterday that did not go out leaves no more today, and a day that comes again has no more."""
    days, budget = [first], Budget(max_calls=1)
    monkeypatch.setattr(time, "time", lambda: days[0] * 86400)
    yesterday = budget.take()
    days[0] = then
    if then > first:
        budget.take()
        budget.give_back(yesterday)
    with pytest.raises(BudgetSpent):
        budget.take()


def test_many_processes_add_up(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: DaySum(tmp_path / "spent.json", "it").add(7, 0.25), range(80)))
    assert sum_in(tmp_path) == 20
    assert DaySum(tmp_path / "spent.json", "another").add(7, 1.0) == (7, 1.0)


@pytest.mark.parametrize("held", ["{", "[]", '{"day": 7, "costs": {"it": -1}}', '{"day": 7, "costs": {"it": NaN}}'])
def test_a_damaged_sum_begins_again(held: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "spent.json").write_text(held)
    assert DaySum(tmp_path / "spent.json", "it").add(7, 1.0) == (7, 1.0)
    assert "is damaged" in caplog.text and DaySum(tmp_path / "spent.json", "it").add(7, 1.0) == (7, 2.0)


def test_a_limit_without_a_sum_lets_nothing_out(front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "file"
    home.write_text("")
    monkeypatch.setenv("SKYDRAFT_HOME", str(home))
    with closing(skydraft.connect(front.url, price="1,1,1", max_cost=1)) as cloud:
        with pytest.raises(BudgetSpent, match="cannot be kept"):
            write(cloud, "cloud").run()
        assert not front.generating
    with closing(skydraft.connect(front.url, price="1,1,1")) as cloud:
        assert write(cloud, "cloud").run().receipt.cost


def test_a_sum_that_is_locked_ends_a_text_under_a_limit_and_no_other(front: Front, tmp_path: Path) -> None:
    with (tmp_path / "spent.json.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with closing(skydraft.connect(front.url, price="0,0,1e6")) as cloud:
            assert len(write(cloud, "cloud").run().token_ids) == LENGTH
        with closing(skydraft.connect(front.url, price="0,0,1e6", max_cost=1e9)) as cloud:
            with pytest.raises(BudgetSpent, match="cannot be kept"):
                write(cloud, "cloud").run()
            fcntl.flock(held, fcntl.LOCK_UN)
            assert len(write(cloud, "cloud").run().token_ids) == LENGTH
