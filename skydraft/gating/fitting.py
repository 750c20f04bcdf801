"""Fits a calibration: from labelled texts to the chance of disagreement, and from that to limits.

A labelled text says for each token how sure the draft model was, and whether the target chose another token. Limits are
found with risks that were fitted on other prompts, as they will be used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from skydraft.errors import PromptError, importing
from skydraft.gating.calibration import MAX_BLOCK, Calibration, Curve, CurvePoint, Fitted, PairSide, features, risk
from skydraft.gating.hand_back import HandBack, parse_hand_back
from skydraft.types import Signals

Floats = npt.NDArray[np.float64]

_MIN_UNSEEN = 100  # tokens; below, an agreement of 0.95 is known to 0.02 at best
_MIN_TOKENS = 200  # below, a logistic fit of four weights says little
_NUM_FOLDS = 5
_LIMITS = (0.0, *np.geomspace(0.01, 20.0, 40).tolist())
_WRITES_ON = ("agree:2", "agree:4", "agree:6", "8", "text")
_NONE = HandBack()
_CURVES = (
    *((k, _NONE) for k in (1, 2, 3, 4, 5, 6, 8, MAX_BLOCK, 16, 32)),
    *((k, parse_hand_back(name)) for name in _WRITES_ON for k in (4, 6, 8, MAX_BLOCK)),
)


@dataclass(frozen=True, slots=True)
class LabelledText:
    """One text by positions: how sure the draft model was, and whether the target disagreed with its choice.

    `path` says which model wrote it, `prompt` names what it answers.
    """

    path: Literal["target", "draft"]
    signals: tuple[Signals, ...]
    disagrees: tuple[bool, ...]
    prompt: str = ""


def table(texts: Iterable[LabelledText]) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """(features [num_positions, num_features], whether the target disagreed [num_positions])."""
    texts = list(texts)
    rows = [features(signals) for text in texts for signals in text.signals]
    return np.array(rows, np.float64), np.array([wrong for text in texts for wrong in text.disagrees], bool)


def sklearn_linear() -> Any:
    """scikit-learn's linear models. Raises MissingDependency."""
    with importing("Fitting a calibration needs", "report"):
        from sklearn import linear_model
    return linear_model


def fit_weights(texts: Sequence[LabelledText]) -> tuple[tuple[float, ...], float]:
    """Return (weights, bias) on raw features, by logistic regression on standardised ones. Raises PromptError."""
    rows, disagrees = table(texts)
    if len(rows) < _MIN_TOKENS or not 0 < disagrees.sum() < len(rows):
        raise PromptError(
            f"{len(rows)} tokens with {int(disagrees.sum())} disagreements are too few to calibrate with.",
            hint=f"Give more prompts: at least {_MIN_TOKENS} tokens, with some disagreements.",
        )
    mean, scale = rows.mean(0), np.maximum(rows.std(0), 1e-9)
    fitted = sklearn_linear().LogisticRegression(max_iter=5000).fit((rows - mean) / scale, disagrees)
    weights = fitted.coef_[0] / scale
    return tuple(float(w) for w in weights), float(fitted.intercept_[0] - weights @ mean)


def held_out_risks(texts: Sequence[LabelledText]) -> list[list[float]]:
    """The risks along each text, by weights fitted on the prompts of other folds. Raises PromptError for too few."""
    number = {name: index for index, name in enumerate(dict.fromkeys(text.prompt for text in texts))}
    folds = [number[text.prompt] % _NUM_FOLDS for text in texts]
    fitted = {
        fold: fit_weights([text for text, other in zip(texts, folds, strict=True) if other != fold])
        for fold in set(folds)
    }
    return [[risk(*fitted[fold], signals) for signals in text.signals] for text, fold in zip(texts, folds, strict=True)]


@dataclass(frozen=True, slots=True)
class Replay:
    """What a policy gives along a text: tokens, disagreements left in it, calls, and what both models did for it.

    `num_written` counts the tokens that the target wrote itself: corrections, bonus tokens and all after them.
    `num_rows` are rows that it computed, after those of the prompt.
    """

    num_tokens: int
    num_wrong: int
    num_calls: int
    num_drafted: int = 0
    num_written: int = 0
    num_rows: int = 0


def walk(
    risks: Sequence[float], disagrees: Sequence[bool], limit: float, max_block: int = MAX_BLOCK, *,
    hand_back: HandBack = _NONE, adds: bool = True, ends: bool = True,
) -> Replay:  # fmt: skip
    """Replay a gate along a recorded text, a block ending where its risk exceeds the limit.

    The risk of a block is the sum over its tokens, as in the calibrated gate; unless `adds`, the highest of them, as
    for a threshold on single tokens. Unless `ends`, blocks are drafted to their full length. A real run leaves the
    recorded text after a disagreement that was skipped, so `bench.gates` checks the curve by real runs.
    """
    base = num_wrong = num_calls = num_drafted = num_written = num_rows = 0
    while base < len(risks):
        total, length = (0.0 if adds else -math.inf), 0
        while length < max_block and base + length < len(risks) and (total <= limit or not ends):
            total = total + risks[base + length] if adds else max(total, risks[base + length])
            length += 1
        num_drafted += length
        wrong = [index for index in range(base, base + length) if disagrees[index]]
        if total <= limit:
            num_wrong += len(wrong)
            base += length
            continue
        own = wrong[0] if wrong else base + length  # where the target's own token stands: the correction or the bonus
        num_on = _num_written_on(disagrees[own + 1 :], hand_back) if wrong else 0
        num_calls += 1
        num_rows += own - base + 1 + num_on
        num_written += (own < len(risks)) + num_on
        base = own + 1 + num_on
    return Replay(len(risks), num_wrong, num_calls, num_drafted, num_written, num_rows)


def _num_written_on(disagrees: Sequence[bool], hand_back: HandBack) -> int:
    """Return how many of the tokens after a correction the target writes."""
    num_written = num_agreed = 0
    while num_written < len(disagrees) and not hand_back.is_over(num_written, num_agreed):
        num_agreed = 0 if disagrees[num_written] else num_agreed + 1
        num_written += 1
    return num_written


def curve(
    texts: Sequence[LabelledText], risk_of: Sequence[Sequence[float]], k: int, hand_back: HandBack = _NONE, *,
    is_cautious: bool = False,
) -> Curve:  # fmt: skip
    """Agreement and costs for a range of limits with blocks of up to `k`, over the texts along the target's path.

    If it `is_cautious`, an agreement is one standard error below the measured one: with few texts the gate asks too
    often rather than too seldom. Of the limits that keep the same agreement it has the loosest, besides 0.
    """
    points, lowest = list[CurvePoint](), 1.0
    num_tokens = sum(len(text.disagrees) for text in texts)
    for limit in _LIMITS:
        walked = [
            walk(risks, text.disagrees, limit, k, hand_back=hand_back)
            for text, risks in zip(texts, risk_of, strict=True)
        ]
        calls, written, rows, drafted = (
            round(sum(map(attrgetter(name), walked)) / num_tokens, 4)
            for name in ("num_calls", "num_written", "num_rows", "num_drafted")
        )
        wrong = sum(replay.num_wrong for replay in walked) / num_tokens
        wrong += _standard_error(walked, wrong) if is_cautious and limit else 0.0
        lowest = max(min(lowest, 1 - wrong), 0.0)
        point = CurvePoint(
            limit=round(limit, 4), agreement=round(lowest, 5), calls_per_token=calls,
            written_per_token=written, rows_per_token=rows, drafted_per_token=drafted,
        )  # fmt: skip
        if len(points) > 1 and points[-1].agreement == point.agreement:
            points.pop()
        points.append(point)
        if not calls:
            break
    return Curve(k=k, hand_back=str(hand_back), points=tuple(points))


def _standard_error(walked: Sequence[Replay], wrong: float) -> float:
    """Return the standard error over texts of the share of disagreements left: that of half a disagreement at least."""
    num_tokens = sum(outcome.num_tokens for outcome in walked)
    squares = sum((outcome.num_wrong - wrong * outcome.num_tokens) ** 2 for outcome in walked)
    return max(math.sqrt(squares), 0.5) / num_tokens


def auroc(scores: Floats, disagrees: npt.NDArray[np.bool_]) -> float:
    """Chance that a disagreement scores higher than an agreement, ties counting half (Mann and Whitney's U)."""
    order = np.argsort(scores, kind="stable")
    _, starts, counts = np.unique(scores[order], return_index=True, return_counts=True)
    ranks = np.empty(len(scores))
    ranks[order] = np.repeat(starts + (counts + 1) / 2, counts)
    num_wrong, num_right = int(disagrees.sum()), int((~disagrees).sum())
    if not num_wrong or not num_right:
        return float("nan")
    return float((ranks[disagrees].sum() - num_wrong * (num_wrong + 1) / 2) / (num_wrong * num_right))


def agreement(texts: Iterable[LabelledText]) -> tuple[float, int]:
    """Return (the share of tokens on which both models agree, the number of tokens)."""
    flags = [wrong for text in texts for wrong in text.disagrees]
    return 1 - sum(flags) / max(len(flags), 1), len(flags)


def fit(
    texts: Sequence[LabelledText], draft: PairSide, target: PairSide, name: str, max_new_tokens: int, *,
    sha256: str = "", unseen: Sequence[LabelledText] | None = None,
) -> Calibration:  # fmt: skip
    """Fit the calibration of a pair to texts that answer the prompts called `name`. Raises PromptError for too few.

    The weights come from all texts. The limits come from all texts that the target wrote, or from `unseen`, texts that
    the draft model was not trained on; then they are cautious.
    """
    targets = [text for text in texts if text.path == "target"]
    if unseen is not None:
        share, num_unseen = agreement(unseen)
        if num_unseen < _MIN_UNSEEN or share == 1:
            raise PromptError(
                f"{num_unseen} tokens with {sum(sum(text.disagrees) for text in unseen)} disagreements are too few to "
                "say which limit keeps which agreement.",
                hint=f"Collect more answers: at least {_MIN_UNSEEN} tokens that the draft model was not trained on.",
            )
    exact_weights, exact_bias = fit_weights(texts)
    rows, disagrees = table(texts)
    about = Fitted(
        workload=name, sha256=sha256, num_prompts=len(targets), num_tokens=len(rows),
        date=datetime.now(UTC).date().isoformat(), max_new_tokens=max_new_tokens,
        auroc=round(auroc(rows @ np.array(exact_weights) + exact_bias, disagrees), 4),
    )  # fmt: skip
    weights, bias = tuple(round(weight, 5) for weight in exact_weights), round(exact_bias, 5)
    walked = targets if unseen is None else unseen
    risk_of = {text: [risk(weights, bias, signals) for signals in text.signals] for text in walked}
    with suppress(PromptError):  # too few to leave some out
        risk_of |= zip(texts, held_out_risks(texts), strict=True)
    risks = [risk_of[text] for text in walked]
    curves = tuple(curve(walked, risks, k, hand_back, is_cautious=unseen is not None) for k, hand_back in _CURVES)
    return Calibration(draft=draft, target=target, weights=weights, bias=bias, curves=curves, fitted=about)
