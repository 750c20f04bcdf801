"""Threads while other programs keep the cores: an engine goes on with one, and returns to all of them."""

from __future__ import annotations

import pytest

from skydraft.engines import pace as pace_module
from skydraft.engines.pace import Pace

USUAL_MS, ALL = 40.0, 4


class Machine:
    """What a pace is told by a machine, and the lines that it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_busy = False
        self.said: list[str] = []
        monkeypatch.setattr(pace_module, "is_busy", lambda: self.is_busy)
        self.pace = Pace(USUAL_MS, ALL, self.said.append)

    def run(self, step_ms: float, num: int) -> list[int]:
        """The numbers of threads after each of `num` steps; one that changed is told as a change."""
        seen = []
        for _ in range(num):
            before = self.pace.num_threads
            assert self.pace.observe(step_ms) == (self.pace.num_threads != before)
            seen.append(self.pace.num_threads)
        return seen


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("step_ms", [1.0, USUAL_MS, 3.9 * USUAL_MS])
def test_a_machine_that_is_hardly_slower_keeps_all_threads(machine: Machine, step_ms: float) -> None:
    assert set(machine.run(step_ms, 300)) == {ALL}
    assert not machine.said


def test_one_slow_step_or_two_are_nothing(machine: Machine) -> None:
    for _ in range(20):
        machine.run(USUAL_MS, 3)
        assert machine.run(50 * USUAL_MS, 2) == [ALL, ALL]


def test_slow_steps_lead_to_one_thread_and_a_line_that_says_it_once(machine: Machine) -> None:
    machine.is_busy = True
    machine.run(USUAL_MS, 10)
    assert 1 in machine.run(1500.0, 5)
    assert set(machine.run(200.0, 1000)) == {1}, "the machine is as busy as before"
    machine.is_busy = False
    assert ALL in machine.run(150.0, 64), "it has cores to spare again"
    assert set(machine.run(USUAL_MS, 100)) == {ALL}
    machine.is_busy = True
    assert 1 in machine.run(1500.0, 5)
    [line] = machine.said
    assert "a step takes 1500 ms instead of 40 ms" in line


def test_one_thread_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(pace_module, "is_busy", lambda: False)
    alone = Pace(USUAL_MS, 1, said.append)
    assert not any(alone.observe(5000.0) for _ in range(300)) and not said
