"""Sections: options become one frozen value, and what was given goes before defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
import pytest

from skydraft.cli.cloud_options import CloudChoice
from skydraft.cli.model_options import ModelChoice, models_section
from skydraft.cli.options import DecodingChoice, decoding_section, gate_section
from skydraft.cli.sections import Command, Section
from skydraft.config import STYLES, DecodingParams, decoding_params
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


@pytest.mark.parametrize("section", [decoding_section, gate_section(), gate_section("quality"), models_section])
def test_a_value_is_frozen(section: Section[Any]) -> None:
    value = built(section)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)


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


@pytest.mark.parametrize("args", [["--style", "zh-long"], ["--top-p", "2"], ["--stop", ""]])
def test_what_is_out_of_range_is_refused_when_the_value_is_built(args: list[str]) -> None:
    with pytest.raises(OptionError):
        built(decoding_section, *args)


def test_the_default_target_is_that_of_the_default_pair() -> None:
    choice: ModelChoice = built(models_section)
    pair = default_pair()
    assert (choice.edge_model, choice.target_name) == (pair.draft, pair.target)
    assert built(models_section, "--cloud-model", "toy").target_name == "toy"


@pytest.mark.parametrize("given", [{"insecure": True}, {"timeout_s": 0.0}, {"require": True}, {"open_when": "lazy"}])
def test_an_option_of_a_cloud_wants_a_cloud(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="about a cloud server") as raised:
        CloudChoice(**given)
    assert "--cloud HOST:PORT" in raised.value.line
    assert CloudChoice("localhost:1", **given).address


def test_every_style_can_be_chosen() -> None:
    for style in STYLES:
        assert built(decoding_section, "--style", style).params() == decoding_params(style)
