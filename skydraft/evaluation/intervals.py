"""Figures with intervals: a paired bootstrap over prompts, and Wilson's interval of a share."""

from __future__ import annotations

import math

import numpy as np

from skydraft.evaluation.findings import Floats
from skydraft.evaluation.records import Line

NUM_RESAMPLES = 2000
LEVEL = 0.95
_Z = 1.959964  # of LEVEL


class Figure(Line):
    """A value with its interval."""

    value: float
    low: float
    high: float

    def cell(self, digits: int) -> tuple[str, str]:
        """The value and the interval for a table; "" if the interval has no width."""
        value, low, high = (f"{number:.{digits}f}" for number in (self.value, self.low, self.high))
        return value, "" if value == low == high else f"{low} to {high}"

    def shown(self, digits: int) -> str:
        """The value, and the interval in brackets if there is one."""
        value, interval = self.cell(digits)
        return f"{value} ({interval})" if interval else value


class Resamples:
    """Draws of prompts with replacement, the same for every figure and mode, so that differences are paired."""

    def __init__(self, num_prompts: int, seed: int = 0) -> None:
        draws = np.random.default_rng(seed).integers(num_prompts, size=(NUM_RESAMPLES, num_prompts))
        # [NUM_RESAMPLES, num_prompts]: number of draws of each prompt
        self._weights: Floats = np.stack([np.bincount(draw, minlength=num_prompts) for draw in draws]).astype(float)

    def ratio(self, parts: Floats, wholes: Floats) -> tuple[float, float] | None:
        """Interval of sum(parts) / sum(wholes), both [num_prompts]; None if the divisor is 0."""
        above, below = self._weights @ parts, self._weights @ wholes
        return _interval(above[below > 0] / below[below > 0])

    def means(self, values: Floats) -> Floats:
        """The mean of values [num_prompts] in each draw, [NUM_RESAMPLES]."""
        return self._weights @ values / len(values)

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
    return interval(values) if len(values) else None


def interval(values: Floats) -> tuple[float, float]:
    """The interval that holds LEVEL of the values."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def with_interval(value: float, interval: tuple[float, float]) -> Figure:
    """A value and its interval, rounded for the file."""
    return Figure(value=rounded(value), low=rounded(interval[0]), high=rounded(interval[1]))


def share(values: Floats) -> Figure:
    """The mean of values from 0 to 1, with Wilson's interval, which has a width for none and for all, too."""
    n, mean = len(values), float(values.mean())
    middle, spread = mean + _Z**2 / (2 * n), _Z * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    return with_interval(mean, ((middle - spread) / (1 + _Z**2 / n), (middle + spread) / (1 + _Z**2 / n)))


def rounded(value: float) -> float:
    """Five digits, for the file."""
    return round(float(value), 5) + 0.0  # no -0.0
