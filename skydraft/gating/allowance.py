"""The risk that a block may have without a check, so that a text keeps the requested agreement."""

import math
from collections.abc import Sequence

from skydraft.gating.calibration import Calibration
from skydraft.types import Signals

_PACE = 0.5  # NOTES.md, "Gates"
_MOST = 3.0  # times the calibration's limit, so that a long sure stretch does not leave a hard part unchecked


class Allowance:
    """The limit on the risk of an unchecked block: at first the calibration's, then adapted to the text.

    A limit that is right on average is too loose for texts with many small risks, and too strict for others. So it
    falls while skipped tokens promise more disagreements than `agreement` allows, and rises otherwise.
    """

    def __init__(self, calibration: Calibration, agreement: float, limit: float) -> None:
        self._calibration, self._agreement = calibration, agreement
        self._limit, self._highest = limit, limit * _MOST

    def is_unsure(self, signals: Sequence[Signals]) -> bool:
        return self._calibration.risk(signals) > self._limit

    def observe(self, num_chosen: int, unchecked: Sequence[Signals]) -> None:
        """Record a round: the number of tokens that a model chose, and the signals of the unchecked ones."""
        allowed, expected = (1 - self._agreement) * num_chosen, self._calibration.risk(unchecked)
        growth = math.exp(min(_PACE * (allowed - expected), _MOST))  # keeps exp finite; more would exceed the bound
        self._limit = min(self._limit * growth, self._highest)
