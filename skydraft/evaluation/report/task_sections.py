"""The part of the page about a set of tasks: its sentences, its tables, and tasks that calls mended or did not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skydraft.evaluation.findings import Findings
from skydraft.evaluation.intervals import cell
from skydraft.evaluation.measures import Case
from skydraft.evaluation.records import PromptEntry
from skydraft.evaluation.report.coloured import Coloured, coloured
from skydraft.evaluation.report.plots import score_against_cost
from skydraft.evaluation.tasks.figures import MIN_GAP, TaskSet, alone, by_set, scores

_NUM_EXAMPLES = 3  # of each kind
_COLUMNS = (
    ("score", "score", "mean score of the tasks, with Wilson's interval"),
    ("over_cloud", "over cloud", "score less that of cloud, paired"),
    ("recovered", "gap closed", "(score − edge) / (cloud − edge), paired; empty where the gap may be none"),
    ("over_line", "over the line", "score less that of handing over whole answers at random, so many that the large "
     "model writes as many tokens: the straight line from edge to cloud. Below 0 the mode loses to chance"),
    ("calls", "calls", "times that the device asked the large model and waited / generated tokens"),
    ("written", "written", "tokens that the large model wrote itself / generated tokens"),
)  # fmt: skip
_COUNTS = (
    ("num_mended", "mended", "of the tasks that cloud does better than edge: those done as well as by cloud"),
    ("num_broken", "broken", "of the other tasks: those done worse than by edge"),
    ("num_as_cloud", "as cloud", "tasks with the score of cloud"),
    ("seconds", "s a task", "mean time of a task, prefill included"),
)
TERMS = [(label, convention) for _, label, convention in (*_COLUMNS, *_COUNTS)]


def section(of: TaskSet, findings: Findings) -> dict[str, Any]:
    rows = [
        (mode.mode, [cell(getattr(mode, name), 3) for name, *_ in _COLUMNS]
         + [_count(getattr(mode, name)) for name, *_ in _COUNTS])
        for mode in of.modes
    ]  # fmt: skip
    return {
        "name": of.name,
        "says": _says(of),
        "table": {"heads": [(label, "") for label, _ in TERMS], "rows": rows, "terms": TERMS},
        "prices": [(f"{price.share:.0%}", _price(price.calls), _price(price.written)) for price in of.prices],
        "plane": score_against_cost(of),
        "examples": list(_examples(of, findings)),
    }


def _says(of: TaskSet) -> str:
    if of.gap is None:
        return f"{of.num_tasks} tasks. Only a run of both edge and cloud shows the gap between the models."
    points = f"{100 * of.gap.value:.1f} ({100 * of.gap.low:.1f} to {100 * of.gap.high:.1f})"
    gap = f"{of.num_tasks} tasks. The large model scores {points} points more than the draft model"
    if not of.is_apart:
        return f"{gap}: fewer than {100 * MIN_GAP:.0f}. This set tells no mode from another, and claims leave it out."
    return f"{gap}. It does {of.num_between} tasks better."


def _count(number: float | None) -> tuple[str, str]:
    return ("" if number is None else f"{number:.2f}" if isinstance(number, float) else str(number)), ""


def _price(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.3f}"


def _examples(of: TaskSet, findings: Findings) -> Iterator[tuple[str, list[tuple[PromptEntry, list[Coloured]]]]]:
    """Tasks between the models: a few that the chosen mode mended, and a few that it did not."""
    settings = by_set(findings)[of.name]
    edge, cloud = alone(settings)
    gated = [setting for setting in settings if setting.mode.plan.is_gated]
    if edge is None or cloud is None or not gated:
        return
    mode = next((setting for setting in gated if setting.mode.name == "auto"), gated[-1])
    theirs, mine = scores(cloud), scores(mode)
    between = [number for number in range(of.num_tasks) if theirs[number] > scores(edge)[number]]
    for did, numbers in (
        ("mended", [number for number in between if mine[number] >= theirs[number]]),
        ("did not mend", [number for number in between if mine[number] < theirs[number]]),
    ):
        cases_of = [(each.mode.name, each.cases) for each in (edge, mode, cloud)]
        examples = numbers[:_NUM_EXAMPLES]
        yield (
            f"Wrong by edge, right by cloud, and calls of {mode.mode.name} {did} it",
            [(mode.cases[n][0].prompt, [_row(name, cases[n][0]) for name, cases in cases_of]) for n in examples],
        )


def _row(mode: str, case: Case) -> Coloured:
    verdict = case.verdict
    said = {0.0: "wrong", 1.0: "right"}.get(verdict.score, f"{verdict.score:.0%}") if verdict else ""
    return coloured(f"{mode}: {said}", case)
