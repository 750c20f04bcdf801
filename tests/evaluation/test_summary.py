"""Intervals: seeded, paired, around the figure, and none where there is nothing to divide by."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workload import difference
from skydraft.evaluation.intervals import LEVEL, NUM_RESAMPLES, Floats, Resamples

from ..toys import law

Side = tuple[Floats, Floats]


def figures(seed: int, num_prompts: int) -> Side:
    rng = np.random.default_rng(seed)
    return rng.uniform(0, 10, num_prompts), rng.uniform(1, 20, num_prompts)


sizes = st.integers(1, 40)
seeds = st.integers(0, 10_000)


@law(30)
@given(seeds, sizes)
def test_an_interval_lies_around_the_figure_and_within_what_single_prompts_gave(seed: int, size: int) -> None:
    parts, wholes = figures(seed, size)
    interval = Resamples(size).ratio(parts, wholes)
    assert interval is not None
    low, high = interval
    assert min(parts / wholes) - 1e-9 <= low <= high <= max(parts / wholes) + 1e-9
    if size >= 5:
        assert low < parts.sum() / wholes.sum() < high


@law(20)
@given(seeds, sizes, st.just(1.0) | st.floats(0.5, 3))
def test_pairs_are_drawn_together(seed: int, size: int, factor: float) -> None:
    parts, wholes = figures(seed, size)
    faster = (factor * parts, wholes)
    resamples = Resamples(size)
    # Whatever is drawn, the one is `factor` times the other; unpaired draws would spread.
    assert resamples.ratio_of_ratios(faster, (parts, wholes)) == pytest.approx((factor, factor))
    shifted = (parts + 0.25 * wholes, wholes)
    assert difference(resamples, shifted, (parts, wholes)) == pytest.approx((0.25, 0.25))


def test_the_interval_is_the_quantiles_of_resampled_ratios_of_sums() -> None:
    parts, wholes = figures(3, 12)
    rng = np.random.default_rng(5)
    ratios = [parts[draw].sum() / wholes[draw].sum() for draw in rng.integers(12, size=(20_000, 12))]
    expected = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    assert Resamples(12).ratio(parts, wholes) == pytest.approx(tuple(expected), abs=0.02)
    assert (NUM_RESAMPLES, LEVEL) == (2000, 0.95)


def test_nothing_to_divide_by_is_no_interval_and_draws_without_the_one_prompt_that_counts_are_left_out() -> None:
    zeros, ones = np.zeros(4), np.ones(4)
    resamples = Resamples(4)
    assert resamples.ratio(ones, zeros) is None
    for a, b in (((ones, zeros), (ones, ones)), ((ones, ones), (zeros, ones)), ((ones, ones), (ones, zeros))):
        assert resamples.ratio_of_ratios(a, b) is None
    parts, wholes = np.array([2.0, 0, 0, 0]), np.array([4.0, 0, 0, 0])
    assert resamples.ratio(parts, wholes) == (0.5, 0.5)
    assert difference(resamples, (parts, wholes), (ones, ones)) == (-0.5, -0.5)
