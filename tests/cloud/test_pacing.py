"""A token's rows a second bound what is computed for it, not only what is sent."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from skydraft.cloud.access import RowBudget
from skydraft.cloud.jobs import GenerateJob
from skydraft.protocol.values import Opening, SessionCall
from skydraft.types import Prompt

from .. import toys
from .worker_by_hand import ENDLESS, FINGERPRINT, Desk, Watched

CALL = SessionCall(1, 1, Opening(FINGERPRINT, Prompt((0, 3)), params=ENDLESS))


def desk_of(rate: float) -> tuple[Desk, Any]:
    """A worker, and jobs that stream under one budget."""
    desk = Desk(toys.toy(1, kind=Watched))  # type: ignore[arg-type]
    budget = RowBudget(rate, desk.clock)
    return desk, lambda *call: GenerateJob(*call, charge=partial(budget.charge, call[1]))


@pytest.mark.parametrize("rate", [20.0, 50.0])
def test_a_stream_computes_no_more_rows_than_its_rate_and_a_burst(rate: float) -> None:
    desk, kind = desk_of(rate)
    desk.ask(CALL, kind=kind)
    began = desk.clock()
    for _ in range(1500):
        desk.step()
        desk.clock.now += 0.005
        num_rows = sum(len(tokens) for batch in desk.engine.batches for _, tokens in batch)
        burst = max(2 * rate, 64)
        assert num_rows <= burst + rate * (desk.clock.now - began) + 2
    assert num_rows > burst + rate * (desk.clock.now - began) / 2  # slowed down, not stopped


def test_a_stream_that_is_slowed_down_holds_up_nobody_else() -> None:
    desk, kind = desk_of(1.0)
    desk.ask(CALL, kind=kind)
    other = desk.ask(SessionCall(2, 1, CALL.opening), "bob", lambda *call: GenerateJob(*call))  # type: ignore[arg-type]
    desk.step(200)
    assert len(other.answers) > 150


def test_a_streams_cancelled_work_was_charged() -> None:
    desk, kind = desk_of(50.0)
    for number in range(1, 9):  # each begins anew, hoping for a bucket of its own
        asked = desk.ask(SessionCall(number, 1, CALL.opening), kind=kind)
        desk.step(60)
        desk.worker.cancel(asked.job)
    num_rows = sum(len(tokens) for batch in desk.engine.batches for _, tokens in batch)
    assert num_rows <= 100 + 50 * (desk.clock.now - 100) + 2 * 8
