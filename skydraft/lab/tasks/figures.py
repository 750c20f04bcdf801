"""The figures of each set of tasks: a mode's score, its share of the gap between the models, and its cost.

The share of the gap is RouteLLM's PGR (Ong et al. 2024): (mode - edge) / (cloud - edge).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from skydraft.files import Stored
from skydraft.intervals import LEVEL, Figure, Floats, Resamples, Rounded, share
from skydraft.lab.evaluation.findings import Findings, Setting

MIN_GAP = 0.05  # smallest gap between the models with which a set can tell modes apart


class TaskMode(Stored):
    """A mode's figures on a set of tasks (see `report.task_sections`). They are None if a needed mode was not run."""

    mode: str
    score: Figure
    over_cloud: Figure | None
    recovered: Figure | None
    calls: Figure | None
    written: Figure | None
    seconds: Rounded


class TaskSet(Stored):
    """A set of tasks. `is_apart`: the gap is at least MIN_GAP, large enough to compare modes."""

    name: str
    num_tasks: int
    gap: Figure | None
    is_apart: bool
    modes: tuple[TaskMode, ...]


def task_sets(findings: Findings) -> Iterator[TaskSet]:
    """Yield the figures of each set, over the tasks that have a verdict in every mode."""
    by_task = list(zip(*(setting.cases for setting in findings.settings), strict=True))
    for name in dict.fromkeys(prompt.task.set for prompt in findings.run.prompts if prompt.task):
        of_modes = [cases for cases in by_task if (task := cases[0][0].prompt.task) and task.set == name]
        judged = [cases for cases in of_modes if all(case.verdict for each in cases for case in each)]
        if judged:
            cases_of = zip(*judged, strict=True)  # by mode
            settings = zip(findings.settings, cases_of, strict=True)
            yield _figures(name, [Setting(each.mode, cases) for each, cases in settings])


def scores(setting: Setting) -> Floats:
    """Return each task's mean score over repetitions, [num_tasks]."""
    return setting.sums("task_score")[0] / [len(cases) for cases in setting.cases]


def alone(settings: Sequence[Setting]) -> tuple[Setting | None, Setting | None]:
    """Return (draft model alone, target alone) without a style, None for one that was not run."""
    plain = [setting for setting in settings if not setting.mode.style]
    edge = next((setting for setting in plain if not setting.mode.plan.verifies), None)
    return edge, next((setting for setting in plain if not setting.mode.plan.drafts), None)


def _figures(name: str, settings: Sequence[Setting]) -> TaskSet:
    edge, cloud = alone(settings)
    resamples = Resamples(len(settings[0].cases))
    gap = resamples.mean(scores(cloud) - scores(edge)) if edge and cloud else None
    return TaskSet(
        name=name, num_tasks=len(settings[0].cases), gap=gap, is_apart=gap is not None and gap.value >= MIN_GAP,
        modes=tuple(_mode(setting, edge, cloud, resamples) for setting in settings),
    )  # fmt: skip


def _mode(setting: Setting, edge: Setting | None, cloud: Setting | None, resamples: Resamples) -> TaskMode:
    mine = scores(setting)
    calls = resamples.figure(*setting.sums("cloud_calls_per_token"))
    written = resamples.figure(*setting.sums("target_written_per_token"))
    over_cloud = recovered = None
    if cloud:
        theirs = scores(cloud)
        over_cloud = resamples.mean(mine - theirs)
    if cloud and edge:
        first = scores(edge)
        if np.mean(resamples.means(theirs - first) <= 0) <= (1 - LEVEL) / 2:  # else the gap is uncertain
            recovered = resamples.figure(mine - first, theirs - first)
    wall_ms = sum(case.generation.wall_ms for case in setting.all_cases) / len(setting.all_cases)
    return TaskMode(
        mode=setting.mode.name, score=share(mine), over_cloud=over_cloud, recovered=recovered,
        calls=calls, written=written, seconds=wall_ms / 1e3,
    )  # fmt: skip
