"""Options become one frozen value in sections; what was given goes before variables, a file and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from skydraft.cli.gateway import gateway
from skydraft.cli.generate import generate
from skydraft.cli.main import run
from skydraft.cli.options import DecodingChoice, decoding_section
from skydraft.cli.pair_options import ModelChoice, cloud_section, models_section
from skydraft.cli.sections import Command, Section
from skydraft.cli.serve import serve
from skydraft.config import DecodingParams, decoding_params
from skydraft.errors import OptionError
from skydraft.models import default_pair


def built(section: Section[Any], *args: str) -> Any:
    """What a command with this section is called with."""
    found: list[Any] = []

    @click.command(cls=Command)
    @section
    def command(**values: Any) -> None:
        found.extend(values.values())

    command.main(args, standalone_mode=False)
    (value,) = found
    return value


@pytest.mark.parametrize(
    ("args", "wanted", "expected"),
    [
        ([], {}, DecodingParams()),
        (["-n", "9", "--stop", "。", "--stop", "!"], {}, DecodingParams(max_new_tokens=9, stop=("。", "!"))),
        (["-n", "9"], {"max_new_tokens": 64}, DecodingParams(max_new_tokens=9)),
        ([], {"max_new_tokens": 64}, DecodingParams(max_new_tokens=64)),
        (["--style", "zh-short"], {}, decoding_params("zh-short")),
        (["--style", "zh-short", "--sentences", "3"], {}, decoding_params("zh-short", sentences=3)),
        (["--style", "zh-short", "--adjacent-repeat"], {}, decoding_params("zh-short", no_adjacent_repeat=False)),
        (["--style", "none"], {"default_style": "zh-short"}, DecodingParams()),
        ([], {"default_style": "zh-short"}, decoding_params("zh-short")),
        (["--style", "zh-short"], {"style": "zh-detailed"}, decoding_params("zh-detailed")),
    ],
)
def test_what_is_given_goes_before_a_style_and_defaults(
    args: list[str], wanted: dict[str, Any], expected: DecodingParams
) -> None:
    choice: DecodingChoice = built(decoding_section, *args)
    assert choice.params(**wanted) == expected


def test_the_default_target_is_that_of_the_default_pair() -> None:
    choice: ModelChoice = built(models_section)
    pair = default_pair()
    assert (choice.edge_model, choice.target_name) == (pair.draft, pair.target)
    assert built(models_section, "--cloud-model", "toy").target_name == "toy"


@pytest.mark.parametrize("given", ["--insecure", "--cloud-timeout 0", "--require-cloud", "--open lazy"])
def test_an_option_of_a_cloud_wants_a_cloud(given: str) -> None:
    with pytest.raises(OptionError, match="needs a cloud server") as raised:
        built(cloud_section, *given.split())
    assert "--cloud HOST:PORT" in raised.value.line and given.split()[0] in raised.value.line
    assert built(cloud_section, "--cloud", "localhost:1", *given.split()).address


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The sections' values, without a server."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(
        "skydraft.cloud.server.serve", lambda load, options, started, **_: (load(), found.update(options=options))
    )
    monkeypatch.setattr(ModelChoice, "load", lambda self, name: _Nobody(found, name, self.options))
    monkeypatch.setattr("skydraft.cloud.worker.Worker", lambda engine, limits, *, execution: engine)
    return found


class _Nobody:
    def __init__(self, found: dict[str, Any], name: str, options: Any) -> None:
        found.update(model=name, engine=options)

    def close(self) -> None:
        pass


def test_the_command_line_wins_over_variables_and_those_over_the_file(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('model = "toy"\nmax-queue = 64\nmax_sessions = 3\nport = 7000\ngrace = 1.5\nlog-prompts = true\n')
    monkeypatch.setenv("SKYDRAFT_SERVE_PORT", "7001")
    monkeypatch.setenv("SKYDRAFT_SERVE_MAX_SESSIONS", "4")
    monkeypatch.setenv("SKYDRAFT_SERVE_SESSION_TTL", "9")
    assert run(["serve", "--config", str(file), "--max-sessions", "5"]) == 0
    options = served["options"]
    assert (options.port, options.limits.max_queue, options.limits.max_sessions) == (7001, 64, 5)
    assert (options.grace_s, options.log_prompts, options.limits.session_ttl_s) == (1.5, True, 9)
    assert served["model"] == "toy" and served["engine"].max_sequences == 5
    monkeypatch.setenv("SKYDRAFT_SERVE_CONFIG", str(file))
    assert run(["serve"]) == 0 and served["options"].limits.max_queue == 64


@pytest.mark.parametrize("command", [serve, gateway])
def test_every_option_has_a_variable_and_no_two_the_same(command: click.Command) -> None:
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert all(isinstance(each.envvar, str) and each.envvar.startswith("SKYDRAFT_") for each in options)
    assert len({each.envvar for each in options}) == len(options) > 10
    assert not any(param.envvar for param in generate.params)  # a command that scripts do not start


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-quue = 3", "max-quue"), ("max-queue = ", "is not TOML"), ("max-queue = true", "max-queue"),
        ("log-prompts = 7", "log-prompts"), ("port = 1.5", "port"), ("max-queue = [3]", "one value"),
        ("[limits]\nmax-queue = 3", "an unknown option: limits"), ('max-queue = "many"', "integer"),
        ("max-queue = 0", "max-queue"), ('execution = "fast"', "fast"), ('config = "other.toml"', "config"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_one_line(
    served: Any, tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    assert run(["serve", "--config", str(file)]) == 2 and not served
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_a_file_that_is_not_there_and_a_bad_variable(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--config", str(tmp_path / "no.toml")]) == 2
    assert "No such file" in capsys.readouterr().err
    monkeypatch.setenv("SKYDRAFT_SERVE_MAX_QUEUE", "many")
    assert run(["serve"]) == 2 and "many" in capsys.readouterr().err
    assert not served
