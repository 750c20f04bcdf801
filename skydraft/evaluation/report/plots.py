"""The plots of the report, as SVG for the page. Series differ by mark and line style as well as by colour."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from skydraft.decoding.cost_model import CostModel, measured_alpha
from skydraft.errors import importing
from skydraft.evaluation.findings import Findings, Setting
from skydraft.evaluation.summary import Point, Study
from skydraft.evaluation.tasks.figures import TaskSet
from skydraft.types import StepRecord

# Okabe and Ito's palette for colour-blind readers
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_MARKS = "osD^vPX*<>"
_LINES = ("-", "--", "-.", ":")
_MAX_RTT_MS = 200.0
_ASKED = {0.90: "o", 0.95: "s", 0.98: "^"}  # agreements, and their marks on the lines of the plane
_HIGHEST = 0.99  # agreement of a line's end; stricter limits check nearly all and crowd the plane


def load_pyplot() -> Any:
    """Matplotlib's pyplot, set up to write the same bytes each time. Raises MissingDependency."""
    with importing("The plots of a report need", "report"):
        import matplotlib
    matplotlib.use("svg")
    import matplotlib.pyplot as pyplot

    # The same records give the same file: no random ids; texts are shapes, so no font is needed.
    pyplot.rcParams.update(
        {"svg.hashsalt": "skydraft", "svg.fonttype": "path", "font.size": 10, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "grid.color": "#e2e2e2", "axes.axisbelow": True}
    )  # fmt: skip
    return pyplot


def _svg(figure: Any) -> str:
    """A figure as an <svg> element. Closes it."""
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    load_pyplot().close(figure)
    return target.getvalue()[target.getvalue().index("<svg") :]


def calls_against_written(findings: Findings, study: Study | None) -> str | None:
    """Calls a token by tokens written a token: hand-backs replayed, the oracle of both, and measured modes."""
    if study is None:
        return None
    figure, axes = load_pyplot().subplots(figsize=(8.6, 5.4), layout="constrained")
    alone = study.alone_on_target_path
    handles = [_draw_policy(axes, number, name, study.policies[name]) for number, name in enumerate(study.policies)]
    handles += axes.plot([0, 1 - alone], [0, 1 - alone], color="#888888", linewidth=3, alpha=0.5, label="oracle")
    for asked, mark in _ASKED.items():
        handles += axes.plot(
            [], [], mark, color="#555555", linestyle="none", markersize=5, label=f"agreement {asked:.2f}"
        )
        if asked > alone:
            axes.plot([asked - alone], [asked - alone], mark, color="#888888", markersize=5)
    axes.add_artist(_legend_beside(axes, "replayed, by hand-back", handles, "upper"))
    here = [each for each in findings.settings if each.link_ms is None and each.mode.style is None]
    measured = [each for each in here if each.value("target_agreement") is not None]
    modes = [_draw_mode(axes, number, setting) for number, setting in enumerate(measured)]
    _legend_beside(axes, "measured, agreement", modes, "lower")
    axes.set(xlabel="calls a token", ylabel="written a token", xlim=(-0.01, None), ylim=(-0.02, 1.03))
    return _svg(figure)


def _legend_beside(axes: Any, title: str, handles: Sequence[Any], side: str) -> Any:
    return axes.legend(
        handles=handles, title=title, loc=f"{side} left", bbox_to_anchor=(1.01, side == "upper"), fontsize=7.5,
        title_fontsize=7.5, borderaxespad=0, frameon=False, alignment="left",
    )  # fmt: skip


def _draw_policy(axes: Any, number: int, name: str, points: Sequence[Point]) -> Any:
    color = _COLORS[number]
    points = [point for point in points if point[0] <= _HIGHEST]
    calls, written = ([point[at] for point in points] for at in (1, 2))
    (line,) = axes.plot(calls, written, _LINES[number % len(_LINES)], color=color, linewidth=1.3, label=name)
    for asked, mark in _ASKED.items():
        if enough := [point for point in points if point[0] >= asked]:
            axes.plot([enough[0][1]], [enough[0][2]], mark, color=color, markersize=5)
    return line


def _draw_mode(axes: Any, number: int, setting: Setting) -> Any:
    names = ("cloud_calls_per_token", "target_written_per_token", "target_agreement")
    calls, written, agreement = (setting.value(name) for name in names)
    (mark,) = axes.plot(
        [calls], [written], _MARKS[number % len(_MARKS)], color="black", markersize=8, fillstyle="none",
        markeredgewidth=1.4, linestyle="none", label=f"{setting.mode.name}: {agreement:.3f}", clip_on=False, zorder=5,
    )  # fmt: skip
    return mark


def score_against_cost(of: TaskSet) -> str:
    """The plane of a set of tasks: score against calls a token, and against tokens written a token."""
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(9.4, 4.2), layout="constrained", sharey=True)
    ends = [mode for mode in of.modes if mode.mode in ("edge", "cloud")]
    for axes, name, label in zip(panels, ("calls", "written"), ("calls a token", "written a token"), strict=True):
        for number, mode in enumerate(of.modes):
            score = mode.score
            axes.errorbar(
                [getattr(mode, name).value], [score.value],
                [[max(score.value - score.low, 0)], [max(score.high - score.value, 0)]],
                fmt=_MARKS[number % len(_MARKS)], color=_COLORS[number % len(_COLORS)], markersize=7, elinewidth=0.8,
                label=mode.mode,
            )  # fmt: skip
        if len(ends) == 2:
            axes.plot([getattr(mode, name).value for mode in ends], [mode.score.value for mode in ends], "-",
                      color="#888888", linewidth=1.2, label="whole answers at random", zorder=0)  # fmt: skip
        axes.set(xlabel=label, xlim=(-0.01, None))
    panels[0].set(ylabel="score")
    panels[1].legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return _svg(figure)


def speed_against_rtt(findings: Findings) -> str | None:
    """Speed by round trip: lines from the formulae with measured costs, marks for measured speeds."""
    costs = measured_costs(findings)
    if costs is None:
        return None
    alpha, k, pair = costs
    figure, axes = load_pyplot().subplots(figsize=(7.4, 4.6), layout="constrained")
    streamed = pair.tokens_per_s(alpha, 0)
    highest = max([_MAX_RTT_MS, *(1.2 * (link or 0) for link in findings.run.links)])
    rtts = [highest * step / 100 for step in range(101)]
    axes.axhline(streamed, color=_COLORS[6], linewidth=1.2, label="cloud, streamed: 1 / t_v(1)")
    for number, length in enumerate(sorted({1, 2, k})):
        speeds = [replace(pair, wire_ms=rtt).tokens_per_s(alpha, length) for rtt in rtts]
        label = f"speculation, k = {length} (formula)"
        axes.plot(rtts, speeds, _LINES[number % 4], color=_COLORS[number], label=label)
        if 0 < (even := pair.break_even_ms(alpha, length)) < highest:
            axes.axvline(even, color=_COLORS[number], linewidth=0.8, linestyle=":")
    for number, (name, points) in enumerate(_speeds(findings).items()):
        axes.plot(*zip(*points, strict=True), _MARKS[number % len(_MARKS)], color="black", fillstyle="none",
                  linestyle="none", label=f"{name} (measured)")  # fmt: skip
    axes.set(xlabel="round trip, ms (0: in one process)", ylabel="tokens/s after the first round",
             ylim=(0, 1.45 * streamed))  # fmt: skip
    axes.legend(fontsize=7.5, ncols=2)
    return _svg(figure)


def _speeds(findings: Findings) -> dict[str, list[tuple[float, float]]]:
    """(round trip, tokens per second after the first round) by mode; the formulae leave the prefill out too."""
    speeds: dict[str, list[tuple[float, float]]] = {}
    for setting in findings.settings:
        gap_ms = setting.value("itl_ms")
        if gap_ms and setting.mode.plan.verifies and setting.mode.style is None:
            speeds.setdefault(setting.mode.name, []).append((setting.link_ms or 0.0, 1e3 / gap_ms))
    return speeds


def measured_costs(findings: Findings) -> tuple[float, int, CostModel] | None:
    """(alpha, k, costs) of the mode lossless with blocks of a fixed length.

    Draft steps have their measured time. Forwards of the target have their probed time, times the slowdown in the run;
    a single row has its time in mode cloud, if that was run. Shorter blocks at a text's end are left out.
    """
    fixed = (s for s in findings.settings if s.link_ms is None and s.mode.plan.mode == "lossless")
    setting = next((s for s in fixed if s.mode.plan.k), None)
    if setting is None:
        return None
    verified = [record for case in setting.all_cases for record in case.verified]
    k = max((record.num_draft for record in verified), default=0)
    alpha = measured_alpha(
        (record.num_accepted, k)
        for record in verified
        if record.num_draft == k and record.num_committed > record.num_accepted
    )
    rounds = [record for record in _later_rounds(setting) if record.num_draft == k]
    if alpha is None or not rounds:
        return None
    draft_ms = sum(record.draft.forward_ms for record in rounds) / (k * len(rounds))
    run = findings.run
    max_rows = run.target.invariant_rows if run.execution == "exact" else k + 1
    probed = CostModel(draft_ms, run.target.forward_ms, max_rows, streams=True)
    verified_ms = sum(record.target.forward_ms - record.target.prefill_ms for record in rounds) / len(rounds)
    slowdown = verified_ms / probed.verify_ms(alpha, k)
    first_ms, *more_ms = (slowdown * ms for ms in probed.forward_ms)
    if (alone := findings.setting("cloud")) and (single := _later_rounds(alone)):
        first_ms = sum(record.wall_ms for record in single) / len(single)
    return alpha, k, replace(probed, forward_ms=(first_ms, *more_ms))


def _later_rounds(setting: Setting) -> list[StepRecord]:
    """All rounds but the first of each text, which has the prompt in it."""
    return [record for case in setting.all_cases for record in case.generation.records[1:]]
