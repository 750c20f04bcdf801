"""Draft model and target at the same time: which drafts fit and are worth their rows, how long blocks are on one
processor, and that a target on a processor of its own waits for no draft.
"""

import itertools
import random
import time
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.config import DecodingParams
from skydraft.decoding.plan import make_plan
from skydraft.decoding.race.block_length import Blocks
from skydraft.decoding.race.branch import MAX_KEPT, Branch, Worth, num_fed
from skydraft.decoding.race.cost_model import CostModel
from skydraft.engines.toy import ToyEngine
from skydraft.types import Draft, DraftBlock, Outcome, Round, StepRecord

from .. import reference, toys
from ..serving import waiting
from ..toys import array, law
from . import test_laws as laws

TEXT = tuple(range(100, 160))
FREE = [1.0] * 100
IN_FOURS = [1.0, 1.9, 2.4, 1.45, 3.0, 3.0, 3.0, 2.84, *[4.0] * 8]


def branch_after(*drafts: Draft, written: int = 0) -> tuple[Branch, tuple[int, ...]]:
    branch = Branch(Worth())
    for draft in drafts:
        branch.take(draft, array(TEXT[:written]))
        branch.after(array(TEXT[:written]))
    return branch, branch.after(array(TEXT[:written]))


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


PARAMS = DecodingParams(max_new_tokens=64, min_new_tokens=64)
LONG = {"max_new_tokens": 400, "min_new_tokens": 400, "no_repeat_ngram_size": 4}  # nothing to copy


def slow(engine: ToyEngine, ms: float, *, on_gpu: bool = False) -> Any:
    """A toy whose forwards take `ms` of no processor."""
    engine.on_gpu = on_gpu
    return waiting(engine, lambda: time.sleep(ms / 1e3))


def run(edge: ToyEngine, cloud: ToyEngine, mode: str, params: DecodingParams = PARAMS) -> Any:
    return laws.decode(make_plan(mode), params, edge, cloud, prompt="ab")


@pytest.mark.parametrize(("drafts", "written", "left"), [
    pytest.param([Draft(1, 0, (100, 101, 7))], 0, (100, 101, 7), id="ahead"),
    pytest.param([Draft(1, 0, (100,)), Draft(0, 0, (101, 102))], 0, (100, 101, 102), id="continued"),
    pytest.param([Draft(1, 0, (100, 101, 102))], 2, (102,), id="partly late"),
    pytest.param([Draft(1, 0, (100, 7, 102))], 2, (), id="late and wrong"),
    pytest.param([Draft(1, 0, (100, 7)), Draft(0, 0, (102,))], 2, (), id="continues what was wrong"),
    pytest.param([Draft(1, 0, (100,)), Draft(0, 0, (101,))], 3, (), id="fell behind"),
    pytest.param([Draft(1, 0, (100,)), Draft(0, 0, (101, 102, 103))], 3, (103,), id="behind, and past the text"),
    pytest.param([Draft(1, 0, (100,)), Draft(0, 0, (7, 102, 103))], 3, (), id="behind and wrong"),
    pytest.param([Draft(1, 3, (103,))], 2, (), id="a gap"),
    pytest.param([Draft(1, 3, (103,)), Draft(0, 0, (104,))], 2, (), id="continues a gap"),
    pytest.param([Draft(2, 1, (7, 8)), Draft(1, 1, (101, 102))], 1, (7, 8), id="an older branch"),
    pytest.param([Draft(1, 1, (7, 8)), Draft(2, 1, (101, 102))], 1, (101, 102), id="a newer branch"),
    pytest.param([Draft(1, 1, (101,)), Draft(1, 1, (101, 102))], 1, (101, 102), id="said again"),
    pytest.param([Draft(1, 0, (7,)), Draft(1, 1, (101,))], 1, (), id="a dead branch begun again"),
    pytest.param([Draft(0, 0, (100,))], 0, (), id="continues nothing"),
    pytest.param([Draft(1, 0, (1,) * (MAX_KEPT + 1))], 0, (), id="too many"),
])  # fmt: skip
def test_drafts_that_fit(drafts: list[Draft], written: int, left: tuple[int, ...]) -> None:
    assert branch_after(*drafts, written=written)[1] == left


def test_too_many_drafts_after_enough_end_the_branch_and_a_new_one_begins() -> None:
    branch, _ = branch_after(Draft(1, 0, (1,) * MAX_KEPT), Draft(0, 0, (1,)))
    assert branch.after(array([])) == ()
    branch.take(Draft(2, 0, TEXT[:3]), array([]))
    assert branch.after(array(TEXT[:1])) == TEXT[1:3]


def test_worth_is_the_share_of_right_drafts_judged_or_late() -> None:
    branch, _ = branch_after(Draft(1, 0, TEXT[:40]))
    for written in (10, 11, 40):
        branch.after(array(TEXT[:written]))
    right = branch.worth.share
    branch.take(Draft(2, 40, (7, 8, 9)), array(TEXT[:40]))
    branch.after(array(TEXT[:50]))
    assert 0.9 < right < 1 and branch.worth.share < right  # one was wrong; nothing is known of those after it
    for number in range(3, 200):
        branch.take(Draft(number, 40, (7,)), array(TEXT[:40]))
        branch.after(array(TEXT[:41]))
    assert branch.worth.share < 0.06


@pytest.mark.parametrize(("own", "waiting", "max_rows", "ms", "may_delay", "counts"), [
    pytest.param(2, [(0.98, 9), (0.7, 0)], 16, IN_FOURS, False, [2, 0], id="beside a plain text"),
    pytest.param(4, [(0.98, 9), *[(0.7, 0)] * 3], 16, IN_FOURS, False, [0, 0, 0, 0], id="a plain text would wait"),
    pytest.param(1, [(0.7, 10)], 4, FREE, True, [3], id="the rows that are left"),
    pytest.param(3, [(0.9, 9)] * 3, 3, FREE, True, [0, 0, 0], id="no row is left"),
])  # fmt: skip
def test_drafts_get_rows_that_are_left_and_for_which_no_plain_text_waits(  # type: ignore[no-untyped-def]
    own, waiting, max_rows, ms, may_delay, counts
) -> None:
    assert num_fed(own, waiting, max_rows, lambda num: ms[num - 1], may_delay=may_delay) == counts


@law(100)
@given(
    st.integers(1, 8), st.lists(st.tuples(st.floats(0.05, 0.99), st.integers(0, 5)), min_size=1, max_size=3),
    st.lists(st.floats(0.5, 9), min_size=24, max_size=24),
)  # fmt: skip
def test_no_other_numbers_of_drafts_give_more_tokens_a_second(own, waiting, times) -> None:  # type: ignore[no-untyped-def]
    def speed(counts: tuple[int, ...]) -> float:
        rows = zip(waiting, counts, strict=True)
        gains = sum(worth**place for (worth, _), num in rows for place in range(1, num + 1))
        return (own + gains) / times[own + sum(counts) - 1]

    counts = tuple(num_fed(own, waiting, 16, lambda num: times[num - 1], may_delay=True))
    every = itertools.product(*(range(num + 1) for _, num in waiting))
    assert speed(counts) == pytest.approx(max(speed(each) for each in every if own + sum(each) <= 16))


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


@pytest.mark.parametrize(("drift", "least"), [(0.0, 2.0), (0.7, 1.1), (8.0, 0.9)])
def test_the_target_never_waits_for_a_draft_model_elsewhere(drift: float, least: float) -> None:
    edge, cloud = slow(toys.toy(4, drift), 5), slow(toys.toy(4), 20, on_gpu=True)
    stream, race = (run(edge, cloud, mode) for mode in ("cloud", "lossless"))
    assert race.token_ids == stream.token_ids
    assert stream.records[-1].ended_ms / race.records[-1].ended_ms >= least


@toys.law(40)
@given(toys.pairs(), toys.params(), st.floats(0, 2))
def test_the_text_is_the_targets(pair: tuple[ToyEngine, ToyEngine], params: DecodingParams, ms: float) -> None:
    edge, cloud = pair
    plain = run(edge, cloud, "cloud", params)
    race = run(slow(edge, ms), slow(cloud, ms, on_gpu=True), "lossless", params)
    assert (race.token_ids, race.finish_reason) == (plain.token_ids, plain.finish_reason)


class LateLearner(ToyEngine):
    """It knows nothing of the first 60 tokens of a text, and reads two rows a forward at most."""

    max_output_rows = 2

    def _row(self, cache: list[tuple[int, int]]) -> Any:
        row = super()._row(cache)
        return row if len(cache) > 60 else -row


def test_a_draft_model_that_gave_up_reads_along_and_begins_again() -> None:
    edge = slow(toys.toy(4, kind=LateLearner), 1)
    params = replace(PARAMS, **LONG | {"max_new_tokens": 200, "min_new_tokens": 200})
    race = run(edge, slow(toys.toy(4), 6, on_gpu=True), "lossless", params)
    late = [record for record in race.records if record.base > 120]
    assert sum(record.num_accepted for record in late) > len(late)


def test_a_draft_model_that_is_always_late_gives_up() -> None:
    race = run(slow(toys.toy(4), 20), slow(toys.toy(4), 3, on_gpu=True), "lossless", replace(PARAMS, **LONG))
    assert sum(record.draft.num_passes for record in race.records) < 45
