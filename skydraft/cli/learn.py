"""`skydraft learn`: the collected answers, the training of an adapter on them, and its use with the draft model."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skydraft.characters import json_line, one_line
from skydraft.cli.compare import show_limits
from skydraft.cli.options import open_for_writing
from skydraft.cli.pair_options import CloudChoice, ModelChoice, models_section, server_section
from skydraft.cli.sections import Command, Section, option
from skydraft.cli.terminal import TERMINAL, bar, counted
from skydraft.errors import OptionError, SkydraftError
from skydraft.gating.fitting import agreement
from skydraft.learning import training
from skydraft.learning.calibrating import calibrate_lessons, trained_on, write_calibration
from skydraft.learning.dataset import MIN_GENERATIONS, OnProgress, TrainingTask, choose, prepare, trainable_file
from skydraft.learning.lessons import AGREED, KNOWN, OPINIONS, WRONG, Lesson, Store, summaries
from skydraft.models import applied, cache_dir
from skydraft.types import short_weights

if TYPE_CHECKING:
    from skydraft.edge.cloud import Cloud
    from skydraft.engines.base import Engine
    from skydraft.engines.vocab import Vocab


folder_argument = click.argument("folder", metavar="DIR", type=Path)


@click.group()
def learn() -> None:
    """Let the draft model learn from the target's corrections.

    Nothing is kept unless you give a command --learn DIR. Then prompts, answers and corrections are kept in DIR, only
    on this machine, until you forget them.
    """


@learn.command(cls=Command)
@folder_argument
def status(folder: Path) -> None:
    """Show the answers collected in DIR, and how many can be used."""
    store, skipped = Store(folder), Counter[str]()
    (num_files, num_bytes), by_pair = store.size(), summaries(store, skipped)
    click.echo(f"{folder}: {num_bytes / 1e6:.1f} MB in {_files(num_files)}.")
    for (target, draft), taught in sorted(by_pair.items(), key=lambda item: -len(item[1])):
        click.echo(_line(target, draft, len(taught), sum(taught, Counter())))
        if (missing := MIN_GENERATIONS - len(taught)) > 0:
            click.echo(f"  {missing} more answers are needed to train with them.")
    if not by_pair:
        click.echo(f"No answers yet. Collect with: skydraft generate PROMPT --learn {folder}")
    for what, number in sorted(skipped.items()):
        click.echo(f"{number} lines are {what}, and are left out.")


def _line(target: str, draft: str, number: int, marks: Counter[str]) -> str:
    drafted = f"draft model {short_weights(draft)}" if draft else "no draft model"
    num_known, num_opinions = (sum(marks[mark] for mark in wanted) for wanted in (KNOWN, OPINIONS))
    line = (
        f"{number} {'answer' if number == 1 else 'answers'} ({drafted}, target {one_line(short_weights(target))}): "
        f"{marks.total()} tokens. The target's choice is known for {num_known}; {marks[WRONG]} differ from it."
    )
    if num_opinions:
        line += f" Both models agree on {marks[AGREED] / num_opinions:.0%} of {num_opinions} tokens."
    return line


def _files(number: int) -> str:
    return "1 file" if number == 1 else f"{number} files"


_export_section = Section("export", "Export", lambda out, text: (out, text), [
    option("--out", "FILE", "File to write (default: stdout).", type=Path),
    option("--text", None, "Add prompts and answers as text; loads the draft model for its tokenizer.", is_flag=True),
])  # fmt: skip


@learn.command(cls=Command)
@folder_argument
@_export_section
@models_section
def export(folder: Path, export: tuple[Path | None, bool], models: ModelChoice) -> None:
    """Write everything collected in DIR as lines of JSON."""
    out, with_text = export
    skipped = Counter[str]()
    vocab = models.load_edge().vocab if with_text else None
    with open_for_writing(out, mode=0o600) if out else nullcontext(sys.stdout) as file:
        for lesson in Store(folder).lessons(skipped):
            print(_exported(lesson, vocab), file=file)
    if out:
        click.echo(f"Written to {out}.", err=True)
    if skipped:
        click.echo(f"skydraft: {skipped.total()} lines cannot be read and are left out.", err=True)


def _exported(lesson: Lesson, vocab: Vocab | None) -> str:
    entry = lesson.model_dump(by_alias=True, mode="json", exclude_defaults=True)
    if vocab is not None and vocab.fingerprint == lesson.vocab:
        entry |= {"prompt": vocab.written(lesson.prompt_ids), "text": vocab.decode(lesson.token_ids)}
    return json_line(entry)


@learn.command(cls=Command)
@folder_argument
def forget(folder: Path) -> None:
    """Delete everything collected in DIR. Adapters trained on it are separate files and stay."""
    num_files, num_bytes = Store(folder).forget()
    click.echo(f"{num_bytes / 1e6:.1f} MB in {_files(num_files)} deleted.")


_train_section = Section("train", "Training", lambda out, **settings: (out, settings), [
    option("--out", "FILE", "File for the adapter.", type=Path, required=True),
    option("--minutes", "N", "Stop in time to be done in about N minutes, with reading and measuring; the same command "
           "continues (default: 0, no limit).", default=0.0),
    option("--layers num_layers", "N", "Upper layers that learn (default: 4; with 150 answers 12, which is slower).",
           type=int),
    option("--epochs", "N", "Most passes over the answers.", default=4),
    option("--rank", "N", "Rank of the changes.", default=16),
    option("--rate", "X", "Learning rate at the beginning.", default=1.5e-4),
    option("--seed", "N", "Seed of the order and of the first changes.", default=0),
])  # fmt: skip


@learn.command(cls=Command)
@folder_argument
@_train_section
@server_section
@models_section
def train(folder: Path, train: tuple[Path, dict[str, Any]], cloud: CloudChoice, models: ModelChoice) -> int:
    """Train the draft model on the answers collected in DIR, and write an adapter.

    Some answers are held out, and the target answers included general prompts once, to check the model's earlier
    abilities. The adapter is kept only if the draft model agrees with the target on significantly more held-out tokens
    and on no fewer general ones; else the exit status is 1. Ctrl-C stops; the same command continues.
    """
    out, given = train
    if not out.parent.is_dir():
        raise OptionError(f"There is no folder {out.parent}.", hint="Make it, or choose another --out.")
    cloud.check(models)
    settings = training.TrainSettings(**given)
    state = out.with_name(f"{out.name}.state")  # a stopped training continues from here
    deadline = time.monotonic() + 60 * settings.minutes if settings.minutes else float("inf")
    try:
        task = _prepared(folder, cloud, models, deadline)
        with _shown("loading") as progress:
            run_on = (models.options.device, models.options.num_threads)
            result = training.train(task, settings, run_on, state, progress, deadline)
    except TimeoutError as error:
        click.echo(f"{settings.minutes:g} minutes are not enough: {error}.")
        return 1
    click.echo(f"α on held-out answers: {result.held_out}")
    if result.guard:
        click.echo(f"α on general prompts:  {result.guard}")
    if not result.is_whole:
        click.echo(f"The {settings.minutes:g} minutes are over; the same command continues from here.")
    if result.objection:
        click.echo(f"Not kept: {result.objection}. Collect more answers, or try other --layers and --rate.")
        return 1
    result.write(out)
    if result.is_whole:
        state.unlink(missing_ok=True)
    click.echo(f"Written to {out}. Use it with: skydraft learn apply {out}")
    return 0


def _prepared(folder: Path, cloud: CloudChoice, models: ModelChoice, deadline: float) -> TrainingTask:
    """Load both models, compute the training data with them, and close them."""
    store = Store(folder)
    choose(store, deadline=deadline)  # fails on too few answers before a model is loaded
    with contextlib.ExitStack() as stack:
        edge = stack.enter_context(models.load(models.edge_model))
        trainable_file(edge)  # fails on a missing file before the target is loaded
        target: Engine | Cloud
        if cloud.address:
            target = stack.enter_context(contextlib.closing(cloud.connect(models.cloud_model)))
        else:
            target = stack.enter_context(models.load(models.target_name))
        with _shown("preparing", deadline) as progress:
            task = prepare(store, edge, target, cache_dir() / "guard", progress, deadline)
    if task.left_out:
        TERMINAL.say(f"left out: {task.left_out}.")
    numbers = len(task.trained), len(task.held_out), len(task.guard)
    click.echo("{} answers to learn from, {} held out, {} general ones.".format(*numbers), err=True)
    return task


@contextlib.contextmanager
def _shown(what: str, deadline: float = float("inf")) -> Iterator[OnProgress]:
    """Show progress. Reporting raises TimeoutError after the deadline, between two units of work."""
    with bar(what) as update:

        def progress(what: str, done: int, total: int, note: str) -> None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{done} of {total} {what} are done, and are kept; the same command continues")
            update(description=f"{what} {note}".strip(), completed=done, total=total or None)

        yield progress


_apply_section = Section("folder", "Calibration", lambda learn: learn, [
    option("--learn", "DIR", "Fit the calibrated gate again, to the answers collected in DIR.", type=Path),
])  # fmt: skip


@learn.command(cls=Command)
@click.argument("adapter", type=Path)
@_apply_section
@models_section
def apply(adapter: Path, folder: Path | None, models: ModelChoice) -> None:
    """Use the draft model with ADAPTER from now on. A copy of the file is kept beside the models.

    A calibration of the old model does not fit the new one; --learn DIR makes a new one at once.
    """
    with models.load(models.edge_model, adapter):
        pass  # it fits
    applied.apply(adapter, models.edge_model, cache_dir())
    click.echo(f"{models.edge_model} is used with {adapter} from now on.")
    click.echo(f"Undo it with: skydraft learn revert --edge-model {models.edge_model}")
    if folder is None:
        click.echo("Mode auto needs a calibration again: skydraft learn calibrate DIR, or skydraft calibrate.")
        return
    try:
        _calibrate(folder, models)
    except SkydraftError as error:
        click.echo(f"The gate is not calibrated: {error.line}")


@learn.command(cls=Command)
@models_section
def revert(models: ModelChoice) -> None:
    """Use the draft model as it was before `learn apply`. The adapter's file stays."""
    applied.revert(models.edge_model, cache_dir())
    click.echo(f"{models.edge_model} is used as it was. The file that you applied is still there.")


@learn.command(cls=Command)
@folder_argument
@models_section
def calibrate(folder: Path, models: ModelChoice) -> None:
    """Fit the gate calibrated:AGREEMENT, and with it mode auto, to the answers collected in DIR.

    The draft model, with its applied adapter, reads the answers again; the target is not needed. The limits come only
    from answers that the adapter was not trained on, since it agrees too well on the others.
    """
    _calibrate(folder, models)


def _calibrate(folder: Path, models: ModelChoice) -> None:
    learned_from = trained_on(models.adapter)
    with models.load_edge() as edge:
        chosen = choose(Store(folder), edge.vocab)
        if chosen.skipped:
            click.echo(f"Left out: {chosen.left_out}.", err=True)
        with counted(len(chosen.lessons), "answers") as done:
            calibration, unseen = calibrate_lessons(chosen, edge, learned_from, folder, done)
    if learned_from:
        total = len(chosen.lessons)
        click.echo(f"The limits come from {len(unseen)} of {total} answers: the adapter was trained on the others.")
    share, num_tokens = agreement(unseen)
    click.echo(f"There {calibration.draft.name} agrees with the target on {share:.3f} of {num_tokens} tokens.")
    out = write_calibration(calibration, cache_dir())
    show_limits(calibration)
    click.echo(f"Written to {out}")
