"""How sure the draft model is: entropy, margin and top probability of its raw logits at temperature 1."""

from __future__ import annotations

import math
from typing import Any

from skydraft.engines.rows import at_least_float32, namespace_of
from skydraft.types import Signals

CERTAIN = Signals(entropy=0.0, margin=1.0, top_prob=1.0)  # of a token that had no rival
_NO_WEIGHT = -200.0  # exp of it is 0 in float32


def measure(row: Any) -> Signals:
    """Signals of one row of raw logits [vocab], numpy or torch, unchanged. Entropy in nats, in float32 at least."""
    row = at_least_float32(row)
    xp = namespace_of(row)
    best = int(row.argmax())
    # Where the model rules a token out by -inf, any weight that rounds to nothing will do.
    shifted = xp.clip(row - row[best], min=_NO_WEIGHT)
    weights = xp.exp(shifted)
    total = float(weights.sum())
    entropy = math.log(total) - float(weights @ shifted) / total
    weights[best] = 0
    second = float(weights.max())
    return Signals(max(entropy, 0.0), (1.0 - second) / total, 1.0 / total)
