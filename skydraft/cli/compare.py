"""`skydraft compare`, `report` and `calibrate`: measure modes on prompts, and fit the calibrated gate."""

import hashlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from skydraft.cli.options.decoding import DecodingChoice, decoding_section
from skydraft.cli.options.pair import CloudChoice, ModelChoice, models_section, server_section
from skydraft.cli.options.sections import Command, loose, option, section
from skydraft.cli.progress import counted
from skydraft.config import Execution
from skydraft.decoding.plan import make_plan
from skydraft.errors import MissingDependency, OptionError
from skydraft.gating.calibration import MAX_BLOCK, Calibration, read_calibration
from skydraft.gating.hand_back import HandBack
from skydraft.lab.evaluation.comparison import ComparisonRequest, LoadedPair
from skydraft.lab.evaluation.comparison import compare as run_comparison
from skydraft.lab.evaluation.delayed_link import DelayedLink
from skydraft.lab.evaluation.findings import Findings
from skydraft.lab.evaluation.modes import parse_modes
from skydraft.lab.evaluation.records import read_records
from skydraft.lab.evaluation.report.page import write_report
from skydraft.lab.evaluation.report.plots import load_pyplot
from skydraft.lab.evaluation.runner import alone_in
from skydraft.lab.evaluation.summary import SettingFigures
from skydraft.lab.evaluation.workloads import Workload, read_prompts
from skydraft.lab.tasks.sets import SETS, read_tasks
from skydraft.models import cache_dir
from skydraft.prompts.audio import load_audio
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import ShareAudio
from skydraft.protocol.address import is_loopback, is_url, parse_address

_MODES = "edge,cloud,lossless,lossless;k=5,fluency,quality"
_STOCK_MODES = _MODES.replace("lossless;k=5,", "")  # servers without skydraft only stream in lossless
_MAX_NEW_TOKENS = 64
_NUMBER = click.IntRange(min=1)
_SHOWN = (0.85, 0.9, 0.95, 0.98)


def _workload(path: Path | None, tasks: str | None, limit: int | None) -> Workload:
    if tasks is not None:
        if path:
            raise OptionError("Give either --tasks or --prompts, not both.")
        return read_tasks(tasks, limit=limit)
    if path is None:
        raise OptionError("There are no prompts to compare the modes on.", hint="Give --prompts FILE or --tasks NAME.")
    return read_prompts(path, limit=limit)


def _together(paths: Sequence[Path], limit: int | None) -> Workload:
    files = [read_prompts(path, limit=limit) for path in paths]
    digests = "".join(file.sha256 for file in files)
    sha256 = digests if len(files) == 1 else hashlib.sha256(digests.encode()).hexdigest()
    return Workload(" + ".join(file.name for file in files), sha256, sum((file.prompts for file in files), ()))


prompts_section = section("workload", "Prompts", _workload, [
    option("--prompts path", "FILE", "Prompts: .jsonl, or one a line.", type=Path),
    option("--tasks", "A,B,…", f"Tasks with checks instead: files, or {', '.join(SETS)} (NAME:dev: its other half)."),
    option("--limit", "N", "Use only the first N prompts (of each set of tasks).", type=_NUMBER),
])  # fmt: skip
comparison_options = loose("What to compare", [
    option("--modes", "A,B,…", "Modes, separated by commas; also gate=G;k=N;hand-back=H;style=S "
           f"(default: {_MODES}).", type=str),
    option("--repetitions", "N", "Runs of each prompt in each mode.", type=_NUMBER, default=1),
    option("--emulate-rtt emulated_rtt_ms", "MS", "With --cloud on this machine: emulate a link with this round trip "
           "time.", type=click.FloatRange(min=0)),
    option("--execution", None, "See generate.", type=Execution),
    option("--calibration", "FILE", "Use FILE for calibrated gates.", type=Path),
    option("--share-audio", None, "Part of recordings that the target gets.", type=ShareAudio, default="features"),
    option("--run-code", None, "Run code that models write for tasks, in bubblewrap or Docker.", is_flag=True),
    option("--no-scores", None, "Do not score the texts with both models (agreement, NLL).", is_flag=True),
    option("--out", "DIR", "Folder for the results.", default="comparison", type=Path),
])  # fmt: skip


@click.command(cls=Command)
@prompts_section
@comparison_options
@server_section
@models_section
@decoding_section
def compare(
    workload: Workload, cloud: CloudChoice, models: ModelChoice, decoding: DecodingChoice, modes: str | None,
    out: Path, calibration: Path | None, no_scores: bool, **fields: Any,
) -> None:  # fmt: skip
    """Run prompts or tasks in several modes, in turn. Write records, tables, plots and a page to DIR.

    With --cloud the target is the model on that server, over the real link; then texts are not scored. Without
    --adapter NAME the draft model is measured without adapter.

    To continue an interrupted comparison, start it again with the same options.
    """
    names = modes or (_STOCK_MODES if is_url(cloud.address or "") else _MODES)
    request = ComparisonRequest(
        workload, parse_modes(names, lambda style: decoding.params(style=style, max_new_tokens=_MAX_NEW_TOKENS)),
        calibration=read_calibration(calibration) if calibration else None, scores=not no_scores, think=decoding.think,
        command="skydraft " + shlex.join(sys.argv[1:]), **fields,
    )  # fmt: skip
    cloud = cloud.but(require=True)  # a text without the target would not count
    with _slowed(cloud, request.emulated_rtt_ms) as cloud, alone_in(out), cloud.sides(models, None) as (edge, target):
        assert edge and target  # `sides` returns both without a plan
        pair = LoadedPair(edge, target, models.options)
        _write_report(out, run_comparison(request, pair, out, lambda line: click.echo(line, err=True), counted))


@contextmanager
def _slowed(cloud: CloudChoice, rtt_ms: float | None) -> Iterator[CloudChoice]:
    """Put an emulated link before the server if `rtt_ms` is given. Raises OptionError for a server elsewhere."""
    if rtt_ms is None:
        yield cloud
        return
    address = cloud.address or ""
    host, port = ("", 0) if is_url(address) or not address or "," in address else parse_address(address)
    if not is_loopback(host):
        hint = "Start skydraft serve on this machine, and give --cloud localhost:PORT."
        raise OptionError("--emulate-rtt slows the link to one server on this machine.", hint=hint)
    with DelayedLink((host.strip("[]"), port), rtt_ms / 2) as link:
        yield cloud.but(link.address)


@click.command(cls=Command)
@click.argument("folder", type=Path)
def report(folder: Path) -> None:
    """Write the page, tables and plots of FOLDER again, from its records.jsonl. No model is needed."""
    _write_report(folder, folder / "records.jsonl")


def _write_report(out: Path, path: Path) -> None:
    records = read_records(path)
    if unjudged := len(records.unjudged()):
        what = f"Answers without a verdict, which do not count: {unjudged}."
        click.echo(f"{what} To judge them, run the same skydraft compare again.", err=True)
    _show_table(write_report(Findings(records), out).settings)
    click.echo(f"Report: {out / 'report.html'}", err=True)
    try:
        load_pyplot()
    except MissingDependency as error:
        click.echo(f"The report has no plots. {error.line} Then: skydraft report {shlex.quote(str(out))}", err=True)


_SHOWN_MEASURES = {
    "agreement": "target_agreement", "right": "task_score", "calls a token": "cloud_calls_per_token",
    "target wrote": "target_written_per_token", "tokens/s": "tokens_per_s",
}  # fmt: skip


def _show_table(settings: Sequence[SettingFigures]) -> None:
    """Print the main measures, one line for each mode. table.md has all of them."""
    width = max((len(each.mode) for each in settings), default=4)
    click.echo(f"{'mode':<{width}}" + "".join(f"{head:>15}" for head in _SHOWN_MEASURES))
    for each in settings:
        cells = ("" if value is None else f"{value:.3f}" for value in map(each.value, _SHOWN_MEASURES.values()))
        click.echo(f"{each.mode:<{width}}" + "".join(f"{cell:>15}" for cell in cells))


_fitted_section = section("workload", "Prompts", _together, [
    option("--prompts paths", "FILE", "Prompts: .jsonl, or one a line; can be repeated.", required=True, type=Path,
           multiple=True),
    option("--limit", "N", "Use only the first N prompts of each file.", type=_NUMBER),
])  # fmt: skip
_fitting_options = loose("Fitting", [
    option("-n --max-new-tokens", "N", "Longest text, in tokens.", type=_NUMBER, default=_MAX_NEW_TOKENS),
    option("--out", "FILE", "File for the calibration (default: in the cache, where skydraft finds it).", type=Path),
])  # fmt: skip


@click.command(cls=Command)
@_fitted_section
@_fitting_options
@models_section
def calibrate(workload: Workload, max_new_tokens: int, out: Path | None, models: ModelChoice) -> None:
    """Fit the gate calibrated:AGREEMENT, which mode auto uses, to a pair of models.

    Each model answers the prompts by itself, greedily, in this process. Then the draft model's uncertainty at each
    token is compared with the target's choice. Use prompts like your later ones.
    """
    from skydraft.gating.fitting import agreement, fit
    from skydraft.lab.learning.calibrating import label_texts, side_of

    base, cloud = models.load_pair()
    edge = base.adapters.choose(None, ())
    questions = (asked(each.prompt, audio=load_audio(each.audio) if each.audio else None) for each in workload.prompts)
    with counted(len(workload.prompts), "prompts") as done:
        texts = label_texts(edge, cloud, questions, max_new_tokens, done)
    result = fit(texts, side_of(edge), side_of(cloud), workload.name, max_new_tokens, sha256=workload.sha256)
    share, num_tokens = agreement(text for text in texts if text.path == "draft")
    click.echo(f"{edge.name} alone agrees with {cloud.name} on {share:.3f} of {num_tokens} tokens.")
    keep_calibration(result, out)


def keep_calibration(calibration: Calibration, out: Path | None = None) -> None:
    """Write a calibration. Print the calls of mode auto for some agreements, before its gate adapts to a text."""
    from skydraft.lab.learning.calibrating import write_calibration

    out, auto = write_calibration(calibration, cache_dir(), out), make_plan("auto")
    curve = calibration.curve(auto.k or MAX_BLOCK, auto.hand_back or HandBack())
    for wanted in (wanted for wanted in _SHOWN if wanted > curve.points[-1].agreement):
        at = [point for point in curve.points if point.agreement >= wanted][-1]
        click.echo(
            f"calibrated:{wanted:g} takes {at.calls_per_token:.3f} calls a token, "
            f"and the large model writes {at.written_per_token:.3f}."
        )
    click.echo(f"Written to {out}")
