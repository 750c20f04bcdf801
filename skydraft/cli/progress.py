"""Progress of long work in several steps: a bar on a terminal, and a line now and then in a file."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.progress import TextColumn, TimeRemainingColumn

from skydraft.cli.terminal import bar

_LINE_EVERY_S = 20.0


class Progress:
    """Shows one step after another. In a file, a line at the beginning of each step and every 20 seconds."""

    def __init__(self, update: Callable[..., None]) -> None:
        self._update = update
        self._step, self._began, self._told = "", 0.0, 0.0
        self._first = 0  # units that were done when the step began

    def show(self, step: str, done: int, total: int, note: str = "") -> None:
        """`done` of `total` units of a step; a total of 0 is not known."""
        now = time.monotonic()
        is_new = step != self._step
        if is_new:
            self._step, self._began, self._first, self._told = step, now, done, 0.0
        self._update(description=f"{step} {note}".strip(), completed=done, total=total or None)
        if not sys.stderr.isatty() and total and now - self._told >= _LINE_EVERY_S:
            self._told = now
            click.echo(f"{step}: {done} of {total}{self._left(done, total, now)}{note and f', {note}'}", err=True)

    def _left(self, done: int, total: int, now: float) -> str:
        if done <= self._first:
            return ""
        left_s = (now - self._began) / (done - self._first) * (total - done)
        return f", {left_s / 60:.0f} minutes left" if left_s >= 90 else f", {left_s:.0f} s left"


@contextmanager
def showing(what: str) -> Iterator[Progress]:
    with bar(what, None, TextColumn("left"), TimeRemainingColumn()) as update:
        yield Progress(update)


@contextmanager
def counting(total: int, what: str, done: int = 0) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each of `total` units; `done` units were done before."""
    units = itertools.count(done)
    with showing(what) as progress:
        progress.show(what, next(units), total)
        yield lambda: progress.show(what, next(units), total)
