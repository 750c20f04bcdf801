"""The figures of a comparison: summary.json, which the page shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

from pydantic import Field

from skydraft.decoding.stats import percentile, token_gaps
from skydraft.evaluation.findings import Findings, Setting
from skydraft.evaluation.intervals import LEVEL, NUM_RESAMPLES, Figure, Resamples, rounded, with_interval
from skydraft.evaluation.measures import MEASURES, Case
from skydraft.evaluation.records import Line, RunFacts, ScoreLine
from skydraft.evaluation.tasks.figures import TaskSet, task_sets
from skydraft.gating.calibration import MAX_BLOCK
from skydraft.gating.fitting import LabelledText, agreement, auroc, count_risks, curve
from skydraft.gating.hand_back import parse_hand_back
from skydraft.types import Signals

HAND_BACKS = ("0", "4", "8", "agree:2", "agree:4", "agree:6", "text")
Point = tuple[float, float, float]  # agreement, calls a token, tokens written by the target a token


class CategoryFigures(Line):
    """Agreement and calls on the prompts of one category, without intervals, as prompts are few."""

    num_prompts: int
    target_agreement: float | None
    cloud_calls_per_token: float | None


class SettingFigures(Line):
    """The figures of a mode over a link (None: in process). `measures` holds the measures with a value.

    `speed_over` is tokens/s in units of other modes on the same link. `categories` has the figures by category of
    prompts; prompts without a category are left out.
    """

    mode: str
    link_ms: float | None
    num_prompts: int
    num_generations: int
    num_tokens: int
    measures: dict[str, Figure]
    speed_over: dict[str, Figure]
    itl_ms_p50: float | None
    itl_ms_p95: float | None
    finish: dict[str, int]
    categories: dict[str, CategoryFigures]

    @property
    def name(self) -> str:
        return self.mode if self.link_ms is None else f"{self.mode} @ {self.link_ms:g} ms"

    def value(self, measure: str) -> float | None:
        return self.measures[measure].value if measure in self.measures else None


class Study(Line):
    """How well the draft model's uncertainty predicts where the target disagrees.

    `alone`: agreement of the draft model along its own texts, α. `auroc`: probability that a disagreement scores higher
    than an agreement. `policies`: the points of each hand-back from the lowest agreement on, replayed along the
    target's texts behind a gate on added risks, with blocks of up to `max_block` tokens.
    """

    num_tokens: int
    alone: float
    alone_on_target_path: float
    auroc: dict[str, float]
    policies: dict[str, tuple[Point, ...]]
    max_block: int


class SummarisedRun(RunFacts):
    """The facts of a run, with the number of its prompts."""

    num_prompts: int


class Bootstrap(Line):
    """The method of the intervals."""

    resamples: int = NUM_RESAMPLES
    level: float = LEVEL
    unit: str = "prompt"


class Summary(Line):
    """The content of summary.json. Intervals are a paired bootstrap over prompts."""

    schema_number: Literal[2] = Field(default=2, alias="schema")
    run: SummarisedRun
    bootstrap: Bootstrap = Bootstrap()
    settings: tuple[SettingFigures, ...]
    study: Study | None = None
    tasks: tuple[TaskSet, ...] = ()


def summarize(findings: Findings) -> Summary:
    by_link = {setting.link_ms: Resamples(len(setting.cases)) for setting in findings.settings}
    facts = {name: value for name, value in findings.run if name in RunFacts.model_fields}
    return Summary(
        run=SummarisedRun.model_construct(**facts, num_prompts=len(findings.run.prompts)),
        settings=tuple(_setting(findings, setting, by_link[setting.link_ms]) for setting in findings.settings),
        study=study(findings),
        tasks=tuple(task_sets(findings)),
    )


def _setting(findings: Findings, setting: Setting, resamples: Resamples) -> SettingFigures:
    cases = setting.all_cases
    figures = {measure.name: resamples.figure(*setting.sums(measure.name)) for measure in MEASURES}
    gaps = [gap for case in cases for gap in token_gaps(case.generation.records)]
    return SettingFigures(
        mode=setting.mode.name,
        link_ms=setting.link_ms,
        num_prompts=len(setting.cases),
        num_generations=len(cases),
        num_tokens=sum(case.num_tokens for case in cases),
        measures={name: figure for name, figure in figures.items() if figure is not None},
        speed_over=_speed_ratios(findings, setting, resamples),
        itl_ms_p50=percentile(gaps, 50),
        itl_ms_p95=percentile(gaps, 95),
        finish=dict(sorted(Counter(case.generation.finish for case in cases).items())),
        categories=_by_category(setting),
    )


def _by_category(setting: Setting) -> dict[str, CategoryFigures]:
    figures = {}
    for category in sorted({cases[0].prompt.category for cases in setting.cases} - {""}):
        part = replace(setting, cases=[cases for cases in setting.cases if cases[0].prompt.category == category])
        values = {name: part.value(name) for name in ("target_agreement", "cloud_calls_per_token")}
        known = {name: None if value is None else rounded(value) for name, value in values.items()}
        figures[category] = CategoryFigures(num_prompts=len(part.cases), **known)
    return figures


def _speed_ratios(findings: Findings, setting: Setting, resamples: Resamples) -> dict[str, Figure]:
    """Tokens/s in units of the other baselines on the same link, paired over the same prompts."""
    ratios = {}
    for name in ("cloud", "edge"):
        other = findings.setting(name, setting.link_ms)
        if other is None or len(other.cases) != len(setting.cases):
            continue
        ours, theirs = setting.sums("tokens_per_s"), other.sums("tokens_per_s")
        if interval := resamples.ratio_of_ratios(ours, theirs):
            value = (ours[0].sum() / ours[1].sum()) / (theirs[0].sum() / theirs[1].sum())
            ratios[name] = with_interval(value, interval)
    return ratios


def study(findings: Findings) -> Study | None:
    """The study of a comparison that ran `edge` and `cloud` greedily; None without them.

    Signals are judged along the draft model's own texts; the costs of hand-backs are replayed along the target's.
    """
    edge, cloud = findings.setting("edge"), findings.setting("cloud")
    if edge is None or cloud is None or edge.mode.params.temperature:
        return None
    own = _first_scored(edge)
    drafts = [labelled(score, "draft") for _, score in own]
    targets = [labelled(score, "target") for _, score in _first_scored(cloud)]
    if not drafts or len(drafts) != len(targets):
        return None
    tokens = [token for text in drafts for token in text.signals]
    wrong = [flag for text in drafts for flag in text.disagrees]
    scores = {
        "entropy": [token.entropy for token in tokens],
        "margin": [-token.margin for token in tokens],
        "prob": [-token.top_prob for token in tokens],
        "digits": [float(any(map(str.isdigit, piece))) for case, _ in own for piece in case.generation.pieces],
    }
    risks = count_risks(drafts + targets)
    curves = {name: curve(targets, risks, MAX_BLOCK, parse_hand_back(name)).points for name in HAND_BACKS}
    return Study(
        num_tokens=len(wrong),
        alone=rounded(agreement(drafts)[0]),
        alone_on_target_path=rounded(agreement(targets)[0]),
        auroc={name: round(auroc(values, wrong), 4) for name, values in scores.items()} if 0 < sum(wrong) < len(wrong)
        else {},
        policies={
            name: tuple((at.agreement, at.calls_per_token, at.written_per_token) for at in reversed(points))
            for name, points in curves.items()
        },
        max_block=MAX_BLOCK,
    )  # fmt: skip


def _first_scored(setting: Setting) -> list[tuple[Case, ScoreLine]]:
    """The first scored text of each prompt."""
    scored = [[(case, case.score) for case in cases if case.score] for cases in setting.cases]
    return [found[0] for found in scored if found]


def labelled(line: ScoreLine, path: Literal["target", "draft"]) -> LabelledText:
    signals = tuple(Signals(*each) for each in line.signals)
    disagrees = tuple(mine != theirs for mine, theirs in zip(line.drafted, line.choices, strict=True))
    return LabelledText(path, signals, disagrees)
