"""`skydraft caption`: a sentence about the speaker of each of many recordings, as JSON lines or CSV."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from skydraft import api
from skydraft.cli.cloud_options import CloudChoice, cloud_section
from skydraft.cli.options import (
    DecodingChoice,
    GateChoice,
    ModelChoice,
    decoding_section,
    gate_section,
    models_section,
    open_for_writing,
)
from skydraft.cli.progress import counted
from skydraft.cli.sections import Command, Section, option
from skydraft.cli.speech_options import STYLE, SpeechChoice, speech_section
from skydraft.config import CAPTION_PROMPT
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.errors import CloudError, OptionError, SkydraftError
from skydraft.prompts.audio import load_library
from skydraft.prompts.messages import Message, asked, spoken

if TYPE_CHECKING:
    from skydraft.edge.connection import Cloud

Format = Literal["jsonl", "csv"]
Write = Callable[[dict[str, Any]], None]
_COLUMNS = ("file", "text", "error", "duration_s", "finish_reason", "num_tokens", "num_escalated", "share",
            "bytes_shared", "preprocess_ms", "tokens_per_s", "ttft_ms")  # fmt: skip


@dataclass(frozen=True, slots=True)
class TableChoice:
    """Where rows are written, and how; by default to stdout, as the name ends, else as JSON lines."""

    out: Path | None
    format: Format | None

    @contextmanager
    def open(self) -> Iterator[Write]:
        """Yields a function that writes a row at once, so that an interrupted run keeps what it has."""
        is_csv = self.format == "csv" or (self.format is None and self.out is not None and self.out.suffix == ".csv")
        with open_for_writing(self.out) if self.out else nullcontext(sys.stdout) as file:
            table = csv.DictWriter(file, _COLUMNS, extrasaction="ignore") if is_csv else None
            if table:
                table.writeheader()

            def write(row: dict[str, Any]) -> None:
                if table:
                    table.writerow(row)
                else:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()

            yield write


_question_section = Section(
    "messages",
    "What to write",
    asked,
    [option("--prompt", "TEXT", "What is asked about each recording.", default=CAPTION_PROMPT)],
)
_table_section = Section(
    "table",
    "Output",
    TableChoice,
    [
        option("--out", "FILE", "Write to FILE (default: stdout).", type=Path),
        option(
            "--format", None, "How to write it (default: csv if FILE ends in .csv, else jsonl).",
            type=click.Choice(get_args(Format)),
        ),
    ],
)  # fmt: skip


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, type=Path)
@_question_section
@speech_section
@decoding_section
@gate_section("quality")
@cloud_section
@models_section
@_table_section
def caption(
    files: tuple[Path, ...], messages: tuple[Message, ...], speech: SpeechChoice, decoding: DecodingChoice,
    gate: GateChoice, cloud: CloudChoice, models: ModelChoice, table: TableChoice,
) -> int:  # fmt: skip
    """Describe the speaker of each recording in FILES in one sentence.

    A recording that cannot be used is named on stderr and in the output; the others are still described, and the exit
    status is 1.
    """
    load_library()  # fail now, not after the models are loaded
    cloud.check(models, gate)
    request = GenerateRequest(
        messages,
        plan=gate.plan,
        params=decoding.params(default_style=STYLE),
        share_audio=speech.share(gate, cloud),
        execution=gate.execution,
        calibration=gate.calibration,
    )
    num_failed = 0
    with table.open() as write, cloud.sides(models, gate) as (edge, target):
        _check_ears(edge or target)
        with counted(len(files), "recordings") as done:
            for path in files:
                try:
                    write(_describe(path, speech, request, edge, target))
                except (CloudError, OptionError):
                    raise  # the next recording would fare no better
                except SkydraftError as error:
                    num_failed += 1
                    click.echo(f"skydraft: {error}", err=True)
                    write({"file": str(path), "error": str(error)})
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
    path: Path, speech: SpeechChoice, request: GenerateRequest, edge: Engine | None, target: Engine | Cloud | None
) -> dict[str, Any]:
    recording = speech.read(path)
    request = dataclasses.replace(request, messages=spoken(request.messages, recording.audio))
    with api.start(request, edge=edge, cloud=target) as generation:
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
