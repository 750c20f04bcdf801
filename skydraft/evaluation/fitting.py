"""Fitting a calibration: from texts of both models to the chance of disagreement, and from that to limits.

A prompt is told twice, along what the target alone writes and along what the draft model alone writes. At each
position the draft model's signals and choice meet the target's choice: that is the truth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from skydraft.decoding.calibration import (
    FEATURES,
    MAX_BLOCK,
    Calibration,
    Curve,
    CurvePoint,
    Fitted,
    PairSide,
    features,
)
from skydraft.errors import MissingDependency, PromptError
from skydraft.evaluation.records import ScoreLine
from skydraft.types import Signals

Floats = npt.NDArray[np.float64]

_MIN_TOKENS = 200  # below, a logistic fit of four weights says little
_LIMITS = (0.0, *np.geomspace(0.005, 20.0, 80).tolist())
_KS = (1, 2, 3, 4, 5, 6, 8, MAX_BLOCK, 16, 32)


_NO_LIMIT = CurvePoint(limit=0, agreement=1, calls_per_token=1)


@dataclass(frozen=True, slots=True)
class Told:
    """One text by positions: how sure the draft model was, and whether the target disagreed with its choice."""

    path: Literal["target", "draft"]
    signals: tuple[Signals, ...]
    disagrees: tuple[bool, ...]

    @property
    def agreement(self) -> float:
        """Share of positions where the draft model would have written what the target would."""
        return 1 - sum(self.disagrees) / len(self.disagrees)


def told(line: ScoreLine, path: Literal["target", "draft"]) -> Told:
    """A scored text as labelled positions."""
    signals = tuple(Signals(*found) for found in line.signals)
    disagrees = tuple(mine != theirs for mine, theirs in zip(line.drafted, line.choices, strict=True))
    return Told(path, signals, disagrees)


def table(texts: Iterable[Told]) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """(features [num_positions, len(FEATURES)], whether the target disagreed [num_positions])."""
    texts = list(texts)
    rows = [features(signals) for text in texts for signals in text.signals]
    return np.array(rows, np.float64), np.array([wrong for text in texts for wrong in text.disagrees], bool)


def sklearn_linear() -> Any:
    """scikit-learn's linear models. Raises MissingDependency."""
    try:
        from sklearn import linear_model
    except ImportError as error:
        raise MissingDependency(
            "Fitting a calibration needs scikit-learn, which is not installed.",
            hint="Run: pip install 'skydraft[report]'.",
        ) from error
    return linear_model


def fit_weights(texts: Sequence[Told]) -> tuple[tuple[float, ...], float]:
    """(weights, bias) on raw features, by logistic regression on standardised ones. Raises PromptError for too few."""
    rows, disagrees = table(texts)
    if len(rows) < _MIN_TOKENS or not 0 < disagrees.sum() < len(rows):
        raise PromptError(
            f"{len(rows)} tokens with {int(disagrees.sum())} disagreements are too little to calibrate by.",
            hint=f"Give more prompts: at least {_MIN_TOKENS} tokens, with some disagreements.",
        )
    mean, scale = rows.mean(0), np.maximum(rows.std(0), 1e-9)
    fitted = sklearn_linear().LogisticRegression(max_iter=5000).fit((rows - mean) / scale, disagrees)
    weights = fitted.coef_[0] / scale
    return tuple(float(w) for w in weights), float(fitted.intercept_[0] - weights @ mean)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy gives along a text: tokens, disagreements left in it, escalations, drafted tokens."""

    num_tokens: int
    num_wrong: int
    num_calls: int
    num_drafted: int = 0


def walk(
    risks: Sequence[float],
    disagrees: Sequence[bool],
    limit: float,
    max_block: int = MAX_BLOCK,
    *,
    adds: bool = True,
    ends: bool = True,
) -> Outcome:
    """Replay a gate along a text, a block ending where its risk passes the limit.

    The risk of a block is the sum over its tokens, as the calibrated gate has it; or, unless `adds`, the highest of
    them, which is a threshold on single tokens. Unless `ends`, blocks are drafted to their full length.

    Simulated: the text goes on as it was told, while in a real run it goes another way after a disagreement
    that was skipped. So the curve it gives is checked by real runs (`bench.gates`).
    """
    base = num_wrong = num_calls = num_drafted = 0
    while base < len(risks):
        total, length = (0.0 if adds else -math.inf), 0
        while length < max_block and base + length < len(risks) and (total <= limit or not ends):
            total = total + risks[base + length] if adds else max(total, risks[base + length])
            length += 1
        num_drafted += length
        wrong = [index for index in range(base, base + length) if disagrees[index]]
        if total > limit:
            num_calls += 1
            # the recovered token, or the bonus after a block that was right
            base = min(wrong[0] + 1 if wrong else base + length + 1, len(risks))
        else:
            num_wrong += len(wrong)
            base += length
    return Outcome(len(risks), num_wrong, num_calls, num_drafted)


def curve(texts: Sequence[Told], risk_of: Sequence[Sequence[float]], k: int) -> Curve:
    """Agreement and calls for a range of limits with blocks of up to `k`, over the texts along the target's path."""
    points = []
    lowest = 1.0
    for limit in _LIMITS:
        walked = [walk(risks, text.disagrees, limit, k) for text, risks in zip(texts, risk_of, strict=True)]
        num_tokens = sum(outcome.num_tokens for outcome in walked)
        lowest = min(lowest, 1 - sum(outcome.num_wrong for outcome in walked) / num_tokens)
        calls = sum(outcome.num_calls for outcome in walked) / num_tokens
        points.append(CurvePoint(limit=round(limit, 5), agreement=round(lowest, 5), calls_per_token=round(calls, 5)))
        if not calls:
            break
    return Curve(k=k, points=tuple(points))


def auroc(scores: Floats, disagrees: npt.NDArray[np.bool_]) -> float:
    """Chance that a disagreement scores higher than an agreement, ties counting half (Mann and Whitney's U)."""
    order = np.argsort(scores, kind="stable")
    _, starts, counts = np.unique(scores[order], return_index=True, return_counts=True)
    ranks = np.empty(len(scores))
    ranks[order] = np.repeat(starts + (counts + 1) / 2, counts)
    num_wrong = int(disagrees.sum())
    num_right = len(disagrees) - num_wrong
    if not num_wrong or not num_right:
        return float("nan")
    return float((ranks[disagrees].sum() - num_wrong * (num_wrong + 1) / 2) / (num_wrong * num_right))


def fit(
    texts: Sequence[Told], draft: PairSide, target: PairSide, *, workload: str, sha256: str, date: str,
    num_prompts: int, max_new_tokens: int,
) -> Calibration:  # fmt: skip
    """The calibration of a pair. Raises PromptError where there is too little to fit."""
    weights, bias = fit_weights(texts)
    rows, disagrees = table(texts)
    scores = rows @ np.array(weights) + bias
    ours = [text for text in texts if text.path == "target"]
    about = Fitted(
        workload=workload,
        sha256=sha256,
        num_prompts=num_prompts,
        num_tokens=len(rows),
        date=date,
        max_new_tokens=max_new_tokens,
        auroc=round(auroc(scores, disagrees), 4),
    )
    bare = Calibration(
        draft=draft,
        target=target,
        features=FEATURES,
        weights=tuple(round(weight, 5) for weight in weights),
        bias=round(bias, 5),
        curves=(Curve(k=1, points=(_NO_LIMIT, _NO_LIMIT)),),
        fitted=about,
    )
    risks = [[bare.risk(signals) for signals in text.signals] for text in ours]
    return bare.model_copy(update={"curves": tuple(curve(ours, risks, k) for k in _KS)})
