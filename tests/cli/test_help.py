"""The help: every option in a named section, the page docs/cli.md made of it, and short flags."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from bench.reference import reference
from skydraft import __version__
from skydraft.cli.main import cli, run

from .conftest import Invoke

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(cli))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_a_named_section_and_has_a_help(name: str) -> None:
    context = click.Context(COMMANDS[name], terminal_width=110, help_option_names=["-h", "--help"])
    text = COMMANDS[name].get_help(context)
    for param in COMMANDS[name].params:
        if isinstance(param, click.Option):
            assert getattr(param, "section", ""), param.opts
            assert param.help and param.help.endswith((".", ")")), param.opts
            assert all(f"{flag} " in text or f"{flag}," in text for flag in param.opts), param.opts
    rest = text.partition("Other options:\n")[2].strip()
    assert rest.startswith("-h, --help") and rest.count("\n") == 0


def test_the_page_explains_each_option_of_each_command_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # whatever the terminal
    page = reference()
    assert PAGE.read_text(encoding="utf-8") == page, "Run: make docs"
    assert all(re.search(f"\n## skydraft {name}[ \n]", page) for name in COMMANDS)
    names = {flag for command in COMMANDS.values() for param in command.params for flag in param.opts if "--" in flag}
    assert names > {"--cloud", "--mode"} and all(name in page for name in names)


@pytest.mark.parametrize(("short", "long", "says"), [
    ("-h", "--help", "Usage: skydraft [OPT"), ("learn run -h", "learn run --help", "Usage: skydraft learn run"),
    ("-V", "--version", f"skydraft, version {__version__}\n"),
])  # fmt: skip
def test_the_help_and_the_version(invoke: Invoke, short: str, long: str, says: str) -> None:
    status, out, err = invoke(*short.split())
    assert (status, err) == (0, "") and out.startswith(says) and invoke(*long.split()) == (0, out, "")


def test_a_shell_completes_options_and_modes(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With the line for the start file of a shell that docs/try.md has."""
    monkeypatch.setenv("_SKYDRAFT_COMPLETE", "bash_complete")
    for words, expected in (("skydraft generate --mo", "--mode"), ("skydraft generate --mode l", "lossless")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        with pytest.raises(SystemExit, match="0"):
            run([])
        assert f"plain,{expected}\n" in capsys.readouterr().out
