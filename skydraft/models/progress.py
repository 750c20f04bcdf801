"""How far a download is, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

LINE_EVERY_PERCENT = 10


class Progress(Protocol):
    """Told now and then that `done_bytes` of `total_bytes` of the step called `label` are done.

    Within one step `done_bytes` never falls, except where a corrupt piece is downloaded again.
    """

    def __call__(self, done_bytes: int, total_bytes: int, label: str) -> None: ...


def no_progress(done_bytes: int, total_bytes: int, label: str) -> None:
    """Say nothing."""


class LineProgress:
    """A plain line at the start of a step, about every ten percent, and at its end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._label = ""
        self._next_percent = 0

    def __call__(self, done_bytes: int, total_bytes: int, label: str) -> None:
        if label != self._label:
            self._label, self._next_percent = label, 0
        percent = 100 * done_bytes // max(total_bytes, 1)
        if percent < self._next_percent:
            return
        self._next_percent = (percent // LINE_EVERY_PERCENT + 1) * LINE_EVERY_PERCENT
        line = f"{label}: {percent}% ({done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB)"
        print(line, file=self._stream, flush=True)


class BarProgress:
    """One bar for each step."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, done_bytes: int, total_bytes: int, label: str) -> None:
        if label not in self._tasks:
            # Not earlier: until then the hub's own bars may have the terminal.
            self._bars.start()
            self._tasks[label] = self._bars.add_task(label, total=total_bytes)
        self._bars.update(self._tasks[label], completed=done_bytes, total=total_bytes)


@contextmanager
def progress_on(stream: TextIO | None = None) -> Iterator[Progress]:
    """Show progress on `stream`, by default stderr: bars on a terminal, plain lines elsewhere."""
    stream = sys.stderr if stream is None else stream
    console = Console(file=stream)
    if not console.is_terminal:
        yield LineProgress(stream)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bars = RichProgress(*columns, console=console)
    try:
        yield BarProgress(bars)
    finally:
        if bars.live.is_started:  # otherwise it would write an empty line
            bars.stop()
