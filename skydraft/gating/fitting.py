"""Fits a calibration: labelled texts give the chance of disagreement, and that gives limits."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import numpy as np

from skydraft.errors import PromptError
from skydraft.gating.calibration import (
    BIN_MIDDLES,
    MAX_BLOCK,
    NUM_BINS,
    Calibration,
    Curve,
    CurvePoint,
    PairSide,
    bin_of,
    risks_of,
)
from skydraft.gating.hand_back import HandBack, parse_hand_back
from skydraft.types import Signals

_PRIOR = 4.0  # weight of the first guess, in tokens of a bin: a single text outweighs it slowly
_MIN_TOKENS = 100  # with fewer, an agreement of 0.95 has an error of 0.02 at best
_MIN_UNSEEN = 6  # texts; a single text says little about others
_LIMITS = (0.0, *np.geomspace(0.02, 20.0, 50).tolist())
_WRITES_ON = ("agree:2", "agree:4", "agree:6", "8", "text")
_NONE = HandBack()
_CURVES = (
    *((k, _NONE) for k in (1, 2, 3, 4, 5, 6, 8, MAX_BLOCK, 16, 32)),
    *((k, parse_hand_back(name)) for name in _WRITES_ON for k in (4, 6, 8, MAX_BLOCK)),
)


@dataclass(frozen=True, slots=True)
class LabelledText:
    """One text, written by the model `path`, with signals and the target's disagreement for each token."""

    path: Literal["target", "draft"]
    signals: tuple[Signals, ...]
    disagrees: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a gate on a text: tokens, remaining disagreements, and calls. The target wrote `num_written` tokens
    itself, bonus tokens included."""

    num_tokens: int
    num_wrong: int
    num_calls: int
    num_written: int


def walk(
    risks: Sequence[float], disagrees: Sequence[bool], limit: float, max_block: int = MAX_BLOCK,
    hand_back: HandBack = _NONE,
) -> Replay:  # fmt: skip
    """Replay a calibrated gate on a recorded text. A real run would continue differently after a skipped disagreement.
    A block ends where its risks add up to more than the limit."""
    base = num_wrong = num_calls = num_written = 0
    while base < len(risks):
        total, length = 0.0, 0
        while length < max_block and base + length < len(risks) and total <= limit:
            total += risks[base + length]
            length += 1
        wrong = [index for index in range(base, base + length) if disagrees[index]]
        if total <= limit:
            num_wrong += len(wrong)
            base += length
            continue
        own = wrong[0] if wrong else base + length  # the place of the correction or the bonus token
        num_on = _num_written_on(disagrees[own + 1 :], hand_back) if wrong else 0
        num_calls += 1
        num_written += (own < len(risks)) + num_on
        base = own + 1 + num_on
    return Replay(len(risks), num_wrong, num_calls, num_written)


def _num_written_on(disagrees: Sequence[bool], hand_back: HandBack) -> int:
    num_written = num_agreed = 0
    while num_written < len(disagrees) and not hand_back.is_over(num_written, num_agreed):
        num_agreed = 0 if disagrees[num_written] else num_agreed + 1
        num_written += 1
    return num_written


def count_risks(texts: Iterable[LabelledText]) -> tuple[float, ...]:
    """Return the share of wrong tokens in each bin; a guess for a bin without tokens."""
    nums, wrong = [_PRIOR] * NUM_BINS, [_PRIOR * 0.8 * (1 - middle) for middle in BIN_MIDDLES]
    for text in texts:
        for signals, disagrees in zip(text.signals, text.disagrees, strict=True):
            nums[at := bin_of(signals)] += 1
            wrong[at] += disagrees
    return tuple(max(round(part / num, 5), 1e-5) for part, num in zip(wrong, nums, strict=True))


def curve(
    texts: Sequence[LabelledText], risks: Sequence[float], k: int, hand_back: HandBack = _NONE, *,
    is_cautious: bool = False,
) -> Curve:  # fmt: skip
    """Return agreement and costs for a range of limits with blocks of up to `k`, over texts that the target wrote.

    If `is_cautious`, agreements are one standard error below the measured ones: with few texts the gate should rather
    ask too often. Among limits with the same agreement only the loosest is kept, besides 0.
    """
    points, lowest = list[CurvePoint](), 1.0
    num_tokens = sum(len(text.disagrees) for text in texts)
    along = [(risks_of(risks, text.signals), text.disagrees) for text in texts]
    for limit in _LIMITS:
        walked = [walk(of_text, disagrees, limit, k, hand_back) for of_text, disagrees in along]
        calls = round(sum(replay.num_calls for replay in walked) / num_tokens, 4)
        written = round(sum(replay.num_written for replay in walked) / num_tokens, 4)
        wrong = sum(replay.num_wrong for replay in walked) / num_tokens
        wrong += _standard_error(walked, wrong) if is_cautious and limit else 0.0
        lowest = max(min(lowest, 1 - wrong), 0.0)
        kept = round(lowest, 5)
        point = CurvePoint(limit=round(limit, 4), agreement=kept, calls_per_token=calls, written_per_token=written)
        if len(points) > 1 and points[-1].agreement == point.agreement:
            points.pop()
        points.append(point)
        if not calls:
            break
    return Curve(k=k, hand_back=str(hand_back), points=tuple(points))


def _cautious_risks(texts: Sequence[LabelledText]) -> tuple[float, ...]:
    """Return risks whose sum is one standard error above the measured ones."""
    walked = [Replay(len(text.disagrees), sum(text.disagrees), 0, 0) for text in texts]
    wrong = sum(each.num_wrong for each in walked) / sum(each.num_tokens for each in walked)
    more = _standard_error(walked, wrong) / wrong if wrong else 0.0
    return tuple(min(round(risk * (1 + more), 5), 1.0) for risk in count_risks(texts))


def _standard_error(walked: Sequence[Replay], wrong: float) -> float:
    """Return the standard error of the share of disagreements over texts, at least half a disagreement's."""
    num_tokens = sum(outcome.num_tokens for outcome in walked)
    squares = sum((outcome.num_wrong - wrong * outcome.num_tokens) ** 2 for outcome in walked)
    return max(math.sqrt(squares), 0.5) / num_tokens


def agreement(texts: Iterable[LabelledText]) -> tuple[float, int]:
    """Return (share of tokens on which both models agree, number of tokens)."""
    flags = [wrong for text in texts for wrong in text.disagrees]
    return 1 - sum(flags) / max(len(flags), 1), len(flags)


def fit(
    texts: Sequence[LabelledText], draft: PairSide, target: PairSide, name: str, max_new_tokens: int, *,
    sha256: str = "", unseen: Sequence[LabelledText] | None = None,
) -> Calibration:  # fmt: skip
    """Fit the calibration of a pair to answers to the prompts called `name`. Raises PromptError for too few.

    Risks come from all texts, limits from the target's texts. If given, `unseen` texts (the draft model was not trained
    on them) are used for both, cautiously.
    """
    targets = [text for text in texts if text.path == "target"]
    walked = targets if unseen is None else unseen
    share, num_walked = agreement(walked)
    is_few = num_walked < _MIN_TOKENS or len(walked) < _MIN_UNSEEN * (unseen is not None)
    if is_few or not 0 < share < (1 if unseen is None else 1.01):
        found = f"{num_walked} tokens with {round(num_walked * (1 - share))} disagreements"
        says = f"{found} are too few to say which limit keeps which agreement."
        hint = f"Give at least {_MIN_TOKENS} tokens, of {_MIN_UNSEEN} answers that the draft model was not trained on."
        raise PromptError(says, hint=hint)
    risks = count_risks(texts) if unseen is None else _cautious_risks(unseen)
    about: dict[str, str | int] = {
        "workload": name, "sha256": sha256, "num_prompts": len(targets), "num_tokens": agreement(texts)[1],
        "date": datetime.now(UTC).date().isoformat(), "max_new_tokens": max_new_tokens,
    }  # fmt: skip
    curves = tuple(curve(walked, risks, k, hand_back, is_cautious=unseen is not None) for k, hand_back in _CURVES)
    return Calibration(draft=draft, target=target, risks=risks, curves=curves, fitted=about)
