"""Show the progress of long work: bars on a terminal, occasional lines elsewhere."""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich import progress as rich
from rich.console import Console

from skydraft import models

_LINE_EVERY_S = 20.0


class Progress:
    """Show one step after another: a bar for each, or a line every 20 seconds, the first after `quiet_s`."""

    def __init__(self, bars: rich.Progress, quiet_s: float) -> None:
        self._bars, self._quiet_s = bars, quiet_s
        self._step, self._task, self._due = "", rich.TaskID(0), 0.0

    def show(self, step: str, done: int, total: int, note: str = "", *, num_a_unit: int = 1, unit: str = "") -> None:
        """Show `done` of `total` units of a step; a total of 0 is unknown. Lines count in `num_a_unit` units."""
        now = time.monotonic()
        if step != self._step:
            self._step, self._due = step, now + self._quiet_s
            self._bars.start()  # not earlier: others may use the terminal until then
            for before in self._bars.tasks:
                self._bars.update(before.id, visible=before.finished)
            self._task = self._bars.add_task(step, total=total or None)
        self._bars.update(self._task, description=f"{step} {note}".strip(), completed=done, total=total or None)
        if self._bars.disable and now >= self._due:
            self._due = now + (_LINE_EVERY_S if total else float("inf"))
            much = f": {done // num_a_unit} of {total // num_a_unit}{unit}"
            click.echo(f"{step}{much if total else ''}{note and f', {note}'}", err=True)


@contextmanager
def showing(*columns: rich.ProgressColumn, quiet_s: float = 0.0) -> Iterator[Progress]:
    """Show bars with these columns, by default a count and times."""
    counts = rich.MofNCompleteColumn(), rich.TimeElapsedColumn(), rich.TextColumn("left"), rich.TimeRemainingColumn()
    begin = rich.TextColumn("{task.description}"), rich.BarColumn()
    bars = rich.Progress(*begin, *(columns or counts), console=Console(stderr=True), disable=not sys.stderr.isatty())
    try:
        yield Progress(bars, quiet_s)
    finally:
        if bars.live.is_started:  # else `stop` would write an empty line
            bars.stop()


@contextmanager
def counted(total: int, what: str, done: int = 0) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of `total` units. `done` units were done before."""
    units = itertools.count(done)
    with showing(quiet_s=_LINE_EVERY_S) as progress:
        progress.show(what, next(units), total)
        yield lambda: progress.show(what, next(units), total)


@contextmanager
def downloads() -> Iterator[models.Progress]:
    with showing(rich.DownloadColumn(), rich.TransferSpeedColumn()) as progress:
        yield lambda done, total, label: progress.show(label, done, total, num_a_unit=10**6, unit=" MB")
