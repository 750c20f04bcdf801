"""`skydraft generate`: answer one prompt, as coloured text or as one JSON object."""

import dataclasses
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TextIO

import click

from skydraft import api
from skydraft.characters import json_line
from skydraft.cli.options.decoding import (
    DecodingChoice,
    GateChoice,
    KeepChoice,
    OutputChoice,
    as_text,
    decoding_section,
    gate_section,
    keep_section,
    open_for_writing,
    output_section,
)
from skydraft.cli.options.pair import CloudChoice, ModelChoice, cloud_section, models_section
from skydraft.cli.options.sections import Command, loose, option
from skydraft.cli.options.speech import STYLE, SpeechChoice, audio_line, audio_section
from skydraft.cli.terminal import TERMINAL, console_for, harmless, show_summary, show_tokens, trace_line
from skydraft.decoding.accounts.audits import Auditor
from skydraft.decoding.generation import Generation
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import PromptError
from skydraft.prompts.messages import asked

INTERRUPTED = 130  # the shells' status of a process ended by Ctrl-C
_MAX_NEW_TOKENS = 512  # default for texts; captions use the general one
_SILENT_S = 2.0  # how long to wait for the first byte of a pipe
_RAW = option("--raw", None, "Continue PROMPT as it is, without the model's chat template.", is_flag=True)


@click.command(cls=Command)
@click.argument("prompt", required=False, callback=as_text)
@gate_section
@loose("What to write", [option("-s --system", "TEXT", "System prompt.", callback=as_text), _RAW])
@decoding_section
@output_section
@cloud_section
@models_section
@keep_section
@audio_section
def generate(
    prompt: str | None, system: str | None, raw: bool, speech: SpeechChoice, decoding: DecodingChoice,
    gate: GateChoice, cloud: CloudChoice, models: ModelChoice, output: OutputChoice, keep: KeepChoice,
) -> int:  # fmt: skip
    """Answer PROMPT; - reads it from stdin. Piped text is put before any other PROMPT.

    The answer goes to stdout, everything else to stderr. With --audio you can leave PROMPT out: then the answer
    describes the speaker. Ctrl-C ends the answer after the current round.
    """
    keep.check(verifies=gate.plan.verifies)
    models = dataclasses.replace(models, is_quiet=output.quiet or output.json)
    recording = speech.read(speech.audio) if speech.audio else None
    if prompt is not None or not recording:
        prompt = with_piped(prompt)
    request = GenerateRequest(
        asked(prompt, system, recording.audio if recording else None), gate.plan,
        decoding.params(default_style=STYLE) if recording else decoding.params(max_new_tokens=_MAX_NEW_TOKENS),
        raw=raw, think=decoding.think, share_audio=speech.share(gate, cloud) if recording else "features",
        execution=gate.execution, breaks_loops=True, with_signals=output.trace is not None,
    )  # fmt: skip
    with (
        open_for_writing(output.trace, "a") if output.trace else nullcontext() as trace,
        cloud.sides(models, gate.plan, audits=keep.audit_share > 0) as (edge, target),
        keep.watching(edge, target) as keep,
        api.start(request, edge=edge, cloud=target, observers=keep.observers) as generation,
    ):
        _show(generation, output, trace)
        if keep.auditor:
            with suppress(KeyboardInterrupt):  # Ctrl-C ends this wait, but the answer is still printed
                keep.auditor.finish()
        audio = recording.figures(generation, request.share_audio) if recording else None
        _finish(generation, audio, output, keep.auditor)
        if keep.auditor and keep.auditor.counts["lost"]:
            TERMINAL.say("the answer was not audited: the cloud did not read it.")
    return INTERRUPTED if generation.finish_reason == "interrupted" else 0


def _show(generation: Generation, output: OutputChoice, trace: TextIO | None) -> None:
    console = None if output.json else console_for(output.color)
    with caught_interrupt() as interrupted:
        for done, tokens in generation.rounds():
            if trace:
                with suppress(OSError):  # the old content stays until now; a pipe has none
                    trace.truncate(None if done.record.round else 0)
                print(trace_line(done, tokens), file=trace, flush=True)
            if console:
                show_tokens(console, tokens)
            if interrupted and (held := generation.interrupt()) and console:
                TERMINAL.write(harmless(held, console))


@contextmanager
def caught_interrupt(then: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """Record the first Ctrl-C and call `then`. A second one raises KeyboardInterrupt."""
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


def _finish(
    generation: Generation, audio: dict[str, Any] | None, output: OutputChoice, auditor: Auditor | None
) -> None:
    if output.json:
        stats = generation.stats
        stats = dataclasses.replace(stats, audits=auditor.figures_of(generation)) if auditor else stats
        names = ("text", "token_ids", "origins", "finish_reason")
        answer = {name: getattr(generation, name) for name in names} | {"prompt_tokens": generation.num_prompt_tokens}
        answer |= {"reasoning": generation.reasoning} if generation.reasoning else {}
        answer |= {"stats": dataclasses.asdict(stats), "receipt": dataclasses.asdict(generation.receipt)}
        print(json_line(answer | ({"audio": audio} if audio else {})))
        return
    TERMINAL.write("\n")
    if output.quiet:
        return
    if audio:
        click.echo(audio_line(audio), err=True)
    show_summary(generation, output.color, auditor)


def with_piped(prompt: str | None) -> str | None:
    """Return the piped text with `prompt` on the next line, like the tool `llm`. Read nothing from a terminal.

    Ignore a pipe that is silent for two seconds, with a notice: it may never end. Raises PromptError for bytes that are
    not UTF-8.
    """
    text = _piped()
    if not text.strip():
        return prompt
    return text if prompt is None else text.removesuffix("\n") + "\n" + prompt


def _piped() -> str:
    try:
        if sys.stdin.isatty():
            return ""
        if not select.select([sys.stdin], [], [], _SILENT_S)[0]:
            TERMINAL.say(f"nothing came from stdin for {_SILENT_S:g} s, so it is left out.")
            return ""
        text = sys.stdin.read()
        text.encode()  # in some locales, bytes that are not UTF-8 arrive as lone surrogates
        return text
    except UnicodeError as error:
        raise PromptError("The piped text is not valid UTF-8.", hint="Convert it first, with iconv.") from error
    except (OSError, ValueError):  # closed, write-only, or a Windows pipe
        return ""
