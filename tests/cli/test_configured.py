"""Options of servers from a file and from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from skydraft.cli import serve_engine as module
from skydraft.cli.gateway import gateway
from skydraft.cli.main import run
from skydraft.cli.serve import serve


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The sections' values, without a server."""
    found: dict[str, Any] = {}
    monkeypatch.setattr("skydraft.cloud.server.serve", lambda engine, options, started: found.update(options=options))
    monkeypatch.setattr(module, "load_engine", lambda name, options, **more: _Nobody(found, name, options))
    monkeypatch.setattr("skydraft.cloud.worker.Worker", lambda engine, limits, *, execution: engine)
    return found


class _Nobody:
    def __init__(self, found: dict[str, Any], name: str, options: Any) -> None:
        found.update(model=name, engine=options)

    def close(self) -> None:
        pass


def test_the_command_line_wins_over_variables_and_those_over_the_file(
    built: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('model = "toy"\nmax-queue = 64\nmax_sessions = 3\nport = 7000\ngrace = 1.5\nlog-prompts = true\n')
    monkeypatch.setenv("SKYDRAFT_SERVE_PORT", "7001")
    monkeypatch.setenv("SKYDRAFT_SERVE_MAX_SESSIONS", "4")
    monkeypatch.setenv("SKYDRAFT_SERVE_SESSION_TTL", "9")
    assert run(["serve", "--config", str(file), "--max-sessions", "5"]) == 0
    options = built["options"]
    assert (options.port, options.limits.max_queue, options.limits.max_sessions) == (7001, 64, 5)
    assert (options.grace_s, options.log_prompts, options.limits.session_ttl_s) == (1.5, True, 9)
    assert built["model"] == "toy" and built["engine"].max_sequences == 5
    monkeypatch.setenv("SKYDRAFT_SERVE_CONFIG", str(file))
    assert run(["serve"]) == 0 and built["options"].limits.max_queue == 64


@pytest.mark.parametrize("command", [serve, gateway])
def test_every_option_has_a_variable_and_no_two_the_same(command: click.Command) -> None:
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert all(isinstance(each.envvar, str) and each.envvar.startswith("SKYDRAFT_") for each in options)
    assert len({each.envvar for each in options}) == len(options) > 10


def test_other_commands_have_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from skydraft.cli.generate import generate

    assert not any(param.envvar for param in generate.params)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-quue = 3", "max-quue"),
        ("max-queue = ", "is not TOML"),
        ("max-queue = true", "max-queue in"),
        ("log-prompts = 1", "true or false"),
        ("max-queue = [3]", "one value"),
        ("[limits]\nmax-queue = 3", "not known here: limits"),
        ('max-queue = "many"', "many"),
        ("max-queue = 0", "max-queue"),
        ('execution = "fast"', "fast"),
        ('config = "other.toml"', "config"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(
    built: Any, tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    assert run(["serve", "--config", str(file)]) == 2 and not built
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_a_file_that_is_not_there_and_a_bad_variable(
    built: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--config", str(tmp_path / "no.toml")]) == 2
    assert "No such file" in capsys.readouterr().err
    monkeypatch.setenv("SKYDRAFT_SERVE_MAX_QUEUE", "many")
    assert run(["serve"]) == 2 and "many" in capsys.readouterr().err
    assert not built
