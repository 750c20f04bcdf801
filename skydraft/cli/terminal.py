"""What stands on the terminal's last line, so that a notice never begins in the middle of an answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.cells import set_cell_size
from rich.console import Console

from skydraft.characters import one_line


class Terminal:
    """Text on stdout, notices and states on stderr: on a terminal both are the same screen."""

    def __init__(self) -> None:
        self._is_open = False  # whether the last line has text and no end
        self._clear: Callable[[], None] = _nothing  # takes away the state that is shown, if any is

    def write(self, text: str) -> None:
        """Write a part of an answer to stdout, as it is."""
        sys.stdout.write(text)
        sys.stdout.flush()
        self._is_open = not text.endswith("\n") if text else self._is_open

    def end_line(self) -> None:
        """Write the end of an answer's last line."""
        self.write("\n")

    def say(self, message: str) -> None:
        """Write a notice to stderr, as one line of its own; a state that is shown gives way to it."""
        self._clear()
        is_one_screen = sys.stdout.isatty() and sys.stderr.isatty()
        begin = "\n" if self._is_open and is_one_screen else ""
        if is_one_screen:
            self._is_open = False
        click.echo(f"{begin}skydraft: {one_line(message)}", err=True)

    @contextmanager
    def state(self, what: str, *, quiet: bool = False) -> Iterator[Callable[[], None]]:
        """Show what takes long, for as long as it does, if stderr is a terminal; yields what takes it away sooner."""
        console = Console(stderr=True)
        if quiet or not sys.stderr.isatty():
            yield _nothing
            return

        def clear() -> None:
            if self._clear is clear:
                self._clear = _nothing
                _show("" if console.is_dumb_terminal else "\r\x1b[K")

        self._clear = clear
        _show(f"{what}\n" if console.is_dumb_terminal else _fitted(what, console.width))
        try:
            yield clear
        finally:
            clear()


def _nothing() -> None:
    return None


def _show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _fitted(text: str, width: int) -> str:
    """`text` cut to one line of a terminal, so that it can be taken away again."""
    return set_cell_size(one_line(text), width - 1).rstrip()


TERMINAL = Terminal()
