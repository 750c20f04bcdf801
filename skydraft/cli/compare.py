"""`skydraft compare`: prompts by modes, measured side by side; `skydraft report`: the page again, from records."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import click

from skydraft.cli.model_options import ModelChoice, models_section
from skydraft.cli.options import DecodingChoice, decoding_section
from skydraft.cli.progress import counted
from skydraft.cli.sections import Command, Section, option
from skydraft.config import Execution
from skydraft.errors import MissingDependency, OptionError
from skydraft.evaluation.comparison import LINK_PROMPTS, ComparisonRequest, LoadedPair
from skydraft.evaluation.comparison import compare as run_comparison
from skydraft.evaluation.folder import alone_in
from skydraft.evaluation.modes import parse_modes
from skydraft.evaluation.records import read_records
from skydraft.evaluation.report.page import check_installed, write_report
from skydraft.evaluation.workloads import Workload, read_prompts
from skydraft.gating.calibration import read_calibration
from skydraft.prompts.pair import ShareAudio

_MODES = "edge,cloud,lossless,lossless;k=5,fluency,quality"
_MAX_NEW_TOKENS = 64
_NUMBER = click.IntRange(min=1)


def _workload(path: Path, limit: int | None, categories: str) -> Workload:
    return read_prompts(path, limit=limit, categories=tuple(filter(None, categories.split(","))))


def prompts_section(*, categories: bool = False) -> Section[Workload]:
    """Which prompts to use."""
    options = [
        option("--prompts path", "FILE", "Prompts: .jsonl, or one a line.", required=True, type=Path),
        option("--limit", "N", "Use the first N prompts only.", type=_NUMBER),
    ]
    if not categories:
        return Section("workload", "Prompts", lambda path, limit: _workload(path, limit, ""), options)
    chosen = option("--categories", "A,B,…", "Use prompts of these categories only (default: all).", default="")
    return Section("workload", "Prompts", _workload, [*options, chosen])


@dataclass(frozen=True, slots=True)
class LinkChoice:
    """Emulated links. Raises OptionError for an option about links where there is none."""

    emulate_rtt: tuple[float, ...]
    emulate_kbps: float | None
    link_prompts: int | None

    def __post_init__(self) -> None:
        given = {"--emulate-kbps": self.emulate_kbps, "--link-prompts": self.link_prompts}
        if not self.emulate_rtt and (useless := [name for name, value in given.items() if value is not None]):
            raise OptionError(f"{useless[0]} is about an emulated link.", hint="Ask for one with --emulate-rtt MS.")


link_section = Section(
    "links",
    "Emulated links",
    LinkChoice,
    [
        option(
            "--emulate-rtt", "MS", "Run over an emulated link with this round trip, too; can be repeated.",
            type=click.FloatRange(min=0), multiple=True,
        ),
        option("--emulate-kbps", "KBPS", "Its bandwidth (default: no limit).", type=click.FloatRange(min=0)),
        option("--link-prompts", "N", f"Prompts over the link (default: {LINK_PROMPTS}).", type=_NUMBER),
    ],
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ComparisonChoice:
    """What is run, how often, and where the results go."""

    modes: str
    repetitions: int
    execution: Execution
    calibration: Path | None
    share_audio: ShareAudio
    no_scores: bool
    no_report: bool
    out: Path


comparison_section = Section(
    "chosen",
    "What to compare",
    ComparisonChoice,
    [
        option(
            "--modes", "A,B,…", "Modes with commas between; also gate=G;k=N;eager;style=S, hf-target, hf-assisted.",
            default=_MODES,
        ),
        option("--repetitions", "N", "Runs of each.", type=_NUMBER, default=1),
        option("--execution", None, "As in generate.", type=click.Choice(get_args(Execution)), default="exact"),
        option("--calibration", "FILE", "Use FILE for calibrated gates.", type=Path),
        option(
            "--share-audio", None, "What the target gets of recordings.",
            type=click.Choice(get_args(ShareAudio)), default="features",
        ),
        option("--no-scores", None, "Do not have both models judge the texts (agreement, NLL).", is_flag=True),
        option("--no-report", None, "Write records alone; skydraft report makes the page later.", is_flag=True),
        option("--out", "DIR", "Folder for the results.", default="comparison", type=Path),
    ],
)  # fmt: skip


@click.command(cls=Command)
@prompts_section(categories=True)
@comparison_section
@link_section
@models_section
@decoding_section
def compare(
    workload: Workload, chosen: ComparisonChoice, links: LinkChoice, models: ModelChoice, decoding: DecodingChoice
) -> None:
    """Run prompts in several modes, interleaved and warm; write records, figures and a report to DIR.

    An interrupted comparison continues where it stopped when it is started again with the same options.
    """
    request = ComparisonRequest(
        workload,
        parse_modes(chosen.modes, lambda style: decoding.params(style=style, max_new_tokens=_MAX_NEW_TOKENS)),
        chosen.repetitions,
        links.emulate_rtt,
        links.emulate_kbps or 0.0,
        links.link_prompts or LINK_PROMPTS,
        chosen.execution,
        chosen.share_audio,
        read_calibration(chosen.calibration) if chosen.calibration else None,
        scores=not chosen.no_scores,
        command="skydraft " + shlex.join(sys.argv[1:]),
    )
    if not chosen.no_report:
        _check_report(workload)
    with alone_in(chosen.out):
        pair = LoadedPair(*models.load_pair(), models.target_name, models.options, models.offline)
        records = run_comparison(request, pair, chosen.out, lambda line: click.echo(line, err=True), counted)
        if not chosen.no_report:
            _write_report(chosen.out, records)


def _check_report(workload: Workload) -> None:
    """Raise MissingDependency now for what the report would lack after hours of work."""
    try:
        check_installed(has_references=any(prompt.references for prompt in workload.prompts))
    except MissingDependency as error:
        hint = f"{error.hint.removesuffix('.')}, or add --no-report."
        raise MissingDependency(error.message, hint=hint) from error


@click.command(cls=Command)
@click.argument("folder", type=Path)
def report(folder: Path) -> None:
    """Make summary.json and report.html in FOLDER again, from its records.jsonl. Needs no model."""
    _write_report(folder, folder / "records.jsonl")


def _write_report(out: Path, records: Path) -> None:
    click.echo(f"Report: {write_report(read_records(records), out)}", err=True)
