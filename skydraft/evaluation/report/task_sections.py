"""The part of the page about a set of tasks: what the set says, its table and its plot."""

from typing import Any

from skydraft.evaluation.intervals import cell
from skydraft.evaluation.report.plots import against_cost
from skydraft.evaluation.tasks.figures import TaskSet

_COLUMNS = (
    ("score", "score", "mean score of the tasks, with Wilson's interval. An answer is what the line “Answer: X” says, "
     "else the last number, or the first line"),
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
    ("seconds", "s a task", "mean time of a task, prefill included"),
)
TERMS = [(label, convention) for _, label, convention in (*_COLUMNS, *_COUNTS)]


def section(of: TaskSet) -> dict[str, Any]:
    rows = []
    for mode in of.modes:
        cells = [cell(getattr(mode, name), 3) for name, *_ in _COLUMNS]
        rows.append((mode.mode, cells + [_count(getattr(mode, name)) for name, *_ in _COUNTS]))
    table = {"heads": [(label, "") for label, _ in TERMS], "rows": rows, "terms": TERMS}
    plane = against_cost("score", {mode.mode: (mode.score, mode.calls, mode.written) for mode in of.modes})
    return {"of": of, "table": table, "plane": plane}


def _count(number: float | None) -> tuple[str, str]:
    return ("" if number is None else f"{number:.2f}" if isinstance(number, float) else str(number)), ""
