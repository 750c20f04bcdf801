"""`skydraft generate`: one prompt, streamed and coloured by origin, or as one JSON object."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import click

from skydraft import api
from skydraft.cli.connection import cloud_options, cloud_use_options, take_cloud
from skydraft.cli.options import build_engine_options, decoding_options, engine_options, load_engine, target_name
from skydraft.cli.render import as_json, console_for, legend, show_tokens, summary_line, trace_line
from skydraft.cli.speech import STYLE, Recording, Speech, read_recording, speech_line, speech_options, take_share
from skydraft.config import MODES, DecodingParams, decoding_params
from skydraft.decoding.calibration import read_calibration
from skydraft.decoding.plan import Plan, make_plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.errors import OptionError, PromptError

_INTERRUPTED = 130


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "--audio", type=Path, metavar="FILE", help="Speech to be heard (wav, flac, mp3, ogg); style zh-short then."
)
@speech_options
@click.option("--mode", metavar="M", help=f"One of {', '.join(MODES)} (default lossless).")
@click.option(
    "--gate", metavar="G", help="always, never, entropy:THETA, margin:M, prob:P or calibrated:A; +digits, +dates."
)
@click.option(
    "--k",
    metavar="N",
    help="Tokens in a block, or auto: from measured times, so that with a gate texts may differ from run to run.",
)
@click.option("--accept", metavar="RULE", help="exact (default), or top:R, which is lossy.")
@click.option("--eager", is_flag=True, help="End a block right after the first unsure token.")
@click.option(
    "--execution",
    type=click.Choice(["exact", "throughput"]),
    help="exact (default) verifies in forwards that are bit-identical to single rows. A server has its own.",
)
@click.option("--calibration", type=Path, metavar="FILE", help="For a calibrated gate, instead of the pair's own.")
@cloud_options
@cloud_use_options
@engine_options
@decoding_options
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--json", "json_out", is_flag=True, help="Print one JSON object at the end instead of text.")
@click.option("--trace", metavar="FILE", help="Write one JSON line per round to FILE.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True)
@click.option("--quiet", is_flag=True, help="No line of figures on stderr.")
def generate(
    prompt: str | None, audio: Path | None, json_out: bool, trace: str | None, color: str, quiet: bool, **given: Any
) -> int:
    """Generate text for PROMPT; - reads it from stdin. Text goes to stdout, everything else to stderr.

    With --audio the prompt may be left away: the speaker is described.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    request = _parse(text, given, audio)
    _check_cloud(request["plan"], given)
    recording = _listen(request, given, audio)
    with ExitStack() as stack:
        trace_file = stack.enter_context(_open_trace(trace)) if trace else None
        remote = take_cloud(given)
        if remote:
            stack.callback(remote.close)
        generation = stack.enter_context(_start(request, given, remote, with_signals=trace is not None))
        interrupted = stack.enter_context(_catch_interrupt())
        console = None if json_out else console_for(color)
        for done, tokens in generation.rounds():
            if console:
                show_tokens(console, tokens)
            if trace_file:
                print(trace_line(done, tokens), file=trace_file, flush=True)
            if interrupted and (held := generation.interrupt()) and console:
                sys.stdout.write(held)
        speech = recording.used(generation, request["share_audio"]) if recording else None
        _finish(generation, speech, console is None, color, quiet)
    return _INTERRUPTED if generation.finish_reason == "interrupted" else 0


def _parse(prompt: str | None, given: dict[str, Any], audio: Path | None) -> dict[str, Any]:
    """The arguments of `api.generate` but for the engines; takes them out of `given`. Nothing is opened yet."""
    mode, gate, execution = given["mode"], given["gate"], given.pop("execution")
    if given["cloud"] and execution:
        raise OptionError("--execution is the server's to choose.", hint="Give it to skydraft serve.")
    plan = make_plan(**{name: given.pop(name) for name in ("mode", "gate", "k", "accept", "eager")})
    if execution == "throughput" and (mode or ("lossless" if gate is None else "")) == "lossless":
        raise OptionError(
            "--execution throughput is exact but for near ties, and mode lossless is exact.",
            hint="Give --gate always and no --mode.",
        )
    system, raw = given.pop("system"), given.pop("raw")
    if raw and system:
        raise OptionError("--system is part of the chat template, which --raw leaves away.")
    names = {field.name for field in dataclasses.fields(DecodingParams)}
    chosen = {name: given.pop(name) for name in names}
    style = given.pop("style") or (STYLE if audio else "none")
    params = decoding_params(None if style == "none" else style, **{**chosen, "stop": chosen["stop"] or None})
    if prompt is None and audio is None:
        raise PromptError("There is nothing to answer.", hint="Give a prompt, or --audio FILE.")
    if prompt is not None and not prompt.strip():
        raise PromptError("The prompt is empty.", hint="Give at least one word, or - to read it from stdin.")
    if not all(_is_text(text) for text in (prompt or "", system or "", *params.stop)):
        raise PromptError("The prompt, or another text, is not valid UTF-8.", hint="Convert it first, with iconv say.")
    calibration = read_calibration(path) if (path := given.pop("calibration")) else None
    return {"prompt": prompt, "plan": plan, "params": params, "system": system, "raw": raw} | {
        "execution": execution or "exact",
        "calibration": calibration,
    }


def _listen(request: dict[str, Any], given: dict[str, Any], path: Path | None) -> Recording | None:
    """Read the recording, if there is one, into the request. Raises PromptError or OptionError."""
    max_audio_s = given.pop("max_audio_s")
    if path is None:
        if given.pop("share_audio"):
            raise OptionError("--share-audio says what becomes of a recording, which --audio FILE names.")
        return None
    share = take_share(given, request["plan"], is_remote=given["cloud"] is not None)
    recording = read_recording(path, max_audio_s)
    request |= {"audio": recording.audio, "share_audio": share}
    return recording


def _check_cloud(plan: Plan, given: dict[str, Any]) -> None:
    """Raise OptionError where an option about the cloud cannot apply."""
    if given["cloud"] is None:
        return
    if given["cloud_model"]:
        raise OptionError("--cloud-model runs in this process, --cloud on a server: choose one.")
    if not plan.verifies:
        raise OptionError("--cloud has no place where the draft model works alone.")
    if plan.gate.kind == "always" and given["require_cloud"]:
        raise OptionError("--require-cloud has no place here: where all is verified, the cloud is always required.")
    if plan.gate.kind == "always" and given["open_when"]:
        raise OptionError("--open has no place here: where all is verified, the session is opened at once.")


def _is_text(text: str) -> bool:
    """Whether it has no lone surrogates, which is how bytes that are no UTF-8 arrive."""
    return text.encode(errors="replace") == text.encode(errors="surrogatepass")


def _start(
    request: dict[str, Any], given: dict[str, Any], remote: Cloud | None, *, with_signals: bool
) -> api.Generation:
    options, offline = build_engine_options(given), given.pop("offline")
    plan: Plan = request["plan"]
    edge = load_engine(given["edge_model"], options, offline=offline) if plan.drafts or remote else None
    cloud = remote or (load_engine(target_name(given), options, offline=offline) if plan.verifies else None)
    deaf = "audio" not in request and next((e for e in (edge, cloud) if isinstance(e, Engine) and e.takes_audio), None)
    if deaf:
        click.echo(
            f"skydraft: {deaf.name} takes speech, but no --audio was given: it answers the text alone.", err=True
        )
    return api.generate(edge=edge, cloud=cloud, with_signals=with_signals, **request)


def _open_trace(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"The trace file {path} cannot be written: {error.strerror}.") from error


@contextmanager
def _catch_interrupt() -> Iterator[list[int]]:
    """The first Ctrl-C ends the generation after the round under way; a second one ends the process."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _finish(generation: api.Generation, speech: Speech | None, json_out: bool, color: str, quiet: bool) -> None:
    if json_out:
        print(json.dumps(as_json(generation, speech), ensure_ascii=False))
        return
    print()
    if speech and not quiet:
        click.echo(speech_line(speech), err=True)
    if not quiet:
        errors = console_for(color, stderr=True)
        if errors.is_terminal:
            errors.print(legend(generation.origins))
        errors.print(summary_line(generation))
