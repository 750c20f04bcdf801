"""Whether the draft model got better: paired over prompts, with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NUM_RESAMPLES, _LEVEL = 2000, 0.95
Counts = Sequence[tuple[int, int]]  # of each lesson: (right, known)


@dataclass(frozen=True, slots=True)
class Gain:
    """α before and after over the same tokens, and the interval of the difference.

    Tokens that are known to be wrong, while the right ones are not known, count as wrong both times.
    """

    before: float
    after: float
    low: float
    high: float
    num_tokens: int

    @property
    def difference(self) -> float:
        """After less before."""
        return self.after - self.before

    def __str__(self) -> str:
        change = f"{self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"
        return f"{self.before:.3f} → {self.after:.3f} ({change}, {self.num_tokens} tokens)"


def alpha(counts: Counts) -> float:
    """How often the model said what the target would have said."""
    right, known = np.sum(counts, axis=0)
    return float(right / known)


def gain(before: Counts, after: Counts, prompts: Sequence[object]) -> Gain:
    """The gain over lessons that answer `prompts`; its interval is for other prompts of the kind (paired bootstrap)."""
    groups = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    sums = np.zeros((len(groups), 3))  # right before, right after, known
    for prompt, (old, known), (new, _) in zip(prompts, before, after, strict=True):
        sums[groups[prompt]] += (old, new, known)
    draws = np.random.default_rng(0).integers(len(groups), size=(_NUM_RESAMPLES, len(groups)))
    drawn = sums[draws].sum(1)  # [num_resamples, 3]
    differences = (drawn[:, 1] - drawn[:, 0]) / np.maximum(drawn[:, 2], 1)
    low, high = np.quantile(differences, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Gain(alpha(before), alpha(after), float(low), float(high), int(sums[:, 2].sum()))
