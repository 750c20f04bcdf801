"""Intervals: paired, and none where there is nothing to divide by; tests/cli/test_report.py counts them again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.evaluation.intervals import Floats, Resamples

from ..toys import law

Side = tuple[Floats, Floats]


def figures(seed: int, num_prompts: int) -> Side:
    rng = np.random.default_rng(seed)
    return rng.uniform(0, 10, num_prompts), rng.uniform(1, 20, num_prompts)


sizes = st.integers(1, 40)
seeds = st.integers(0, 10_000)


@law(20)
@given(seeds, sizes, st.just(1.0) | st.floats(0.5, 3))
def test_pairs_are_drawn_together(seed: int, size: int, factor: float) -> None:
    parts, wholes = figures(seed, size)
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
