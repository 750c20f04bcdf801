"""`skydraft caption`: a sentence about the speaker of each of many recordings, as JSON lines or CSV."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skydraft.cli.caption_table import CaptionTable, TableChoice, table_section
from skydraft.cli.cloud_options import CloudChoice, cloud_section
from skydraft.cli.keep_options import KeepChoice, keep_section
from skydraft.cli.model_options import ModelChoice, models_section
from skydraft.cli.options import DecodingChoice, GateChoice, decoding_section, gate_section
from skydraft.cli.progress import counted
from skydraft.cli.sections import Command, Section, option
from skydraft.cli.speech_options import STYLE, SpeechChoice, speech_section
from skydraft.cli.terminal import TERMINAL
from skydraft.config import CAPTION_PROMPT
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.errors import CloudError, OptionError, SkydraftError
from skydraft.prompts.audio import load_library
from skydraft.prompts.messages import Message, asked, spoken

if TYPE_CHECKING:
    from skydraft.edge.connection import Cloud

_question_section = Section(
    "messages",
    "What to write",
    asked,
    [option("--prompt", "TEXT", "What is asked about each recording.", default=CAPTION_PROMPT)],
)


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, type=Path)
@_question_section
@speech_section
@decoding_section
@gate_section("quality")
@cloud_section
@models_section
@table_section
@keep_section
def caption(
    files: tuple[Path, ...], messages: tuple[Message, ...], speech: SpeechChoice, decoding: DecodingChoice,
    gate: GateChoice, cloud: CloudChoice, models: ModelChoice, table: TableChoice, keep: KeepChoice,
) -> int:  # fmt: skip
    """Describe the speaker of each recording in FILES in one sentence.

    A recording that cannot be used is named on stderr and in the output; the others are still described, and the exit
    status is 1. Started again with the same --out, it goes on where it stopped.
    """
    load_library()  # fail now, not after the models are loaded
    cloud.check(models, gate)
    keep.check(gate)
    request = GenerateRequest(
        messages,
        plan=gate.plan,
        params=decoding.params(default_style=STYLE),
        share_audio=speech.share(gate, cloud),
        execution=gate.execution,
        calibration=gate.calibration,
    )
    with table.open() as rows:
        todo = _todo(files, rows, table)
        if not todo:
            return 0
        with cloud.sides(models, gate) as (edge, target):
            _check_ears(edge or target)
            return _describe_all(todo, speech, request, (edge, target), rows, keep)


def _todo(files: tuple[Path, ...], rows: CaptionTable, table: TableChoice) -> list[Path]:
    """The recordings that the table does not have; says so where there are others."""
    todo = [path for path in files if not rows.holds(path)]
    if num_done := len(files) - len(todo):
        left_out = f"{num_done} of {len(files)} recordings, which {table.out} has already"
        TERMINAL.say(f"leaving out {left_out}.")
    return todo


def _describe_all(
    files: list[Path], speech: SpeechChoice, request: GenerateRequest,
    sides: tuple[Engine | None, Engine | Cloud | None], rows: CaptionTable, keep: KeepChoice,
) -> int:  # fmt: skip
    """Write a row for each recording; returns the exit status."""
    num_failed = 0
    with counted(len(files), "recordings") as done:
        for path in files:
            try:
                rows.write(_describe(path, speech, request, *sides, keep))
            except (CloudError, OptionError):
                raise  # the next recording would fare no better
            except SkydraftError as error:
                num_failed += 1
                TERMINAL.say(error.line)
                rows.write({"file": str(path), "error": str(error)})
            done()
    return 1 if num_failed else 0


def _check_ears(side: object) -> None:
    """Raise OptionError where the model that is to hear recordings takes none."""
    if isinstance(side, Engine) and not side.takes_audio:
        raise OptionError(
            f"{side.name} takes no audio.",
            hint="Name a pair that does: --edge-model tiny-omni-edge --cloud-model tiny-omni-cloud, for example.",
        )


def _describe(
    path: Path, speech: SpeechChoice, request: GenerateRequest, edge: Engine | None, target: Engine | Cloud | None,
    keep: KeepChoice,
) -> dict[str, Any]:  # fmt: skip
    recording = speech.read(path)
    request = dataclasses.replace(request, messages=spoken(request.messages, recording.audio))
    with keep.start(request, edge=edge, cloud=target) as generation:
        generation.run()
    stats, said = generation.stats, dataclasses.asdict(recording.used(generation, request.share_audio))
    return {
        "file": said.pop("path"),
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        **said,
        "num_tokens": stats.num_tokens,
        "num_escalated": stats.num_escalated,
        "cloud_calls_per_token": stats.cloud_calls_per_token,
        "tokens_per_s": stats.tokens_per_s,
        "ttft_ms": stats.ttft_ms,
    }
