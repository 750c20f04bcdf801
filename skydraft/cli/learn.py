"""`skydraft learn`: what was collected to learn from, and what is made of it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from skydraft.characters import json_line
from skydraft.cli.model_options import ModelChoice, models_section
from skydraft.cli.sections import Command, Section, option
from skydraft.errors import OptionError

if TYPE_CHECKING:
    from skydraft.engines.vocab import Vocab
    from skydraft.learning.lesson import Lesson
    from skydraft.learning.summary import Taught

folder_argument = click.argument("folder", metavar="DIR", type=Path)


@click.group()
def learn() -> None:
    """Let the draft model learn from what the target corrects.

    Nothing is kept unless a command is given --learn DIR. Then prompts, answers and corrections lie in DIR, on this
    machine alone, until you forget them.
    """


@learn.command(cls=Command)
@folder_argument
def status(folder: Path) -> None:
    """Say what was collected in DIR, and what of it can be used."""
    from skydraft.learning.dataset import MIN_GENERATIONS
    from skydraft.learning.store import Store
    from skydraft.learning.summary import summaries

    store, skipped = Store(folder), Counter[str]()
    size, found = store.size(), summaries(store, skipped)
    click.echo(f"{folder}: {size.num_bytes / 1e6:.1f} MB in {size.num_files} files.")
    for (target, draft, _), taught in sorted(found.items(), key=lambda item: -item[1].num_lessons):
        click.echo(_line(target, draft, taught))
        if (missing := MIN_GENERATIONS - taught.num_lessons) > 0:
            click.echo(f"  {missing} more answers are needed to train with them.")
    if not found:
        click.echo(f"No answers yet. Collect with: skydraft generate PROMPT --learn {folder}")
    for what, number in sorted(skipped.items()):
        click.echo(f"{number} lines are {what}, and are left out.")


def _line(target: str, draft: str, taught: Taught) -> str:
    drafted = f"drafted by {draft[:8]}" if draft else "that nobody drafted"
    alpha = "" if taught.alpha is None else f" The draft model agreed on {taught.alpha:.3f} of {taught.num_opinions}."
    return (
        f"{taught.num_lessons} answers {drafted} and judged by {target[:8]}: {taught.num_tokens} tokens, "
        f"{taught.num_known} of them the target's, {taught.num_wrong} audited to be wrong.{alpha}"
    )


_export_section = Section(
    "export",
    "Export",
    lambda out, text: (out, text),
    [
        option("--out", "FILE", "Where to write it (default: stdout).", type=Path),
        option(
            "--text", None, "Add prompts and answers as text; loads the draft model for its tokenizer.", is_flag=True
        ),
    ],
)


@learn.command(cls=Command)
@folder_argument
@_export_section
@models_section
def export(folder: Path, export: tuple[Path | None, bool], models: ModelChoice) -> None:
    """Write all that was collected in DIR as lines of JSON."""
    from skydraft.learning.store import Store

    out, with_text = export
    skipped = Counter[str]()
    vocab = models.load_edge().vocab if with_text else None
    with _opened(out) as file:
        for lesson in Store(folder).lessons(skipped):
            print(_exported(lesson, vocab), file=file)
    if skipped:
        click.echo(f"skydraft: {skipped.total()} lines cannot be read and are left out.", err=True)


def _exported(lesson: Lesson, vocab: Vocab | None) -> str:
    found = lesson.model_dump(by_alias=True, mode="json", exclude_defaults=True)
    if vocab is not None and vocab.fingerprint == lesson.vocab:
        found |= {"prompt": vocab.written(lesson.prompt_ids), "text": vocab.decode(lesson.token_ids)}
    return json_line(found)


def _opened(out: Path | None) -> AbstractContextManager[TextIO]:
    """The file, which nobody else can read, or stdout."""
    if out is None:
        return nullcontext(sys.stdout)
    try:
        return os.fdopen(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{out} cannot be written: {error.strerror}.", hint="Choose another file.") from error


@learn.command(cls=Command)
@folder_argument
def forget(folder: Path) -> None:
    """Delete all that was collected in DIR. What was trained with it is a file of its own and stays."""
    from skydraft.learning.store import Store

    size = Store(folder).forget()
    click.echo(f"{size.num_bytes / 1e6:.1f} MB in {size.num_files} files deleted.")
