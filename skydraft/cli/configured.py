"""Options of a command from a TOML file and from the environment, for servers that nobody types the command of."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from skydraft.cli.sections import option


def configured(prefix: str) -> Callable[[click.Command], click.Command]:
    """Let each option of a command be given by a variable too (PREFIX_MAX_QUEUE for --max-queue), and by --config.

    The command line wins over variables, and those over the file.
    """

    def decorate(command: click.Command) -> click.Command:
        # Copies, since sections share their options with other commands.
        command.params = [_with_variable(param, prefix) for param in command.params]
        file = option(
            "--config", "FILE",
            "Read options from a TOML file, by their long names: max-queue = 64. What is given here, or by a variable "
            f"such as {prefix}_PORT, wins over it.",
            type=click.Path(path_type=Path), is_eager=True, expose_value=False, callback=_read_into,
            envvar=f"{prefix}_CONFIG",
        )  # fmt: skip
        file.section = getattr(command.params[0], "section", "")  # type: ignore[attr-defined]  # as those of a Section
        command.params.append(file)
        return command

    return decorate


def _with_variable(param: click.Parameter, prefix: str) -> click.Parameter:
    param = copy.copy(param)
    if isinstance(param, click.Option):
        param.envvar = f"{prefix}_{_long_name(param).replace('-', '_').upper()}"
    return param


def _long_name(param: click.Parameter) -> str:
    return max(param.opts, key=len).removeprefix("--")


def _read_into(context: click.Context, param: click.Parameter, file: Path | None) -> None:
    """Make what stands in the file the defaults of the command."""
    if file is None:
        return
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.BadParameter(f"{file} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{file} is not TOML: {error}.") from error
    options = {_long_name(each): each for each in context.command.params if isinstance(each, click.Option)}
    known = {name: each for name, each in options.items() if each is not param}
    defaults: dict[str, Any] = {}
    for key, value in given.items():
        if (name := key.replace("_", "-")) not in known:
            raise click.BadParameter(f"{file} has an option that is not known here: {key}.")
        defaults[known[name].name or ""] = _checked(known[name], f"{key} in {file}", value)
    context.default_map = defaults


def _checked(option: click.Option, where: str, value: Any) -> Any:
    """The value, if it is of a kind that the option can have."""
    if option.is_flag != isinstance(value, bool):
        raise click.BadParameter(f"{where} must be {'true or false' if option.is_flag else 'a value, not a bool'}.")
    if isinstance(value, list) != option.multiple or isinstance(value, dict):
        raise click.BadParameter(f"{where} must be {'a list' if option.multiple else 'one value'}.")
    return value
