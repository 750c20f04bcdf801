"""The figures of a comparison: summary.json, which the page shows."""

from typing import Any, Literal

from pydantic import Field

from skydraft.evaluation.findings import Findings, Setting
from skydraft.evaluation.intervals import LEVEL, NUM_RESAMPLES, Figure, Resamples, with_interval
from skydraft.evaluation.measures import MEASURES
from skydraft.evaluation.records import Line
from skydraft.evaluation.tasks.figures import TaskSet, task_sets


class SettingFigures(Line):
    """The figures of a mode. `measures` holds the measures with a value.

    `speed_over` is tokens/s in units of other modes.
    """

    mode: str
    num_prompts: int
    num_generations: int
    num_tokens: int
    measures: dict[str, Figure]
    speed_over: dict[str, Figure]

    def value(self, measure: str) -> float | None:
        return self.measures[measure].value if measure in self.measures else None


class Summary(Line):
    """The content of summary.json. Intervals are a paired bootstrap over prompts."""

    schema_number: Literal[2] = Field(default=2, alias="schema")
    run: dict[str, Any]  # its line without the prompts, and how many there were
    bootstrap: dict[str, Any]
    settings: tuple[SettingFigures, ...]
    tasks: tuple[TaskSet, ...] = ()


def summarize(findings: Findings) -> Summary:
    run = findings.run.model_dump(mode="json", by_alias=True, exclude={"prompts"})
    return Summary(
        run=run | {"num_prompts": len(findings.run.prompts)},
        bootstrap={"resamples": NUM_RESAMPLES, "level": LEVEL, "unit": "prompt"},
        settings=tuple(_setting(findings, setting) for setting in findings.settings),
        tasks=tuple(task_sets(findings)),
    )


def _setting(findings: Findings, setting: Setting) -> SettingFigures:
    cases, resamples = setting.all_cases, Resamples(len(setting.cases))  # the same draws for each mode
    figures = {measure.name: resamples.figure(*setting.sums(measure.name)) for measure in MEASURES}
    return SettingFigures(
        mode=setting.mode.name, num_prompts=len(setting.cases), num_generations=len(cases),
        num_tokens=sum(case.num_tokens for case in cases),
        measures={name: figure for name, figure in figures.items() if figure is not None},
        speed_over=_speed_over(findings, setting, resamples),
    )  # fmt: skip


def _speed_over(findings: Findings, setting: Setting, resamples: Resamples) -> dict[str, Figure]:
    """Tokens/s relative to `cloud`, paired over the same prompts."""
    cloud = next((each for each in findings.settings if each.mode.name == "cloud"), None)
    if cloud is None:
        return {}
    ours, theirs = setting.sums("tokens_per_s"), cloud.sums("tokens_per_s")
    interval = resamples.ratio_of_ratios(ours, theirs)
    value = ours[0].sum() / ours[1].sum() / (theirs[0].sum() / theirs[1].sum())
    return {"cloud": with_interval(value, interval)} if interval else {}
