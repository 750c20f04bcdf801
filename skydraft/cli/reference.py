"""The page docs/cli.md, made of the help of every command: `make docs` writes it, `make lint` compares it."""

from __future__ import annotations

from collections.abc import Iterator

import click

from skydraft.cli.main import cli

_WIDTH = 110  # of lines, on every terminal
_INTRODUCTION = """\
# Command line

The help of every command, written by `make docs`; `make lint` fails when it is out of date.

The exit status is 0 on success, 1 on failure, 2 on wrong use and 130 after Ctrl-C. A failure is one line on stderr
that says what to do next."""


def reference() -> str:
    """The page, in Markdown."""
    sections = (f"## {path}\n\n```text\n{text}\n```" for path, text in _helps(cli, "skydraft", None))
    return "\n\n".join((_INTRODUCTION, *sections)) + "\n"


def _helps(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    """(path, help) of a command and of its subcommands."""
    settings = {**command.context_settings, "terminal_width": _WIDTH}
    context = click.Context(command, parent, name, **settings)
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for below in sorted(command.commands):
            yield from _helps(command.commands[below], below, context)


if __name__ == "__main__":
    print(reference(), end="")
