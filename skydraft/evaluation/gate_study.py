"""The gate study: how well the draft model's uncertainty predicts disagreement of the target.

The truth is the target's choice at each position. Predictions are judged along the draft model's own texts (`edge`);
the costs of hand-backs are replayed along the target's texts (`cloud`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from skydraft.errors import PromptError
from skydraft.evaluation.findings import Findings, Setting
from skydraft.evaluation.records import ScoreLine
from skydraft.evaluation.summary import Point, Study
from skydraft.gating.calibration import MAX_BLOCK
from skydraft.gating.fitting import Floats, LabelledText, auroc, held_out_risks, walk
from skydraft.gating.hand_back import parse_hand_back
from skydraft.types import Signals

_NUM_LIMITS = 60
HAND_BACKS = ("0", "4", "8", "agree:2", "agree:4", "agree:6", "text")

SIGNALS: dict[str, Callable[[Signals], float]] = {
    "entropy": lambda signals: signals.entropy,
    "margin": lambda signals: -signals.margin,
    "prob": lambda signals: -signals.top_prob,
}


def study(findings: Findings) -> Study | None:
    """The study of a comparison that ran `edge` and `cloud` greedily; None without them.

    Each hand-back is replayed along the target's texts, behind a gate on the combination of the signals, which is
    fitted by cross-validation over prompts (5 folds), or on the entropy where tokens are too few to fit.
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
    if combined:
        scores["combined"] = np.concatenate(combined[0])
        risks = combined[1]
    else:
        risks = [[SIGNALS["entropy"](token) for token in text.signals] for text in targets]
    scores["digits"] = _digits(edge)
    told = 0 < wrong.mean() < 1
    return Study(
        num_tokens=len(wrong),
        alone=round(1 - float(wrong.mean()), 5),
        alone_on_target_path=round(1 - float(np.mean([flag for text in targets for flag in text.disagrees])), 5),
        auroc={name: round(auroc(values, wrong), 4) for name, values in scores.items()} if told else {},
        gate="combined" if combined else "entropy",
        policies={name: _policy(targets, risks, name, adds=bool(combined)) for name in HAND_BACKS},
        max_block=MAX_BLOCK,
    )


def labelled(line: ScoreLine, path: Literal["target", "draft"]) -> LabelledText:
    """A scored text as labelled positions."""
    signals = tuple(Signals(*each) for each in line.signals)
    disagrees = tuple(mine != theirs for mine, theirs in zip(line.drafted, line.choices, strict=True))
    return LabelledText(path, signals, disagrees, line.prompt)


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
) -> tuple[list[list[float]], list[list[float]]] | None:
    """Risks by weights fitted on other prompts: for each text along drafts, and along targets."""
    try:
        risks = held_out_risks([text for both in zip(drafts, targets, strict=True) for text in both])
    except PromptError:
        return None  # too few tokens to fit
    return risks[::2], risks[1::2]


def _policy(
    texts: Sequence[LabelledText], risks: Sequence[Sequence[float]], hand_back: str, *, adds: bool
) -> tuple[Point, ...]:
    """The points over limits on the risk from the strictest to none, rounded, from the lowest agreement on."""
    back = parse_hand_back(hand_back)
    every = np.concatenate([np.array(each) for each in risks if len(each)])
    limits = np.unique(np.quantile(every, np.linspace(0, 1, _NUM_LIMITS)))
    if adds:
        limits = np.geomspace(0.005, 12.0, _NUM_LIMITS)
    points = []
    for limit in limits:
        walked = [
            walk(along, text.disagrees, float(limit), adds=adds, hand_back=back)
            for text, along in zip(texts, risks, strict=True)
        ]
        num_tokens = sum(outcome.num_tokens for outcome in walked)
        right = 1 - sum(outcome.num_wrong for outcome in walked) / num_tokens
        calls = sum(outcome.num_calls for outcome in walked) / num_tokens
        written = sum(outcome.num_written for outcome in walked) / num_tokens
        points.append((round(right, 5), round(calls, 5), round(written, 5)))
    return tuple(sorted(set(points)))
