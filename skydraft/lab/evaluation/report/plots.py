"""The plots of the report, as SVG for the page. Modes have different marks as well as colours."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from skydraft.errors import MissingDependency, importing
from skydraft.intervals import Figure

# Okabe and Ito's palette for colour-blind readers
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_MARKS = "osD^vPX*<>"
_COSTS = ("calls a token", "written a token")


def load_pyplot() -> Any:
    """Return Matplotlib's pyplot, set up for reproducible files. Raises MissingDependency."""
    with importing("The plots of a report need", "report"):
        import matplotlib

        matplotlib.use("svg")
        import matplotlib.pyplot as pyplot

    # The same records give the same file: ids are not random, and texts are shapes that need no font.
    pyplot.rcParams.update(
        {"svg.hashsalt": "skydraft", "svg.fonttype": "path", "font.size": 10, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "grid.color": "#e2e2e2", "axes.axisbelow": True}
    )  # fmt: skip
    return pyplot


def against_cost(what: str, modes: Mapping[str, Sequence[Figure]]) -> str:
    """Return an <svg> of `what` against calls a token, and against tokens written a token. Each mode has these three
    figures. Return "" without matplotlib."""
    try:
        pyplot = load_pyplot()
    except MissingDependency:
        return ""
    figure, panels = pyplot.subplots(1, 2, figsize=(9.4, 4.2), layout="constrained", sharey=True)
    for at, axes in enumerate(panels):
        for number, (name, (y, *costs)) in enumerate(modes.items()):
            axes.errorbar(
                [costs[at].value], [y.value], [[max(y.value - y.low, 0)], [max(y.high - y.value, 0)]],
                fmt=_MARKS[number % len(_MARKS)], color=_COLORS[number % len(_COLORS)], markersize=7, elinewidth=0.8,
                label=name,
            )  # fmt: skip
        if "edge" in modes and "cloud" in modes:
            ends = modes["edge"], modes["cloud"]
            axes.plot([end[1 + at].value for end in ends], [end[0].value for end in ends], "-",
                      color="#888888", linewidth=1.2, label="whole answers at random", zorder=0)  # fmt: skip
        axes.set(xlabel=_COSTS[at], xlim=(-0.01, None))
    panels[0].set(ylabel=what)
    panels[1].legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return _svg(pyplot, figure)


def side_by_side(titles: Sequence[str], modes: Mapping[str, Sequence[Figure | None]]) -> str:
    """Return an <svg> with a panel for each title, and each mode's value and interval. "" without matplotlib."""
    try:
        pyplot = load_pyplot()
    except MissingDependency:
        return ""
    size = 1.5 + 1.9 * len(titles), 1.0 + 0.3 * len(modes)
    figure, panels = pyplot.subplots(1, len(titles), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for at, (axes, title) in enumerate(zip(panels[0], titles, strict=True)):
        for row, figures in enumerate(modes.values()):
            if x := figures[at]:
                axes.errorbar(
                    [x.value], [row], None, [[max(x.value - x.low, 0)], [max(x.high - x.value, 0)]],
                    fmt=_MARKS[row % len(_MARKS)], color=_COLORS[row % len(_COLORS)], markersize=7, elinewidth=0.8,
                    clip_on=False,
                )  # fmt: skip
        axes.set(xlabel=title, xlim=(0, None), ylim=(max(len(modes), 1) - 0.5, -0.5), yticks=range(len(modes)),
                 yticklabels=list(modes))  # fmt: skip
    return _svg(pyplot, figure)


def _svg(pyplot: Any, figure: Any) -> str:
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return target.getvalue()[target.getvalue().index("<svg") :]
