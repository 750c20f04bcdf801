"""The page's section about a set of tasks: its table and its plot."""

from typing import Any

from skydraft.intervals import cell
from skydraft.lab.evaluation.measures import Measure
from skydraft.lab.evaluation.report.plots import against_cost
from skydraft.lab.tasks.figures import TaskSet

Column = tuple[Measure, list[tuple[str, str]]]  # a value and an interval for each mode
_FIGURES = (
    Measure("score", "score", "", "mean score of the tasks, with Wilson's interval. The answer is X in the line "
            "“Answer: X”, else the last number, or the first line"),
    Measure("over_cloud", "minus cloud", "", "score minus the score of cloud, paired"),
    Measure("recovered", "share of the gap", "", "(score − edge) / (cloud − edge), paired; empty without a clear gap"),
    Measure("calls", "calls", "", "times that the device asked the large model and waited / generated tokens"),
    Measure("written", "written", "", "tokens that the large model wrote itself / generated tokens"),
    Measure("seconds", "s a task", "", "mean time of a task, prefill included", digits=2),
)  # fmt: skip


def section(of: TaskSet) -> dict[str, Any]:
    columns = [(each, [cell(getattr(mode, each.name), each.digits) for mode in of.modes]) for each in _FIGURES]
    points = {each.mode: (each.score, each.calls, each.written) for each in of.modes if each.calls and each.written}
    return {"of": of, "columns": columns, "plane": against_cost("score", points)}
