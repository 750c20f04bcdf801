"""Options in sections: each section of a command's help becomes one frozen value, an argument of the command."""

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click

PORTS = click.IntRange(0, 65535)
_RARE = "Rarely needed"
_REST = "Other options"
Function = TypeVar("Function", bound=Callable[..., Any])


def option(names: str, metavar: str | None, help: str, **attributes: Any) -> click.Option:
    """Make an option of a section, with the default in its help. Spaces separate `names`, as in "-q --quiet".

    `type` is a click type, or a Literal with the choices.
    """
    if get_origin(attributes.get("type")) is Literal:
        attributes["type"] = click.Choice(get_args(attributes["type"]))
    help = with_default(help, attributes.get("default"))
    return click.Option(names.split(), metavar=metavar, help=help, **attributes)


def with_default(help: str, default: object) -> str:
    """Add the default to `help`, unless `help` names it or there is none."""
    if default is None or isinstance(default, bool) or "(default" in help:
        return help
    return f"{help.removesuffix('.')} (default: {f'{default:g}' if isinstance(default, float) else default})."


def listening(port: int) -> list[click.Option]:
    return [
        option("--host", "HOST", "Address to listen on.", default="127.0.0.1"),
        option("--port", "PORT", "Port to listen on; 0 is any free one.", type=PORTS, default=port),
        option("--tls-cert", "FILE", "PEM certificate chain.", type=Path),
        option("--tls-key", "FILE", "Private key of the certificate, as PEM (default: in --tls-cert).", type=Path),
    ]


def section(
    name: str, title: str, build: Callable[..., object], options: Sequence[click.Option], rare: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Return a decorator that adds options under a title to a command. The command's argument `name` gets the result of
    `build`.

    `build` takes the options by name, and may raise UsageError. Help shows all `rare` options together at the end.
    """
    added = loose(title, options, rare)

    def decorate(command: Function) -> Function:
        @functools.wraps(command)
        def call(*args: Any, **given: Any) -> Any:
            mine = {option.name: given.pop(option.name) for option in options}
            return command(*args, **{name: build(**mine)}, **given)

        return added(call)  # type: ignore[return-value]  # the same function, with one argument for several

    return decorate


def loose(title: str, options: Sequence[click.Option], rare: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Return a decorator that adds options under a title to a command. Each option is an argument of the command."""
    for option in options:
        # Read by Command.format_options.
        option.section = _RARE if option.name in rare else title  # type: ignore[attr-defined]

    def decorate(command: Function) -> Function:
        vars(command)["__click_params__"] = [*getattr(command, "__click_params__", []), *reversed(options)]
        return command

    return decorate


class Command(click.Command):
    """A command whose help shows options by section, in the order of their decorators."""

    def sections(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        rows: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (row := param.get_help_record(ctx)) is not None:
                rows.setdefault(getattr(param, "section", _REST), []).append(row)
        return {title: rows[title] for title in sorted(rows, key=(_RARE, _REST).__contains__)}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, rows in self.sections(ctx).items():
            with formatter.section(title):
                formatter.write_dl(rows)


def configured(prefix: str) -> Callable[[click.Command], click.Command]:
    """Let each option also come from an environment variable: PREFIX_MAX_QUEUE for --max-queue."""

    def decorate(command: click.Command) -> click.Command:
        # Copies, because other commands share the sections' options.
        command.params = [copy.copy(param) for param in command.params]
        for param in command.params:
            if isinstance(param, click.Option):
                name = max(param.opts, key=len).removeprefix("--")
                param.envvar = f"{prefix}_{name.replace('-', '_').upper()}"
        return command

    return decorate
