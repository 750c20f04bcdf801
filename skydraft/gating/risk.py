"""How likely the target is to disagree with a drafted token, where no limit is asked for: learned while it runs.

What decides how long a block gets (`decoding/block_length.py`) weighs this chance against time. It changes which tokens
are drafted, never what the text is.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from skydraft.types import Signals

_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.99)  # of the top probability
_PRIOR = 4.0  # judged tokens that the first guess counts for, in each bin
_MEMORY = 400.0  # judged tokens in a bin; older ones fade, since a text may change its kind


class Risk(Protocol):
    """The chance of a disagreement, and what is learned from verdicts."""

    def of(self, signals: Signals) -> float:
        """The chance that the target would write another token."""

    def observe(self, judged: Seq[Signals], num_accepted: int) -> None:
        """Take in the tokens of a verdict: the first `num_accepted` stood, and the one after them, if any, did not."""


class LearnedRisk:
    """From the top probability alone, in bins: a guess at first, then what verdicts said."""

    def __init__(self) -> None:
        middles = [(low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True)]
        self._num_judged = [_PRIOR] * len(middles)
        self._num_wrong = [_PRIOR * (1 - middle) * 0.8 for middle in middles]

    def of(self, signals: Signals) -> float:
        """The share of tokens as sure as this one that were wrong."""
        at = bisect(_EDGES, signals.top_prob)
        return self._num_wrong[at] / self._num_judged[at]

    def observe(self, judged: Seq[Signals], num_accepted: int) -> None:
        """Count each token in its bin."""
        for index, signals in enumerate(judged[: num_accepted + 1]):
            at = bisect(_EDGES, signals.top_prob)
            fading = min(1.0, _MEMORY / (self._num_judged[at] + 1))
            self._num_judged[at] = (self._num_judged[at] + 1) * fading
            self._num_wrong[at] = (self._num_wrong[at] + (index == num_accepted)) * fading


class CalibratedRisk:
    """From a calibration of the pair, multiplied by (4 + disagreements seen) / (4 + disagreements expected)."""

    def __init__(self, risk: Callable[[Signals], float]) -> None:
        self._risk = risk
        self._num_seen = self._num_expected = _PRIOR

    def of(self, signals: Signals) -> float:
        """The calibrated chance, corrected by how this text went so far."""
        return min(self._risk(signals) * self._num_seen / self._num_expected, 1.0)

    def observe(self, judged: Seq[Signals], num_accepted: int) -> None:
        """Compare what was expected of the judged tokens with what the verdict said of them."""
        tokens = judged[: num_accepted + 1]
        self._num_expected += sum(map(self._risk, tokens))
        self._num_seen += len(tokens) > num_accepted
