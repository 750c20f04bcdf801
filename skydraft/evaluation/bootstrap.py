"""Paired bootstrap: how far a figure could be off had other prompts of the kind been asked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 2000
LEVEL = 0.95

Floats = npt.NDArray[np.float64]


class Resamples:
    """The same draws of prompts, with replacement, for every figure and mode: so differences are paired."""

    def __init__(self, num_prompts: int, seed: int = 0) -> None:
        draws = np.random.default_rng(seed).integers(num_prompts, size=(NUM_RESAMPLES, num_prompts))
        # [NUM_RESAMPLES, num_prompts]: how often each prompt was drawn
        self._weights: Floats = np.stack([np.bincount(draw, minlength=num_prompts) for draw in draws]).astype(float)

    def ratio(self, parts: Floats, wholes: Floats) -> tuple[float, float] | None:
        """Interval of sum(parts) / sum(wholes), both [num_prompts]; None where there is nothing to divide by."""
        above, below = self._weights @ parts, self._weights @ wholes
        return _interval(above[below > 0] / below[below > 0])

    def ratio_of_ratios(self, a: tuple[Floats, Floats], b: tuple[Floats, Floats]) -> tuple[float, float] | None:
        """Interval of (sum a0 / sum a1) / (sum b0 / sum b1)."""
        sums = [self._weights @ values for values in (*a, *b)]
        above, below = sums[0] * sums[3], sums[1] * sums[2]
        fine = (below > 0) & (sums[3] > 0)
        return _interval(above[fine] / below[fine])

    def difference(self, a: tuple[Floats, Floats], b: tuple[Floats, Floats]) -> tuple[float, float] | None:
        """Interval of sum a0 / sum a1 - sum b0 / sum b1."""
        sums = [self._weights @ values for values in (*a, *b)]
        fine = (sums[1] > 0) & (sums[3] > 0)
        return _interval((sums[0] / np.where(fine, sums[1], 1) - sums[2] / np.where(fine, sums[3], 1))[fine])


def _interval(values: Floats) -> tuple[float, float] | None:
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
