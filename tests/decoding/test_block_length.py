"""Blocks of two models on one processor: they begin where they pay, and what they lose is bounded."""

import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.decoding.race.block_length import Blocks
from skydraft.decoding.race.cost_model import CostModel
from skydraft.types import DraftBlock, Outcome, Round, StepRecord

from .. import reference
from ..toys import law

FOURS = (100.0, 130.0, 130.0, 130.0, *[220.0] * 4, *[360.0] * 8)
READ_MS = 9.0


def speed(alpha: float, costs: CostModel, num_prompt: int = 30, num_tokens: int = 1000, seed: int = 1) -> float:
    """Times the speed of the target alone, where each draft is right with the chance `alpha`; simulated."""
    turns, rng = Blocks(costs, READ_MS, num_prompt), random.Random(seed)
    base, spent_ms, num_unread = 0, 0.0, num_prompt
    while base < num_tokens:
        if turns.reads:
            spent_ms, num_unread = spent_ms + num_unread * READ_MS, 0
            turns.read([rng.random() < alpha for _ in range(16)])
        k, accepted = turns.longest(), 0
        while accepted < k and rng.random() < alpha:
            accepted += 1
        spent_ms += k * costs.draft_ms + costs.verify_ms(alpha, k)
        num_unread += 0 if k else 1
        outcome: Outcome = "verified" if k else "written"
        record = StepRecord(0, base, k, accepted, accepted + 1, outcome, "always", 0.0, 0.0)
        turns.observe(Round(record, DraftBlock(base, (1,) * k), (1,) * (accepted + 1), ("cloud",) * (accepted + 1)))
        base += accepted + 1
    return base * costs.plain_ms / spent_ms


@pytest.mark.parametrize(("alpha", "draft_ms", "forward_ms", "least", "most"), [
    (0.95, 35.0, FOURS, 1.5, 2.2), (0.8, 35.0, FOURS, 1.15, 1.4), (0.6, 35.0, FOURS, 0.95, 1.01),
    (0.2, 35.0, FOURS, 0.95, 1.0), (0.95, 90.0, (100.0, 190.0, 280.0, 370.0), 1.0, 1.0),
])  # fmt: skip
def test_blocks_do_pay(alpha: float, draft_ms: float, forward_ms: tuple[float, ...], least: float, most: float) -> None:
    """Blocks pay or lose little."""
    speeds = [speed(alpha, CostModel(draft_ms, forward_ms, 16), seed=seed) for seed in range(20)]
    assert min(speeds) >= 0.94 and least <= mean(speeds) <= most


def test_a_short_text_after_a_long_prompt_never_waits_for_the_draft_model() -> None:
    assert speed(0.95, CostModel(35.0, FOURS, 16), num_prompt=4000, num_tokens=200) == 1.0


@law(100)
@given(
    st.floats(0.05, 0.98), st.floats(0.1, 90), st.lists(st.floats(10, 400), min_size=1, max_size=16),
    st.integers(1, 16),
)  # fmt: skip
def test_the_best_block_is_the_best(alpha: float, draft_ms: float, forward_ms: list[float], max_rows: int) -> None:
    costs = CostModel(draft_ms, tuple(forward_ms), max_rows)
    speeds = [reference.tokens_per_s(alpha, k, draft_ms, forward_ms, max_rows) for k in range(9)]
    k, gain = costs.best(alpha, 8)
    assert speeds[k] == pytest.approx(max(speeds)) and gain == pytest.approx(max(speeds) / speeds[0])
