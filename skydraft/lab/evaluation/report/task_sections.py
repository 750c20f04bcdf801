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
    Measure("calls", "calls", "", "times that the device asked the large model and waited / generated tokens"),
    Measure("written", "written", "", "tokens that the large model wrote itself / generated tokens"),
    Measure("seconds", "s a task", "", "mean time of a task, prefill included", digits=2),
)  # fmt: skip


def section(of: TaskSet) -> dict[str, Any]:
    columns = [(each, [cell(getattr(mode, each.name), each.digits) for mode in of.modes]) for each in _FIGURES]
    points = {each.mode: (each.score, each.calls, each.written) for each in of.modes if each.calls and each.written}
    plane = against_cost("score", points)
    return {"of": of, "columns": columns, "plane": plane}
