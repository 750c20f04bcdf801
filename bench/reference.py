"""The page docs/cli.md, made of the help of every command: `make docs` writes it, `make lint` compares it.

python -m bench reference
"""

import argparse
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

import click

from skydraft.cli.main import cli
from skydraft.cli.options.sections import Command

Rows: TypeAlias = list[tuple[str, str]]
_WIDTH = 114  # of lines, on every terminal
_INTRODUCTION = """\
# Command line

The help of every command, written by `make docs`; `make lint` fails when it is out of date. An option that
several commands have is explained once, at the end.

The exit status is 0 on success, 1 on failure, 2 on wrong use and 130 after Ctrl-C. A failure is one line on stderr
that says what to do next."""


def reference() -> str:
    commands = [(command, context, _sections(context)) for command, context in _commands(cli, "skydraft", None)]
    number = Counter(row for *_, sections in commands for rows in sections.values() for row in rows)
    shared: dict[str, Rows] = {}
    for *_, sections in commands:
        for title, rows in sections.items():
            told = [row for each in shared.values() for row in each]
            shared.setdefault(title, []).extend(row for row in rows if number[row] > 1 and row not in told)
    parts = [_INTRODUCTION]
    for command, context, sections in commands:
        formatter = _formatter()
        command.format_help_text(context, formatter)
        for title, rows in sections.items():
            _write(formatter, title, [row for row in rows if number[row] == 1])
        if command is cli:
            cli.format_commands(context, formatter)
        arguments = [each.make_metavar(context) for each in command.params if isinstance(each, click.Argument)]
        parts += [f"## {' '.join((context.command_path, *arguments))}", _indented(formatter)]
        if also := "; ".join(_also(sections, shared)):
            parts.append(f"Explained at the end: {also}.")
    formatter = _formatter()
    for title, rows in shared.items():
        _write(formatter, title, rows)
    return "\n\n".join((*parts, "## Options of several commands", _indented(formatter))) + "\n"


def _also(sections: dict[str, Rows], shared: dict[str, Rows]) -> Iterator[str]:
    own = [row for rows in sections.values() for row in rows]
    for title, rows in shared.items():
        common = [_name(row) for row in rows if row in own]
        left_out = [_name(row) for row in rows if row not in own]
        if common:
            rest = f"{title} except {', '.join(left_out)}" if left_out else title
            yield min(f"{title} ({', '.join(common)})", rest, key=len)


def _commands(
    command: click.Command, name: str, parent: click.Context | None
) -> Iterator[tuple[click.Command, click.Context]]:
    context = click.Context(command, parent, name, **{**command.context_settings, "terminal_width": _WIDTH})
    yield command, context
    if isinstance(command, click.Group):
        for below in sorted(command.commands):
            yield from _commands(command.commands[below], below, context)


def _sections(context: click.Context) -> dict[str, Rows]:
    """The sections of a command, without --help, which all have."""
    if not isinstance(context.command, Command):
        return {}
    sections = context.command.sections(context)
    return {title: rows for title, rows in sections.items() if rows[-1][0] != "-h, --help"}


def _name(row: tuple[str, str]) -> str:
    return next(word for word in row[0].replace(",", " ").split() if word.startswith("--"))


def _formatter() -> click.HelpFormatter:
    return click.HelpFormatter(max_width=_WIDTH, width=_WIDTH)


def _indented(formatter: click.HelpFormatter) -> str:
    return textwrap.indent(textwrap.dedent(formatter.getvalue().strip("\n")), "    ")


def _write(formatter: click.HelpFormatter, title: str, rows: Rows) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(reference(), end="")
