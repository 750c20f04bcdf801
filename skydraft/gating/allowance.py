"""How much risk a block may have without a check, so that a text keeps the agreement that is asked for."""

import math
from collections.abc import Sequence

from skydraft.gating.calibration import Calibration
from skydraft.types import Signals

_PACE = 0.5  # NOTES.md, "Gates"
_MOST = 3.0  # times the calibration's limit: what a long sure stretch saves up is not spent on the hard part after it


class Allowance:
    """The limit on the risk of a block that stays unchecked: at first the calibration's, then it follows the text.

    A limit that is right on average is too loose for texts with many small risks and too strict for others. So it
    falls while more disagreements are expected in what was skipped than `agreement` allows, and rises otherwise.
    """

    def __init__(self, calibration: Calibration, agreement: float, limit: float) -> None:
        self._calibration, self._agreement = calibration, agreement
        self._limit, self._highest = limit, limit * _MOST

    def is_unsure(self, signals: Sequence[Signals]) -> bool:
        return self._calibration.risk(signals) > self._limit

    def observe(self, num_chosen: int, unchecked: Sequence[Signals]) -> None:
        """Take in a round: how many tokens a model chose, and the signals of those that nobody checked."""
        allowed, expected = (1 - self._agreement) * num_chosen, self._calibration.risk(unchecked)
        growth = math.exp(min(_PACE * (allowed - expected), _MOST))  # beyond that it is at the bound; and exp is finite
        self._limit = min(self._limit * growth, self._highest)
