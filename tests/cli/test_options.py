"""Options become one frozen value in sections; what was given goes before variables and defaults."""

from typing import Any

import click
import pytest

from skydraft.cli.gateway import gateway
from skydraft.cli.generate import generate
from skydraft.cli.options.decoding import DecodingChoice, decoding_section
from skydraft.cli.options.sections import Command
from skydraft.cli.serve import serve
from skydraft.config import DecodingParams, decoding_params


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
    found = serve.make_context("serve", ["--max-sessions", "5"]).params
    names = ("cloud_model", "port", "max_sessions", "session_ttl_s")
    assert [found[name] for name in names] == ["toy", 7001, 5, 9]


@pytest.mark.parametrize("command", [serve, gateway])
def test_every_option_has_a_variable_and_no_two_the_same(command: click.Command) -> None:
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert all(isinstance(each.envvar, str) and each.envvar.startswith("SKYDRAFT_") for each in options)
    assert len({each.envvar for each in options}) == len(options) > 10
    assert not any(param.envvar for param in generate.params)  # a command that scripts do not start
