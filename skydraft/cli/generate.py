"""`skydraft generate`: one prompt, streamed and coloured by origin, or as one JSON object."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import click

from skydraft.characters import json_line
from skydraft.cli.cloud_options import CloudChoice, cloud_section
from skydraft.cli.keep_options import KeepChoice, keep_section
from skydraft.cli.model_options import ModelChoice, models_section
from skydraft.cli.options import (
    DecodingChoice,
    GateChoice,
    OutputChoice,
    PromptChoice,
    as_text,
    decoding_section,
    gate_section,
    output_section,
    prompt_section,
)
from skydraft.cli.render import (
    as_json,
    console_for,
    harmless,
    is_colored,
    legend,
    show_tokens,
    summary_line,
    trace_line,
)
from skydraft.cli.sections import Command
from skydraft.cli.speech_options import STYLE, Speech, SpeechChoice, audio_section
from skydraft.cli.stdin import with_piped
from skydraft.cli.terminal import TERMINAL
from skydraft.decoding.generation import Generation
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.prompts.messages import spoken

_INTERRUPTED = 130


@click.command(cls=Command)
@click.argument("prompt", required=False, callback=as_text)
@prompt_section
@audio_section
@decoding_section
@gate_section()
@cloud_section
@models_section
@output_section
@keep_section
def generate(
    prompt: str | None, writing: PromptChoice, speech: SpeechChoice, decoding: DecodingChoice, gate: GateChoice,
    cloud: CloudChoice, models: ModelChoice, output: OutputChoice, keep: KeepChoice,
) -> int:  # fmt: skip
    """Answer PROMPT; if it is -, it is read from stdin. What is piped in beside another PROMPT is put before it.

    The answer goes to stdout, everything else to stderr. With --audio you can leave PROMPT out: then the speaker is
    described. Ctrl-C ends the answer after the current round.
    """
    cloud.check(models, gate)
    keep.check(gate)
    models = dataclasses.replace(models, is_quiet=output.quiet or output.json)
    recording = speech.read(speech.audio) if speech.audio else None
    if writing.may_be_piped(prompt, has_audio=recording is not None):
        prompt = with_piped(prompt, quiet=models.is_quiet)
    messages = writing.messages(prompt, has_audio=recording is not None)
    messages = spoken(messages, recording.audio if recording else None)
    has_audio = speech.is_heard(messages)
    request = GenerateRequest(
        messages,
        plan=gate.plan,
        params=decoding.params(default_style=STYLE if recording else None),
        raw=writing.raw,
        share_audio=speech.share(gate, cloud) if has_audio else "features",
        execution=gate.execution,
        calibration=gate.calibration,
        with_signals=output.trace is not None,
    )
    with output.open_trace() as trace, cloud.sides(models, gate) as (edge, target):
        if not has_audio:
            _note_unused_ears(edge, target)
        with keep.start(request, edge=edge, cloud=target) as generation:
            _show(generation, output, trace)
            _finish(generation, recording.used(generation, request.share_audio) if recording else None, output)
    return _INTERRUPTED if generation.finish_reason == "interrupted" else 0


def _note_unused_ears(*sides: object) -> None:
    """Say so where a model that takes speech gets none."""
    for side in sides:
        if isinstance(side, Engine) and side.takes_audio:
            TERMINAL.say(f"{side.name} takes speech; without --audio it answers the text alone.")
            return


def _show(generation: Generation, output: OutputChoice, trace: TextIO | None) -> None:
    """Run the generation to its end, or to Ctrl-C, and print it as it comes."""
    console = None if output.json else console_for(output.color)
    with caught_interrupt() as interrupted:
        for done, tokens in generation.rounds():
            if console:
                show_tokens(console, tokens)
            if trace:
                print(trace_line(done, tokens), file=trace, flush=True)
            if interrupted and (held := generation.interrupt()) and console:
                TERMINAL.write(harmless(held, console))


@contextmanager
def caught_interrupt(then: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """The first Ctrl-C is noted, and `then` is called; a second one is a KeyboardInterrupt."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        seen.append(number)
        then()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _finish(generation: Generation, speech: Speech | None, output: OutputChoice) -> None:
    if output.json:
        print(json_line(as_json(generation, speech)))
        return
    TERMINAL.end_line()
    if output.quiet:
        return
    if speech:
        click.echo(speech, err=True)
    errors = console_for(output.color, stderr=True)
    if is_colored(errors):
        errors.print(legend(generation.origins))
    errors.print(summary_line(generation))
