"""The part of the page about a set of tasks: what the set says, its table and its plot."""

from typing import Any

from skydraft.intervals import cell
from skydraft.lab.evaluation.measures import Measure
from skydraft.lab.evaluation.report.plots import against_cost
from skydraft.lab.tasks.figures import TaskSet

Column = tuple[Measure, list[tuple[str, str]]]  # a value and an interval for each mode
_FIGURES = (
    Measure("score", "score", "", "mean score of the tasks, with Wilson's interval. An answer is what the line "
            "“Answer: X” says, else the last number, or the first line"),
    Measure("over_cloud", "over cloud", "", "score less that of cloud, paired"),
    Measure("recovered", "gap closed", "", "(score − edge) / (cloud − edge), paired; empty where the gap may be none"),
    Measure("over_line", "over the line", "",
            "score less that of handing over whole answers at random, so many that the large model writes as many "
            "tokens: the straight line from edge to cloud. Below 0 the mode loses to chance"),
    Measure("calls", "calls", "", "times that the device asked the large model and waited / generated tokens"),
    Measure("written", "written", "", "tokens that the large model wrote itself / generated tokens"),
    Measure("num_mended", "mended", "", "of the tasks that cloud does better than edge: those done as well as by cloud",
            digits=0),
    Measure("num_broken", "broken", "", "of the other tasks: those done worse than by edge", digits=0),
    Measure("seconds", "s a task", "", "mean time of a task, prefill included", digits=2),
)  # fmt: skip


def section(of: TaskSet) -> dict[str, Any]:
    columns: list[Column] = [
        (each, [cell(getattr(mode, each.name), each.digits) for mode in of.modes]) for each in _FIGURES
    ]
    plane = against_cost("score", {mode.mode: (mode.score, mode.calls, mode.written) for mode in of.modes})
    return {"of": of, "columns": columns, "plane": plane}
