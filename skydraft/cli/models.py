"""`skydraft models`: which models are known and on this machine; get them, remove them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from skydraft.cli.model_options import SOURCE_OPTION
from skydraft.cli.render import console_for
from skydraft.cli.sections import Command, Section, option
from skydraft.errors import UnknownModel
from skydraft.models import (
    EMBEDDED,
    cache_dir,
    embedded_path,
    fetch,
    installed,
    known_models,
    present_path,
    progress_on,
    remove,
    verify,
)
from skydraft.models.manifest import known_model


def _known(context: click.Context, param: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, checked before anything is done for the first of them."""
    for name in names:
        if name in EMBEDDED:
            raise UnknownModel(f"{name} comes with skydraft: it is always here and cannot be removed.")
        known_model(name, known_models())
    return names


_names = click.argument("names", nargs=-1, required=True, metavar="NAME...", callback=_known)
_fetch_section = Section(
    "where",
    "Models",
    lambda **where: where,
    [
        option("--offline", None, "Look only on this machine, also in the Hugging Face cache.", is_flag=True),
        SOURCE_OPTION,
    ],
)


@click.group(invoke_without_command=True)
@click.pass_context
def models(context: click.Context) -> None:
    """List, fetch and remove the models that skydraft knows by name."""
    if context.invoked_subcommand is None:
        context.invoke(list_models)


@models.command("list", cls=Command)
def list_models() -> None:
    """Show the known models and which of them are on this machine."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "size", "license", "state"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for row in installed(cache_dir()):
        state = str(row.path) if row.present else f"not here; get it with: skydraft models fetch {row.name}"
        table.add_row(row.name, f"{row.bytes / 1e6:.0f} MB", row.license, state)
    for name in EMBEDDED:
        size = _bytes_in(embedded_path(name)) / 1e6
        table.add_row(
            name, f"{size:.1f} MB", "Apache-2.0", "always here: a toy for speech, trained on synthetic voices"
        )
    console = console_for("auto")
    console.print(table)
    folder = cache_dir()
    console.print(
        f"\nAll of it lies in {folder}, {_bytes_in(folder) / 1e6:.0f} MB; SKYDRAFT_HOME names another folder."
    )


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@models.command("fetch", cls=Command)
@_names
@_fetch_section
def fetch_models(names: tuple[str, ...], where: dict[str, Any]) -> None:
    """Download known models and check them against their published hashes. A model that is here is only checked."""
    with progress_on() as progress:
        paths = [fetch(name, cache_dir(), progress=progress, **where) for name in names]
    for path in paths:
        verify(path)
        click.echo(path)


@models.command("path", cls=Command)
@click.argument("names", nargs=-1, metavar="[NAME]...")
def show_path(names: tuple[str, ...]) -> None:
    """Print the file of each model that is here; without a NAME, the folder of all downloaded models and profiles."""
    if not names:
        click.echo(cache_dir())
    for path in [embedded_path(name) if name in EMBEDDED else present_path(name, cache_dir()) for name in names]:
        click.echo(path)


@models.command("remove", cls=Command)
@_names
def remove_models(names: tuple[str, ...]) -> None:
    """Delete known models from this machine, with what unfinished downloads of them left."""
    for name in names:
        for path in remove(name, cache_dir()):
            click.echo(f"Removed {path}")
