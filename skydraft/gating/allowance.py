"""How much risk a block may have without a check, so that a text keeps the agreement that is asked for."""

import math
from collections.abc import Sequence

from skydraft.gating.calibration import Calibration
from skydraft.types import Signals

_PACE = 0.5  # NOTES.md, "Gates"
_WIDTH = 20.0  # the limit is at most so many times that of the calibration, and at least the same part of it


class Allowance:
    """The limit on the risk of a block that stays unchecked: at first the calibration's, then it follows the text.

    A limit that is right on average is too loose for texts with many small risks and too strict for others. So it
    falls as more disagreements are expected in what was skipped than `agreement` allows, and rises otherwise, by
    exp(0.5 · (allowed − expected)) after each round, as step sizes do in dual ascent.
    """

    def __init__(self, calibration: Calibration, agreement: float, limit: float) -> None:
        self._calibration, self._agreement = calibration, agreement
        self._limit, self._lowest, self._highest = limit, limit / _WIDTH, limit * _WIDTH

    def is_unsure(self, signals: Sequence[Signals]) -> bool:
        return self._calibration.risk(signals) > self._limit

    def observe(self, num_committed: int, unchecked: Sequence[Signals]) -> None:
        """Take in how many tokens a round committed, and the signals of those that nobody checked."""
        allowed, expected = (1 - self._agreement) * num_committed, self._calibration.risk(unchecked)
        self._limit *= math.exp(_PACE * (allowed - expected))
        self._limit = min(max(self._limit, self._lowest), self._highest)
