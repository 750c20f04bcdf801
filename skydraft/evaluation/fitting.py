"""Fitting a calibration: from texts of both models to the chance of disagreement, and from that to limits.

A prompt is labelled twice, along what the target alone writes and along what the draft model alone writes. At each
position the draft model's signals and choice meet the target's choice: that is the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from skydraft import api
from skydraft.config import DecodingParams
from skydraft.decoding.plan import make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.errors import MissingDependency, PromptError
from skydraft.evaluation.records import ScoreLine
from skydraft.evaluation.scoring import Scorer
from skydraft.evaluation.workloads import Workload
from skydraft.gating.calibration import FEATURES, MAX_BLOCK, Calibration, Curve, CurvePoint, Fitted, PairSide, features
from skydraft.prompts.audio import load_audio
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt
from skydraft.types import Signals

Floats = npt.NDArray[np.float64]

_MIN_UNSEEN = 100  # tokens; below, an agreement of 0.95 is known to 0.02 at best
_MIN_TOKENS = 200  # below, a logistic fit of four weights says little
_LIMITS = (0.0, *np.geomspace(0.005, 20.0, 80).tolist())
_KS = (1, 2, 3, 4, 5, 6, 8, MAX_BLOCK, 16, 32)


_MODE_OF: dict[Literal["target", "draft"], str] = {"target": "cloud", "draft": "edge"}
_NO_LIMIT = CurvePoint(limit=0, agreement=1, calls_per_token=1)


@dataclass(frozen=True, slots=True)
class LabelledText:
    """One text by positions: how sure the draft model was, and whether the target disagreed with its choice."""

    path: Literal["target", "draft"]
    signals: tuple[Signals, ...]
    disagrees: tuple[bool, ...]

    @property
    def agreement(self) -> float:
        """Share of positions where the draft model would have written what the target would."""
        return 1 - sum(self.disagrees) / len(self.disagrees)


def labelled(line: ScoreLine, path: Literal["target", "draft"]) -> LabelledText:
    """A scored text as labelled positions."""
    signals = tuple(Signals(*found) for found in line.signals)
    disagrees = tuple(mine != theirs for mine, theirs in zip(line.drafted, line.choices, strict=True))
    return LabelledText(path, signals, disagrees)


def table(texts: Iterable[LabelledText]) -> tuple[Floats, npt.NDArray[np.bool_]]:
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


def fit_weights(texts: Sequence[LabelledText]) -> tuple[tuple[float, ...], float]:
    """(weights, bias) on raw features, by logistic regression on standardised ones. Raises PromptError for too few."""
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


@dataclass(frozen=True, slots=True)
class Replay:
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
) -> Replay:
    """Replay a gate along a text, a block ending where its risk exceeds the limit.

    The risk of a block is the sum over its tokens, as the calibrated gate has it; or, unless `adds`, the highest of
    them, which is a threshold on single tokens. Unless `ends`, blocks are drafted to their full length.

    Simulated: the text goes on as it was recorded, while in a real run it goes another way after a disagreement
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
    return Replay(len(risks), num_wrong, num_calls, num_drafted)


def curve(
    texts: Sequence[LabelledText], risk_of: Sequence[Sequence[float]], k: int, *, is_cautious: bool = False
) -> Curve:
    """Agreement and calls for a range of limits with blocks of up to `k`, over the texts along the target's path.

    Where it `is_cautious`, an agreement is a standard error less than what was found, so that a limit that comes from a
    few texts rather asks too often.
    """
    points = []
    lowest = 1.0
    for limit in _LIMITS:
        walked = [walk(risks, text.disagrees, limit, k) for text, risks in zip(texts, risk_of, strict=True)]
        num_tokens = sum(outcome.num_tokens for outcome in walked)
        wrong = sum(outcome.num_wrong for outcome in walked) / num_tokens
        wrong += _standard_error(walked, wrong) if is_cautious and limit else 0.0
        lowest = max(min(lowest, 1 - wrong), 0.0)
        calls = sum(outcome.num_calls for outcome in walked) / num_tokens
        points.append(CurvePoint(limit=round(limit, 5), agreement=round(lowest, 5), calls_per_token=round(calls, 5)))
        if not calls:
            break
    return Curve(k=k, points=tuple(points))


def _standard_error(walked: Sequence[Replay], wrong: float) -> float:
    """Of the share of disagreements that are left, texts being drawn and not tokens; half a text's is the least."""
    num_tokens = sum(outcome.num_tokens for outcome in walked)
    squares = sum((outcome.num_wrong - wrong * outcome.num_tokens) ** 2 for outcome in walked)
    return max(math.sqrt(squares), 0.5) / num_tokens


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


def label_texts(
    edge: Engine, cloud: Engine, workload: Workload, max_new_tokens: int, on_done: Callable[[], None]
) -> list[LabelledText]:
    """Have both models answer the prompts alone, greedily, and label the texts; `on_done` is called after each."""
    params = DecodingParams(max_new_tokens=max_new_tokens)
    scorer = Scorer(edge, cloud, params)
    texts: list[LabelledText] = []
    for entry in workload.prompts:
        audio = load_audio(entry.audio) if entry.audio else None
        messages = asked(entry.prompt, audio=audio)
        alone = []
        for path, mode in _MODE_OF.items():
            request = GenerateRequest(messages, make_plan(mode), params)
            alone.append((path, api.start(request, edge=edge, cloud=cloud).run().token_ids))
        prompts = read_prompt(edge, messages)
        texts += [labelled(scorer.score(entry.id, prompts, token_ids), path) for path, token_ids in alone]
        scorer.close()  # its sequences' seats are for the next generation
        on_done()
    return texts


def fit(
    texts: Sequence[LabelledText], draft: Engine, target: Engine, workload: Workload, max_new_tokens: int
) -> Calibration:
    """The calibration of a pair, from labelled texts of a workload. Raises PromptError for too few."""
    sides = [PairSide(name=engine.name, fingerprint=engine.fingerprint) for engine in (draft, target)]
    about = (workload.name, workload.sha256, len(workload.prompts), max_new_tokens)
    return _fit(texts, [text for text in texts if text.path == "target"], sides[0], sides[1], *about)


def fit_lessons(
    texts: Sequence[LabelledText], unseen: Sequence[LabelledText], draft: PairSide, target: PairSide, name: str,
    max_new_tokens: int,
) -> Calibration:  # fmt: skip
    """The calibration of a pair, from texts that were collected in use. Raises PromptError for too few.

    All of them teach what a risk is made of; those that the draft model was not trained on, `unseen`, which agreement
    a limit keeps.
    """
    num_tokens = sum(len(text.disagrees) for text in unseen)
    num_wrong = sum(sum(text.disagrees) for text in unseen)
    if num_tokens < _MIN_UNSEEN or not num_wrong:
        raise PromptError(
            f"{num_tokens} tokens with {num_wrong} disagreements are too few to say which limit keeps which agreement.",
            hint=f"Collect more answers: at least {_MIN_UNSEEN} tokens that the draft model was not trained on.",
        )
    return _fit(texts, unseen, draft, target, name, "", len(texts), max_new_tokens, is_cautious=True)


def _fit(
    texts: Sequence[LabelledText], walked: Sequence[LabelledText], draft: PairSide, target: PairSide, name: str,
    sha256: str, num_prompts: int, max_new_tokens: int, *, is_cautious: bool = False,
) -> Calibration:  # fmt: skip
    weights, bias = fit_weights(texts)
    rows, disagrees = table(texts)
    scores = rows @ np.array(weights) + bias
    about = Fitted(
        workload=name,
        sha256=sha256,
        num_prompts=num_prompts,
        num_tokens=len(rows),
        date=datetime.now(UTC).date().isoformat(),
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
    risks = [[bare.risk(signals) for signals in text.signals] for text in walked]
    return bare.model_copy(update={"curves": tuple(curve(walked, risks, k, is_cautious=is_cautious) for k in _KS)})


def alone_agreement(texts: Sequence[LabelledText]) -> tuple[float, int]:
    """(agreement of the draft model with the target along its own texts, tokens of these)."""
    flags = [wrong for text in texts if text.path == "draft" for wrong in text.disagrees]
    return 1 - sum(flags) / len(flags), len(flags)
