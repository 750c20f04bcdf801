"""Figures with intervals: a paired bootstrap over prompts, and Wilson's interval of a share."""

import math
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator

from skydraft.files import Stored

Floats = npt.NDArray[np.float64]
Sides = tuple[Floats, Floats]  # numerator and denominator of each prompt, [num_prompts] each
NUM_RESAMPLES = 2000
LEVEL = 0.95
_Z = 1.959964  # normal quantile for LEVEL
Rounded = Annotated[float, AfterValidator(lambda value: round(float(value), 5) + 0.0)]  # for the file, and no -0.0


class Figure(Stored):
    value: Rounded
    low: Rounded
    high: Rounded


def cell(figure: Figure | float | None, digits: int, sign: str = "") -> tuple[str, str]:
    """Format value and interval for a table. Both are "" without a figure; the interval is "" if it has no width.
    `sign` "+" writes the sign of positive numbers too."""
    if not isinstance(figure, Figure):
        return "" if figure is None else f"{figure:.{digits}f}", ""
    value, low, high = (f"{number:{sign}.{digits}f}" for number in (figure.value, figure.low, figure.high))
    return value, "" if value == low == high else f"{low} to {high}"


class Resamples:
    """Draws of prompts with replacement, the same for every figure and mode, so that differences are paired. A figure
    is None if every draw divides by 0."""

    def __init__(self, num_prompts: int, seed: int = 0) -> None:
        draws = np.random.default_rng(seed).integers(num_prompts, size=(NUM_RESAMPLES, num_prompts))
        # [NUM_RESAMPLES, num_prompts]: number of draws of each prompt
        self._weights: Floats = np.stack([np.bincount(draw, minlength=num_prompts) for draw in draws]).astype(float)

    def means(self, values: Floats) -> Floats:
        """The mean of values [num_prompts] in each draw, [NUM_RESAMPLES]."""
        return self._weights @ values / len(values)

    def mean(self, values: Floats) -> Figure:
        return around(float(values.mean()), self.means(values))

    def figure(self, parts: Floats, wholes: Floats) -> Figure | None:
        """sum(parts) / sum(wholes)."""
        return self.compared(np.positive, (parts, wholes))

    def compared(self, how: np.ufunc, *sides: Sides) -> Figure | None:
        """Apply `how` to the ratios of `sides`: np.subtract gives their difference, np.divide their quotient."""
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = how(*(_ratios(self._weights @ above, self._weights @ below) for above, below in sides))
        found = drawn[np.isfinite(drawn)]
        totals = (_ratios(above.sum(), below.sum()) for above, below in sides)
        return around(how(*totals), found) if len(found) else None


def _ratios(above: Floats, below: Floats) -> Floats:
    """Divide; the result is NaN where `below` is 0."""
    return above / np.where(below > 0, below, np.nan)


def around(value: float, drawn: Floats) -> Figure:
    """Return a value with the interval of its draws."""
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Figure(value=value, low=low, high=high)


def share(values: Floats) -> Figure:
    """Return the mean of values from 0 to 1, with Wilson's interval, which has a width even at 0 and 1."""
    n, mean = len(values), float(values.mean())
    middle, spread = mean + _Z**2 / (2 * n), _Z * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    return Figure(value=mean, low=(middle - spread) / (1 + _Z**2 / n), high=(middle + spread) / (1 + _Z**2 / n))
