"""The figures of a comparison: summary.json, which is also the page's data."""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from skydraft.files import Stored
from skydraft.intervals import LEVEL, NUM_RESAMPLES, Figure, Resamples
from skydraft.lab.evaluation.findings import Findings, Setting
from skydraft.lab.evaluation.measures import MEASURES
from skydraft.lab.tasks.figures import TaskSet, task_sets


class SettingFigures(Stored):
    """The figures of a mode. `measures` has the measures with a value.

    `speed_over` has tokens/s divided by another mode's. `differences` has the measures minus the first mode's; it is
    empty for the first mode.
    """

    mode: str
    num_prompts: int
    num_generations: int
    num_tokens: int
    measures: dict[str, Figure]
    speed_over: dict[str, Figure]
    differences: dict[str, Figure]

    def value(self, measure: str) -> float | None:
        return self.measures[measure].value if measure in self.measures else None


class Summary(Stored):
    """The content of summary.json. Intervals are a paired bootstrap over prompts."""

    schema_number: Literal[2] = Field(default=2, alias="schema")
    run: dict[str, Any]  # the run's line, with the number of prompts instead of the prompts
    bootstrap: dict[str, Any]
    settings: tuple[SettingFigures, ...]
    tasks: tuple[TaskSet, ...] = ()


def summarize(findings: Findings) -> Summary:
    run = findings.run.model_dump(mode="json", by_alias=True, exclude={"prompts"})
    return Summary(
        run=run | {"num_prompts": len(findings.run.prompts)},
        bootstrap={"resamples": NUM_RESAMPLES, "level": LEVEL, "unit": "prompt"},
        settings=tuple(_setting(findings, each) for each in findings.settings), tasks=tuple(task_sets(findings)),
    )  # fmt: skip


def _setting(findings: Findings, setting: Setting) -> SettingFigures:
    cases, resamples = setting.all_cases, Resamples(len(setting.cases))  # draws are the same for each mode
    first, sums = findings.settings[0], {measure.name: setting.sums(measure.name) for measure in MEASURES}
    others = sums if setting is not first else ()
    differs = {name: resamples.compared(np.subtract, sums[name], first.sums(name)) for name in others}
    cloud = [each.sums("tokens_per_s") for each in findings.settings if each.mode.name == "cloud"]
    speed = resamples.compared(np.divide, sums["tokens_per_s"], *cloud) if cloud else None
    return SettingFigures(
        mode=setting.mode.name, num_prompts=len(setting.cases), num_generations=len(cases),
        num_tokens=sum(case.num_tokens for case in cases),
        measures={name: figure for name, of in sums.items() if (figure := resamples.figure(*of))},
        speed_over={"cloud": speed} if speed else {},
        differences={name: figure for name, figure in differs.items() if figure},
    )  # fmt: skip
