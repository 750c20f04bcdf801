"""Figures of records made by hand; intervals are paired, and none where there is nothing to divide by."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.evaluation.findings import Findings
from skydraft.evaluation.intervals import Resamples
from skydraft.evaluation.measures import MEASURES
from skydraft.evaluation.records import Records
from skydraft.evaluation.summary import summarize
from skydraft.types import Cost, LinkCost

from ..toys import law
from . import lines


@law(20)
@given(st.integers(0, 10_000), st.integers(1, 40), st.just(1.0) | st.floats(0.5, 3))
def test_pairs_are_drawn_together(seed: int, size: int, factor: float) -> None:
    parts, wholes = np.random.default_rng(seed).uniform(1, 20, (2, size))
    faster = (factor * parts, wholes)
    resamples = Resamples(size)
    # Whatever is drawn, the one is `factor` times the other; unpaired draws would spread.
    assert resamples.ratio_of_ratios(faster, (parts, wholes)) == pytest.approx((factor, factor))


def test_nothing_to_divide_by_is_no_interval_and_draws_without_the_one_prompt_that_counts_are_left_out() -> None:
    zeros, ones = np.zeros(4), np.ones(4)
    resamples = Resamples(4)
    assert resamples.ratio(ones, zeros) is None
    for a, b in (((ones, zeros), (ones, ones)), ((ones, ones), (zeros, ones)), ((ones, ones), (ones, zeros))):
        assert resamples.ratio_of_ratios(a, b) is None
    parts, wholes = np.array([2.0, 0, 0, 0]), np.array([4.0, 0, 0, 0])
    assert resamples.ratio(parts, wholes) == (0.5, 0.5)


def test_every_figure_of_a_text_is_what_its_rounds_say() -> None:
    ids, cost, nothing = (5, 1, 2, 1, 2, 7), Cost(2, 2, forward_ms=3.0), Cost()
    skipped = lines.record(outcome="skipped", num_draft=2, num_accepted=0, num_committed=2, target=nothing, wall_ms=4.0)
    checked = lines.record(num_audited=2, num_agreed=1, link=LinkCost(6.0, 40, 10), draft=cost, ended_ms=25.0)
    written = lines.record(outcome="written", num_draft=0, num_accepted=0, num_committed=1, draft=nothing, wall_ms=7.0,
                           target=Cost(1, 1, forward_ms=4.0), ended_ms=30.0)  # fmt: skip
    rounds = tuple(
        lines.round_line(record=each, draft_ids=(1,) * each.num_draft, signals=())
        for each in (skipped, checked, written)
    )
    of = {"origins": ("edge",) * 6, "pieces": ("a",) * 6, "rounds": rounds}
    made = lines.generation(mode="quality", token_ids=ids, wall_ms=20.0, **of)
    cloud = lines.generation(mode="cloud", token_ids=(5, 1, 2, 1, 2, 8), wall_ms=60.0, **of)
    score = lines.score(
        token_ids=ids, choices=(5, 1, 2, 1, 2, 8), choice_pieces=("a",) * 6, nll=(0.5,) * 6, signals=((0.5,) * 3,) * 6,
        drafted=ids,
    )  # fmt: skip
    run = lines.run_line(modes=lines.modes("cloud,quality"))
    theirs, ours = summarize(Findings(Records(run=run, generations=(cloud, made), scores=(score,)))).settings
    expected = {
        "target_agreement": 5 / 6,
        "target_nll": 0.5,
        "same_as_cloud": 0,
        "cloud_calls_per_token": 1 / 6,
        "target_written_per_token": 2 / 6,
        "target_passes_per_token": 2 / 6,
        "target_rows_per_token": 5 / 6,
        "acceptance_rate": 2 / 3,
        "mean_acceptance_length": 3,
        "audited_agreement": 1 / 2,
        "tokens_per_s": 300,
        "ttft_ms": 12,
        "itl_ms": 18 / 4,
        "draft_ms_per_token": 1,
        "target_ms_per_token": 9 / 6,
        "overhead_ms_per_round": (1 + 1 + 3) / 3,
        "bytes_per_token": 50 / 6,
        "cycles": 1,
    }
    assert {name: ours.value(name) for name in expected} == pytest.approx(expected, abs=1e-5)
    assert {measure.name for measure in MEASURES} - expected.keys() == {"task_score"}
    assert ours.speed_over["cloud"].value == pytest.approx(3) and theirs.value("same_as_cloud") == 1
    assert (ours.num_prompts, ours.num_generations, ours.num_tokens) == (1, 1, 6)
