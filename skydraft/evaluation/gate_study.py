"""The gate study: how well the draft model's uncertainty predicts disagreement of the target.

The truth is the target's choice at each position. Predictions are judged along the draft model's own texts (`edge`);
the costs of gates are replayed along the target's texts (`cloud`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from skydraft.errors import PromptError
from skydraft.evaluation.findings import Findings, Setting
from skydraft.evaluation.records import ScoreLine
from skydraft.evaluation.summary import Study
from skydraft.gating.calibration import MAX_BLOCK, risk
from skydraft.gating.fitting import Floats, LabelledText, auroc, fit_weights, walk
from skydraft.types import Signals

_NUM_FOLDS = 5
_NUM_LIMITS = 80

SIGNALS: dict[str, Callable[[Signals], float]] = {
    "entropy": lambda signals: signals.entropy,
    "margin": lambda signals: -signals.margin,
    "prob": lambda signals: -signals.top_prob,
}


def study(findings: Findings) -> Study | None:
    """The study of a comparison that ran `edge` and `cloud` greedily; None without them.

    Curves of single signals and of their combination are replayed along the target's texts. The combination is fitted
    by cross-validation over prompts (5 folds).
    """
    edge, cloud = findings.setting("edge"), findings.setting("cloud")
    if edge is None or cloud is None or edge.mode.params.temperature:
        return None
    drafts, targets = _texts(edge, "draft"), _texts(cloud, "target")
    if not drafts or len(drafts) != len(targets):
        return None
    wrong = np.array([flag for text in drafts for flag in text.disagrees], bool)
    combined = _cross_fitted(drafts, targets)
    scores = {name: _scores(drafts, signal) for name, signal in SIGNALS.items()}
    risks: dict[str, Sequence[Sequence[float]]] = {
        name: [[signal(token) for token in text.signals] for text in targets] for name, signal in SIGNALS.items()
    }
    if combined:
        scores["combined"] = np.concatenate(combined[0])
        risks["combined"] = combined[1]
    scores["digits"] = _digits(edge)
    told = 0 < wrong.mean() < 1
    return Study(
        num_tokens=len(wrong),
        alone=round(1 - float(wrong.mean()), 5),
        alone_on_target_path=round(1 - float(np.mean([flag for text in targets for flag in text.disagrees])), 5),
        auroc={name: round(auroc(values, wrong), 4) for name, values in scores.items()} if told else {},
        curves={name: _curve(targets, risk_of, adds=name == "combined") for name, risk_of in risks.items()},
        max_block=MAX_BLOCK,
    )


def entropies(findings: Findings) -> tuple[list[float], list[float]] | None:
    """Entropies of the draft model's tokens along `edge`: (those that the target agrees with, the others)."""
    edge = findings.setting("edge")
    texts = _texts(edge, "draft") if edge else []
    if not texts:
        return None
    pairs = [pair for text in texts for pair in zip(text.signals, text.disagrees, strict=True)]
    return [s.entropy for s, wrong in pairs if not wrong], [s.entropy for s, wrong in pairs if wrong]


def labelled(line: ScoreLine, path: Literal["target", "draft"]) -> LabelledText:
    """A scored text as labelled positions."""
    signals = tuple(Signals(*each) for each in line.signals)
    disagrees = tuple(mine != theirs for mine, theirs in zip(line.drafted, line.choices, strict=True))
    return LabelledText(path, signals, disagrees)


def _texts(setting: Setting, path: Literal["target", "draft"]) -> list[LabelledText]:
    """The first scored text of each prompt."""
    lines = [next((case.score for case in cases if case.score), None) for cases in setting.cases]
    return [labelled(line, path) for line in lines if line is not None]


def _scores(texts: Sequence[LabelledText], signal: Callable[[Signals], float]) -> Floats:
    return np.array([signal(token) for text in texts for token in text.signals])


def _digits(edge: Setting) -> Floats:
    """1 for each token that the content rule `digits` matches, else 0."""
    first = [next(case for case in cases if case.score) for cases in edge.cases if any(case.score for case in cases)]
    return np.array([float(any(map(str.isdigit, piece))) for case in first for piece in case.generation.pieces])


def _cross_fitted(
    drafts: Sequence[LabelledText], targets: Sequence[LabelledText]
) -> tuple[list[npt.NDArray[np.float64]], list[list[float]]] | None:
    """Risks by weights fitted on the prompts of other folds: for each text along drafts, and along targets."""
    num_prompts = len(drafts)
    folds = [range(start, num_prompts, _NUM_FOLDS) for start in range(min(_NUM_FOLDS, num_prompts))]
    along_drafts: dict[int, npt.NDArray[np.float64]] = {}
    along_targets: dict[int, list[float]] = {}
    for fold in folds:
        others = [index for index in range(num_prompts) if index not in fold]
        try:
            weights, bias = fit_weights([side[index] for index in others for side in (drafts, targets)])
        except PromptError:
            return None  # too few tokens to fit
        for index in fold:
            along_drafts[index] = np.array([risk(weights, bias, token) for token in drafts[index].signals])
            along_targets[index] = [risk(weights, bias, token) for token in targets[index].signals]
    order = range(num_prompts)
    return [along_drafts[index] for index in order], [along_targets[index] for index in order]


def _curve(
    texts: Sequence[LabelledText], risks: Sequence[Sequence[float]], *, adds: bool
) -> tuple[tuple[float, float], ...]:
    """(agreement, calls per token) over limits from the strictest to none, both rounded."""
    every = np.concatenate([np.array(each) for each in risks if len(each)])
    limits = np.unique(np.quantile(every, np.linspace(0, 1, _NUM_LIMITS)))
    if adds:
        limits = np.geomspace(0.005, 12.0, _NUM_LIMITS)
    points = []
    for limit in limits:
        walked = [
            walk(along, text.disagrees, float(limit), adds=adds) for text, along in zip(texts, risks, strict=True)
        ]
        num_tokens = sum(outcome.num_tokens for outcome in walked)
        wrong = sum(outcome.num_wrong for outcome in walked)
        calls = sum(outcome.num_calls for outcome in walked)
        points.append((round(1 - wrong / num_tokens, 5), round(calls / num_tokens, 5)))
    return tuple(sorted(set(points)))


def oracle_calls(agreement: float, alone: float) -> float:
    """The fewest escalations per token that raise agreement from `alone`: each corrects one token, so A − α."""
    return max(agreement - alone, 0.0)


def oracle_ratio(setting: Setting, alone: float) -> float | None:
    """Escalations per token over the oracle bound A − α, for a mode that was run; None if the bound is almost 0."""
    agreement, calls = setting.value("target_agreement"), setting.value("cloud_calls_per_token")
    if agreement is None or calls is None or (bound := oracle_calls(agreement, alone)) < 0.01:
        return None
    return calls / bound
