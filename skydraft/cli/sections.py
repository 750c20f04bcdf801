"""Options in sections: each section of a command's help becomes one frozen value that the command is called with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import click

T = TypeVar("T")
_REST = "Other options"
Function = TypeVar("Function", bound=Callable[..., Any])


def option(names: str, metavar: str | None, help: str, **attributes: Any) -> click.Option:
    """An option of a section; `names` are separated by spaces, as in "-q --quiet". Its help names its default."""
    help = with_default(help, attributes.get("default"))
    return click.Option(names.split(), metavar=metavar, help=help, **attributes)


def with_default(help: str, default: object) -> str:
    """`help` with the default, unless that is in it, or nothing."""
    if default is None or isinstance(default, bool) or "(default" in help:
        return help
    return f"{help.removesuffix('.')} (default: {f'{default:g}' if isinstance(default, float) else default})."


class Section(Generic[T]):
    """Options under one title. As a decorator it adds them to a command, which gets what `build` makes of them.

    `build` takes the options by their names and returns the value of the argument `name`; it may raise UsageError.
    """

    def __init__(self, name: str, title: str, build: Callable[..., T], options: Sequence[click.Option]) -> None:
        self._name = name
        self._build = build
        self._options = options
        for option in options:
            option.section = title  # type: ignore[attr-defined]  # read by Command.format_options

    def __call__(self, command: Function) -> Function:
        @functools.wraps(command)
        def call(*args: Any, **given: Any) -> Any:
            mine = {option.name: given.pop(option.name) for option in self._options}
            return command(*args, **{self._name: self._build(**mine)}, **given)

        params = list(getattr(command, "__click_params__", ()))
        vars(call)["__click_params__"] = [*params, *reversed(self._options)]
        return call  # type: ignore[return-value]  # the same function, with one argument for several


class Command(click.Command):
    """A command whose help shows options by section, in the order in which they were added."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        return ["-h", "--help"]  # also where the context is not that of our group

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (row := param.get_help_record(ctx)) is not None:
                rows.setdefault(getattr(param, "section", _REST), []).append(row)
        for title in sorted(rows, key=_REST.__eq__):
            with formatter.section(title):
                formatter.write_dl(rows[title])
