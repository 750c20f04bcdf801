"""`skydraft models`: which models are known and here, and how to get them."""

from __future__ import annotations

import click
from rich.table import Table

from skydraft.cli.render import console_for
from skydraft.models import EMBEDDED, cache_dir, fetch, installed, progress_on, verify


@click.group(invoke_without_command=True)
@click.pass_context
def models(context: click.Context) -> None:
    """Known models: list them, fetch them."""
    if context.invoked_subcommand is None:
        context.invoke(list_models)


@models.command("list")
def list_models() -> None:
    """Show the known models and whether they are in the cache."""
    cache = cache_dir()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "size", "license", "state"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for row in installed(cache):
        state = str(row.path) if row.present else f"not here; get it with: skydraft models fetch {row.name}"
        table.add_row(row.name, f"{row.bytes / 1e6:.0f} MB", row.license, state)
    for name in EMBEDDED:
        table.add_row(name, "", "Apache-2.0", "comes along: a toy that hears, trained on synthetic speech")
    console_for("auto").print(table)


@models.command("fetch")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--offline", is_flag=True, help="Look in the caches only.")
def fetch_models(names: tuple[str, ...], offline: bool) -> None:
    """Fetch known models into the cache, checked by hash. What is there already costs nothing."""
    with progress_on() as progress:
        paths = [fetch(name, cache_dir(), progress=progress, offline=offline) for name in names]
    for path in paths:
        verify(path)
        click.echo(path)
