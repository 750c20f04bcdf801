"""`skydraft learn`: show, export and delete collected answers; calibrate with them; undo a training."""

from collections import Counter, defaultdict
from pathlib import Path

import click

from skydraft.characters import json_line, one_line
from skydraft.cli.compare import keep_calibration
from skydraft.cli.options.pair import ModelChoice, models_section
from skydraft.cli.options.sections import Command
from skydraft.cli.progress import counted
from skydraft.cli.terminal import TERMINAL
from skydraft.errors import OptionError
from skydraft.files import is_adapter_name
from skydraft.gating.fitting import agreement
from skydraft.lab.learning.calibrating import calibrate_lessons, read_lessons
from skydraft.lab.learning.dataset import MIN_GENERATIONS, choose
from skydraft.lab.learning.lessons import KNOWN, UNJUDGED, WRONG, Store
from skydraft.models import adapters, cache_dir
from skydraft.types import short_weights

folder_argument = click.argument("folder", metavar="DIR", type=Path)


@click.group()
def learn() -> None:
    """Let the draft model learn a task from the target.

    `learn run` trains it on the target's answers to a file of prompts. With --learn DIR other commands collect prompts,
    answers and corrections in DIR, only on this machine, until you run `learn forget DIR`.
    """


@learn.command(cls=Command)
@folder_argument
def status(folder: Path) -> None:
    """Show the answers collected in DIR, and how many can be used."""
    store, skipped = _store(folder), Counter[str]()
    numbers, marks = Counter[tuple[str, str]](), defaultdict[tuple[str, str], Counter[str]](Counter)
    for lesson in store.lessons(skipped):
        numbers[lesson.target, lesson.draft] += 1
        marks[lesson.target, lesson.draft].update(lesson.marks)
    click.echo(f"{folder}: {_written_out(*store.size())}.")
    for (target, draft), number in numbers.most_common():
        click.echo(_line(target, draft, number, marks[target, draft]))
    for what, number in sorted(skipped.items()):
        click.echo(f"{number} lines are {what}, and are left out.")


def _store(folder: Path) -> Store:
    if not folder.is_dir():
        raise OptionError(f"There are no answers: {folder} is not a folder.", hint="Check its name.")
    return Store(folder)


def _line(target: str, draft: str, number: int, marks: Counter[str]) -> str:
    drafted = f"draft model {short_weights(draft)}" if draft else "no draft model"
    needed = f" {MIN_GENERATIONS - number} more are needed to train with them." if number < MIN_GENERATIONS else ""
    return (
        f"{number} answers of {marks.total()} tokens ({drafted}, target {one_line(short_weights(target))}).{needed}\n"
        f"  The target wrote or confirmed {sum(marks[mark] for mark in KNOWN)} of the tokens, disagreed with "
        f"{marks[WRONG]}, and has not checked {marks[UNJUDGED]}."
    )


def _written_out(num_files: int, num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB in {num_files} files"


@learn.command(cls=Command)
@folder_argument
@models_section
def export(folder: Path, models: ModelChoice) -> None:
    """Print everything collected in DIR as lines of JSON. Texts are added if the draft model has their vocabulary."""
    store, skipped, vocab = _store(folder), Counter[str](), models.load_edge().vocab
    for lesson in store.lessons(skipped):
        entry = lesson.model_dump(by_alias=True, mode="json", exclude_defaults=True)
        if vocab.fingerprint == lesson.vocab and max(*lesson.prompt_ids, *lesson.token_ids) < vocab.size:
            entry |= {"prompt": vocab.written(lesson.prompt_ids), "text": vocab.decode(lesson.token_ids)}
        click.echo(json_line(entry))
    if skipped:
        TERMINAL.say(f"{skipped.total()} lines cannot be read and are left out.")


@learn.command(cls=Command)
@folder_argument
@models_section
def forget(folder: Path, models: ModelChoice) -> None:
    """Delete everything collected in DIR, or the answers that adapter NAME learned from.

    The adapter stays; skydraft learn revert undoes its training.
    """
    home = adapters.folder_of(models.edge_model, cache_dir()) / folder.name
    if is_adapter_name(str(folder)) and home.is_dir() and not (folder.is_dir() and Store(folder).files()):
        folder = home
    if not folder.is_dir():
        raise OptionError(f"There is nothing to forget: {folder} does not exist.", hint="Check its name.")
    click.echo(f"{_written_out(*Store(folder).forget())} deleted.")
    click.echo("Adapters trained on them stay. To undo the last training: skydraft learn revert NAME")


@learn.command(cls=Command)
@click.argument("name")
@models_section
def revert(name: str, models: ModelChoice) -> None:
    """Undo the last training of adapter NAME. The three trainings before it can be undone, too."""
    if adapters.revert(name, models.edge_model, cache_dir()):
        click.echo(f"The last training of {name} was undone.")
    else:
        click.echo(f"{name} was removed; it had no earlier training.")


@learn.command(cls=Command)
@folder_argument
@models_section
def calibrate(folder: Path, models: ModelChoice) -> None:
    """Fit the gate calibrated:AGREEMENT, which mode auto uses, to the answers collected in DIR.

    The draft model reads the answers again, with --adapter NAME if given. The target is not needed. The limits come
    only from answers that the adapter was not trained on.
    """
    store = _store(folder)
    with models.load_edge() as base:
        edge = base.adapters.choose(None, ())
        learned_from = base.adapters.trained_on(edge)
        lessons, left_out = choose(store, edge.vocab, max_len=edge.context_len)
        if left_out:
            click.echo(f"Left out: {left_out}.", err=True)
        with counted(len(lessons), "answers") as done:
            texts = read_lessons(edge, lessons, done)
        calibration, unseen = calibrate_lessons(lessons, texts, edge, folder.name, learned_from)
    share, num_tokens = agreement(unseen)
    click.echo(f"On {len(unseen)} answers {calibration.draft.name} agrees on {share:.3f} of {num_tokens} tokens.")
    keep_calibration(calibration)
