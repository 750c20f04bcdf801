"""The figures of each set of tasks: what a mode scores, how much of the gap between the models it closes, at what cost.

The recovered gap is RouteLLM's PGR (Ong et al. 2024): (mode - edge) / (cloud - edge).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from skydraft.evaluation.findings import Findings, Setting
from skydraft.evaluation.intervals import LEVEL, Figure, Floats, Resamples, interval, rounded, share, with_interval
from skydraft.evaluation.measures import Case
from skydraft.evaluation.records import Line

MIN_GAP = 0.05  # between the models; below it a set says nothing about modes
SHARES = (0.5, 0.8, 0.95)  # of the gap, whose price is given


class TaskMode(Line):
    """A mode on a set of tasks. What needs a mode that was not run is None.

    `over_cloud` is its score less that of `cloud`, `recovered` the share of the gap that it closes (None where the
    interval of the gap holds 0), `over_line` its score less that of handing over whole answers at random, so many that
    as many tokens are written by the large model: the line from `edge` to `cloud`. Of the `num_between` tasks of the
    set, which `cloud` does better than `edge`, `num_mended` are done as well as by `cloud`; `num_broken` others are
    done worse than by `edge`. `num_as_cloud` tasks have the score of `cloud`. `seconds` are those of a task.
    """

    mode: str
    score: Figure
    over_cloud: Figure | None
    recovered: Figure | None
    over_line: Figure | None
    calls: Figure
    written: Figure
    seconds: float
    num_mended: int | None
    num_broken: int | None
    num_as_cloud: int | None


class Price(Line):
    """The fewest calls, and the fewest written tokens, a token that close a `share` of the gap; None: no mode does.

    Between two modes this is a mixture of both, chosen at random for each task. `cloud` itself is left out.
    """

    share: float
    calls: float | None
    written: float | None


class TaskSet(Line):
    """A set of tasks. `is_apart`: the gap is at least MIN_GAP, so that modes can be told apart."""

    name: str
    num_tasks: int
    gap: Figure | None
    is_apart: bool
    num_between: int | None
    modes: tuple[TaskMode, ...]
    prices: tuple[Price, ...]


def task_sets(findings: Findings) -> Iterator[TaskSet]:
    """The figures of each set, over the tasks that every mode has answered, in process."""
    for name, settings in by_set(findings).items():
        yield _figures(name, settings)


def by_set(findings: Findings) -> dict[str, list[Setting]]:
    """The settings in process by set, each with the tasks of the set that have a verdict in every mode."""
    here = [setting for setting in findings.settings if setting.link_ms is None]
    found: dict[str, list[Setting]] = {}
    for name in dict.fromkeys(prompt.task.set for prompt in findings.run.prompts if prompt.task):
        of_modes = zip(*(_of_set(setting, name) for setting in here), strict=True)  # by task
        judged = [cases for cases in of_modes if all(case.verdict for each in cases for case in each)]
        if judged:
            cases_of = zip(*judged, strict=True)  # by mode
            found[name] = [Setting(each.mode, None, cases) for each, cases in zip(here, cases_of, strict=True)]
    return found


def _of_set(setting: Setting, name: str) -> list[tuple[Case, ...]]:
    return [cases for cases in setting.cases if cases[0].prompt.task and cases[0].prompt.task.set == name]


def scores(setting: Setting) -> Floats:
    """The score of each task, [num_tasks], a mean over repetitions."""
    return setting.sums("task_score")[0] / [len(cases) for cases in setting.cases]


def alone(settings: Sequence[Setting]) -> tuple[Setting | None, Setting | None]:
    """The draft model alone and the target alone, without a style of their own, where these were run."""
    plain = [setting for setting in settings if not setting.mode.style]
    edge = next((setting for setting in plain if not setting.mode.plan.verifies), None)
    return edge, next((setting for setting in plain if not setting.mode.plan.drafts), None)


def _figures(name: str, settings: Sequence[Setting]) -> TaskSet:
    edge, cloud = alone(settings)
    resamples = Resamples(len(settings[0].cases))
    gap = between = None
    if edge and cloud:
        difference = scores(cloud) - scores(edge)
        between = int((difference > 0).sum())
        gap = with_interval(difference.mean(), interval(resamples.means(difference)))
    modes = tuple(_mode(setting, edge, cloud, resamples) for setting in settings)
    is_apart = gap is not None and gap.value >= MIN_GAP
    points = [
        (figures.recovered.value, figures.calls.value, figures.written.value)
        for figures, setting in zip(modes, settings, strict=True)
        if figures.recovered and setting.mode.plan.drafts
    ]
    calls, written = [each[:2] for each in points], [each[::2] for each in points]
    wanted = SHARES if is_apart and points else ()
    return TaskSet(
        name=name,
        num_tasks=len(settings[0].cases),
        gap=gap,
        is_apart=is_apart,
        num_between=between,
        modes=modes,
        prices=tuple(Price(share=each, calls=least(calls, each), written=least(written, each)) for each in wanted),
    )


def _mode(setting: Setting, edge: Setting | None, cloud: Setting | None, resamples: Resamples) -> TaskMode:
    mine = scores(setting)
    calls, written = (_per_token(setting, name) for name in ("cloud_calls_per_token", "target_written_per_token"))
    asked, wrote = resamples.figure(*calls), resamples.figure(*written)
    assert asked and wrote  # as no text counts as less than a token
    over_cloud = recovered = over_line = mended = broken = as_cloud = None
    if cloud:
        theirs = scores(cloud)
        over_cloud = with_interval((mine - theirs).mean(), interval(resamples.means(mine - theirs)))
        as_cloud = int((mine == theirs).sum())
    if cloud and edge:
        first = scores(edge)
        mended = int(((theirs > first) & (mine >= theirs)).sum())
        broken = int(((theirs <= first) & (mine < first)).sum())
        recovered = _recovered(mine - first, theirs - first, resamples)
        above, below = (resamples.means(side) for side in written)
        line = mine.mean() - first.mean() - written[0].sum() / written[1].sum() * (theirs - first).mean()
        drawn = resamples.means(mine - first) - above / below * resamples.means(theirs - first)
        over_line = with_interval(line, interval(drawn))
    return TaskMode(
        mode=setting.mode.name,
        score=share(mine),
        over_cloud=over_cloud,
        recovered=recovered,
        over_line=over_line,
        calls=asked,
        written=wrote,
        seconds=rounded(sum(case.generation.wall_ms for case in setting.all_cases) / len(setting.all_cases) / 1e3),
        num_mended=mended,
        num_broken=broken,
        num_as_cloud=as_cloud,
    )


def _per_token(setting: Setting, name: str) -> tuple[Floats, Floats]:
    """Both sides of a measure a token; an empty text counts as one token."""
    above, below = setting.sums(name)
    return above, np.maximum(below, 1)


def _recovered(mine: Floats, theirs: Floats, resamples: Resamples) -> Figure | None:
    """The share of the gap that is closed, by the gains of each task over `edge`; None if the gap may be none."""
    ours, gaps = resamples.means(mine), resamples.means(theirs)
    if np.mean(gaps <= 0) > (1 - LEVEL) / 2:
        return None
    fine = gaps > 0
    return with_interval(mine.mean() / theirs.mean(), interval(ours[fine] / gaps[fine]))


def least(points: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """The least cost that closes `wanted`, by a mixture of two (closed, cost) points at most; None if none does."""
    costs = [cost for closed, cost in points if closed >= wanted]
    for (less, cheap), (more, dear) in product(points, points):
        if less < wanted <= more:
            costs.append(cheap + (dear - cheap) * (wanted - less) / (more - less))
    return rounded(min(costs)) if costs else None
