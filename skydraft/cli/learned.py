"""What was learned, measured: the held-out prompts in each mode, before and after."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import click

from skydraft import api
from skydraft.cli.options import DecodingChoice
from skydraft.cli.pair_options import CloudChoice, ModelChoice
from skydraft.cli.progress import counting
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.evaluation.comparison import ComparisonRequest, LoadedPair, compare
from skydraft.evaluation.findings import Findings
from skydraft.evaluation.modes import Mode, parse_modes
from skydraft.evaluation.records import PromptEntry, read_records
from skydraft.evaluation.workloads import Workload

_MODES = ("edge", "quality", "auto", "answers")
_MAX_PROMPTS = 8  # each is answered nine times, which takes longer than the training
_KEPT = 0.95
_FIGURES = {
    "target_agreement": "agreement", "task_score": "right", "cloud_calls_per_token": "calls a token",
    "target_written_per_token": "written", "tokens_per_s": "tokens a second",
}  # fmt: skip


class Judge:
    """Answers some of the prompts that were held out, in each mode, with and without an adapter; figures are kept."""

    def __init__(
        self, workload: Workload | None, held_out: Sequence[PromptEntry], decoding: DecodingChoice, system: str | None,
        home: Path,
    ) -> None:  # fmt: skip
        self.prompts = tuple(held_out[:_MAX_PROMPTS])
        self._name = workload.name if workload else ""
        self._decoding, self._system, self._home = decoding, system, home

    def figures(self, adapter: Path, cloud: CloudChoice, models: ModelChoice) -> tuple[Findings, Findings]:
        """What each mode gave before, and what it gives with this adapter."""
        with cloud.but(require=True).sides(models, None) as (edge, target):
            assert edge and target  # as no plan does without one
            before = self._compared((*_MODES, "cloud"), edge, target, models)
            return before, self._compared(_MODES, edge.adapters.choose(str(adapter), ()), target, models)

    def _compared(self, names: Sequence[str], edge: Engine, target: Engine | Cloud, models: ModelChoice) -> Findings:
        names = [name for name in names if name != "auto" or api.is_calibrated(edge, target)]
        modes: tuple[Mode, ...] = parse_modes(",".join(names), lambda style: self._decoding.params(style=style))
        key = f"{edge.fingerprint} {[prompt.id for prompt in self.prompts]} {modes} {self._system}"
        sha256 = hashlib.sha256(key.encode()).hexdigest()
        workload = Workload(self._name, sha256, self.prompts)
        folder = self._home / "judged" / sha256[:16]
        request = ComparisonRequest(workload, modes, system=self._system)
        pair = LoadedPair(edge, target, models.options)
        return Findings(read_records(compare(request, pair, folder, _say, counting)))


def _say(line: str) -> None:
    click.echo(line, err=True)


def show_table(before: Findings, after: Findings) -> None:
    """A line for each mode: each figure before and after. And the mode that keeps the agreement at the least cost."""
    shown = {name: label for name, label in _FIGURES.items() if after.settings[0].value(name) is not None}
    click.echo(f"\n{len(after.settings[0].cases)} held-out prompts, before → after")
    click.echo(f"{'':<9}" + "".join(f"{label:>18}" for label in shown.values()))
    for setting in after.settings:
        old = before.setting(setting.mode.name)
        cells = [_change(old.value(name) if old else None, setting.value(name)) for name in shown]
        click.echo(f"{setting.mode.name:<9}" + "".join(f"{cell:>18}" for cell in cells))
    if alone := before.setting("cloud"):
        click.echo(f"{'cloud':<9}" + "".join(f"{_cell(alone.value(name)):>18}" for name in shown))
    if mode := _cheapest(after):
        click.echo(f"\n--mode {mode} keeps an agreement of {_KEPT:g} here, and asks the target least.")


def _change(old: float | None, new: float | None) -> str:
    return f"{_cell(old)} → {_cell(new)}"


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value >= 2 else f"{value:.3f}"


def _cheapest(after: Findings) -> str | None:
    costs = {
        each.mode.name: each.value("target_written_per_token") or 0.0
        for each in after.settings
        if (each.value("target_agreement") or 0.0) >= _KEPT
    }
    return min(costs, key=lambda name: costs[name], default=None)
