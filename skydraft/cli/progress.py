"""A bar on stderr that counts what is done and says how long the rest will take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def counted(total: int, what: str, done: int = 0) -> Iterator[Callable[[], None]]:
    """Yields a function to be called after each of `total` pieces of work; `done` were there before."""
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total, completed=done)
        yield lambda: progress.advance(task)
