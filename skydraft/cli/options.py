"""Options that more than one command takes, and how they become the objects of the Python interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from skydraft.api import load
from skydraft.config import STYLES
from skydraft.engines.base import Engine, EngineOptions
from skydraft.models import default_pair, progress_on

Command = TypeVar("Command", bound=Callable[..., Any])

_PAIR = default_pair()

_MODELS = [
    click.option(
        "--edge-model", default=_PAIR.draft, show_default=True, help="Draft model: name, .gguf, folder, hub id."
    ),
    click.option("--cloud-model", help=f"Target model in this process, likewise (default {_PAIR.target})."),
]

_RUN = [
    click.option("--context", default=4096, show_default=True, metavar="N", help="Context length in tokens."),
    click.option("--threads", default=0, metavar="N", help="Threads; 0 takes all cores."),
    click.option("--gpu-layers", default=0, metavar="N", help="GGUF: layers on the GPU; -1 takes all."),
    click.option("--device", default="cpu", show_default=True, help="transformers: cpu or cuda."),
    click.option("--dtype", default="float32", show_default=True, help="transformers: float32, bfloat16 or float16."),
    click.option("--quantization", default="none", show_default=True, help="transformers on CUDA: none, 8bit or 4bit."),
    click.option("--offline", is_flag=True, help="Use what is on this disk, ask no network."),
]

_DECODING = [
    click.option("--style", metavar="S", help=f"A set of constraints: {', '.join(STYLES)}; or none."),
    click.option("--temperature", type=float, help="0 is greedy (default)."),
    click.option("--top-k", type=int, help="Keep the K best tokens; 0 is off."),
    click.option("--top-p", type=float, help="Keep the smallest set of this mass; 1 is off."),
    click.option("--min-p", type=float, help="Keep tokens with this share of the best probability; 0 is off."),
    click.option("--seed", type=int, help="Seed of the noise (default 0)."),
    click.option("--max-new-tokens", type=int, help="Stop after so many tokens (128; 64 in a comparison)."),
    click.option(
        "--min-new-tokens", type=int, help="No sentence stop before, nor an end token unless --sentences are said."
    ),
    click.option("--sentences", type=int, help="Stop after so many sentences; 0 is off."),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be repeated."),
    click.option("--repetition-penalty", type=float, help="As in transformers; 1 is off."),
    click.option("--no-repeat-ngram-size", type=int, help="As in transformers; 0 is off."),
    click.option("--content-penalty", type=float, help="Penalty on repeated CJK content tokens; 1 is off."),
    click.option("--content-ngram-size", type=int, help="Ban repeated n-grams of CJK content; 0 is off."),
    click.option(
        "--no-adjacent-repeat/--adjacent-repeat", default=None, help="Ban the same CJK character twice in a row."
    ),
    click.option("--comma-gap", type=int, help="CJK characters between punctuation and the next comma; 0 is off."),
    click.option("--full-stop-gap", type=int, help="Likewise before a full stop, which is made unlikely, not banned."),
    click.option("--full-stop-shift", type=float, help="By how much (default -8)."),
]


def engine_options(command: Command) -> Command:
    """Add the options that say which models to run and how."""
    return add_options(_MODELS + _RUN, command)


def run_options(command: Command) -> Command:
    """Add the options that say how to run a model."""
    return add_options(_RUN, command)


def decoding_options(command: Command) -> Command:
    """Add the options of DecodingParams. A value not given is None, so that a style shows through."""
    return add_options(_DECODING, command)


def add_options(options: list[Callable[[Any], Any]], command: Command) -> Command:
    """Decorate a command with several options, shown in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def target_name(given: dict[str, Any]) -> str:
    """The target model of this process."""
    return given["cloud_model"] or _PAIR.target


def build_engine_options(given: dict[str, Any], *, max_sequences: int = 1, shared_cache: bool = False) -> EngineOptions:
    """Take the engine's options out of what was given. Raises OptionError."""
    return EngineOptions(
        max_sequences=max_sequences,
        shared_cache=shared_cache,
        context_len=given.pop("context"),
        num_threads=given.pop("threads"),
        gpu_layers=given.pop("gpu_layers"),
        device=given.pop("device"),
        dtype=given.pop("dtype"),
        quantization=given.pop("quantization"),
    )


def load_engine(model: str, options: EngineOptions, *, offline: bool) -> Engine:
    """Open a model, with a progress bar on stderr should it have to be fetched."""
    with progress_on() as progress:
        return load(model, options, offline=offline, progress=progress)
