"""`skydraft models`: list, download and remove models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from skydraft.cli.pair_options import SOURCE_OPTION
from skydraft.cli.sections import Command, Section, option
from skydraft.cli.terminal import console_for
from skydraft.errors import UnknownModel
from skydraft.models import (
    EMBEDDED,
    cache_dir,
    embedded_path,
    fetch_model,
    installed,
    present_path,
    progress_on,
    remove,
    verify,
)
from skydraft.models.adapted import merged_models
from skydraft.models.manifest import known_model


def _known(context: click.Context, param: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, all checked before the first is used."""
    merged = {each.path.name for each in merged_models(cache_dir())}
    for name in names:
        if name in EMBEDDED:
            raise UnknownModel(f"{name} comes with skydraft: it is always here and cannot be removed.")
        if name not in merged:
            known_model(name)
    return names


_names = click.argument("names", nargs=-1, required=True, metavar="NAME...", callback=_known)
_fetch_section = Section("where", "Models", lambda **where: where, [
    option("--offline", None, "Look only on this machine, also in the Hugging Face cache.", is_flag=True),
    SOURCE_OPTION,
])  # fmt: skip


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
    for merged in merged_models(cache_dir()):
        used = f"applied to {', '.join(merged.applied_to)}" if merged.applied_to else "not applied"
        state = f"merged with {merged.adapter or 'an adapter'}; {used}"
        table.add_row(merged.path.name, f"{_bytes_in(merged.path) / 1e6:.0f} MB", "as its base", state)
    for name in EMBEDDED:
        state = "always here: a toy for speech, trained on synthetic voices"
        table.add_row(name, f"{_bytes_in(embedded_path(name)) / 1e6:.1f} MB", "Apache-2.0", state)
    console, folder = console_for("auto"), cache_dir()
    console.print(table)
    size = f"{_bytes_in(folder) / 1e6:.0f} MB"
    console.print(f"\nAll files are in {folder}, {size}; SKYDRAFT_HOME names another folder.")


def _bytes_in(place: Path) -> int:
    return sum(path.stat().st_size for path in (place, *place.rglob("*")) if path.is_file())


@models.command("fetch", cls=Command)
@_names
@_fetch_section
def fetch_models(names: tuple[str, ...], where: dict[str, Any]) -> None:
    """Download known models and check them against their published hashes. A model that is here is only checked."""
    wanted = [known_model(name) for name in names]
    with progress_on() as progress:
        paths = [fetch_model(model, cache_dir(), progress=progress, **where) for model in wanted]
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
    """Delete models from this machine: known ones, and merged ones that are not applied."""
    for name in names:
        for path in remove(name, cache_dir()):
            click.echo(f"Removed {path}")
