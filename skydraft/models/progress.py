"""Download progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

_LINE_EVERY_PERCENT = 10
# Called now and then with the done bytes of a step, all its bytes, and its label. Within one step the done bytes never
# fall, except where a corrupt piece is downloaded again.
Progress: TypeAlias = Callable[[int, int, str], None]


def no_progress(done_bytes: int, total_bytes: int, label: str) -> None:
    """Show nothing."""


@contextmanager
def progress_on(stream: TextIO | None = None) -> Iterator[Progress]:
    """Show progress on `stream`, by default stderr: a bar for each step on a terminal, plain lines elsewhere."""
    stream = sys.stderr if stream is None else stream
    console = Console(file=stream)
    if not console.is_terminal:
        yield _lines(stream)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bars, tasks = RichProgress(*columns, console=console), dict[str, TaskID]()

    def progress(done_bytes: int, total_bytes: int, label: str) -> None:
        if label not in tasks:
            bars.start()  # only now: until then the hub's own bars may use the terminal
            tasks[label] = bars.add_task(label, total=total_bytes)
        bars.update(tasks[label], completed=done_bytes, total=total_bytes)

    try:
        yield progress
    finally:
        if bars.live.is_started:  # otherwise it would write an empty line
            bars.stop()


def _lines(stream: TextIO) -> Progress:
    due: dict[str, int] = {}  # percent at which a step's next line is due

    def progress(done_bytes: int, total_bytes: int, label: str) -> None:
        percent = 100 * done_bytes // max(total_bytes, 1)
        if percent >= due.get(label, 0):
            due[label] = (percent // _LINE_EVERY_PERCENT + 1) * _LINE_EVERY_PERCENT
            line = f"{label}: {percent}% ({done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB)"
            print(line, file=stream, flush=True)

    return progress
