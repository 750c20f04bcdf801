"""`skydraft caption`: describe the speakers of recordings, one sentence each, as JSON lines or CSV."""

import csv
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from skydraft import api
from skydraft.characters import json_line
from skydraft.cli.options.decoding import DecodingChoice, GateChoice, as_text, decoding_section, gate_section
from skydraft.cli.options.pair import CloudChoice, ModelChoice, cloud_section, models_section
from skydraft.cli.options.sections import Command, option, section
from skydraft.cli.options.speech import STYLE, SpeechChoice, speech_section
from skydraft.cli.progress import counted
from skydraft.cli.terminal import TERMINAL
from skydraft.config import CAPTION_PROMPT
from skydraft.decoding.generation import Generation
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.errors import CloudError, OptionError, SkydraftError, telling
from skydraft.files import write_whole
from skydraft.prompts.audio import load_library
from skydraft.prompts.messages import Message, asked, spoken

Row = dict[str, Any]
_STATS = ("exact", "num_fallback_tokens", "num_tokens", "num_escalated", "cloud_calls_per_token", "acceptance_rate",
          "target_written_per_token", "tokens_per_s", "ttft_ms")  # fmt: skip
_COLUMNS = ("file", "text", "error", "mode", "duration_s", "finish_reason", "share", "bytes_shared", "preprocess_ms",
            *_STATS)  # fmt: skip
_ENDINGS = {".csv", ".jsonl", ".ndjson", ".json", ""}
_BOM = "\ufeff"  # without it Excel reads UTF-8 as the system's old encoding
_FIRST = '{"file":'  # the beginning of a JSON row
_ESCAPED = "backslashreplace"  # for file names that are not UTF-8
_FORMULA = tuple("=+-@\t\r\n")


class CaptionTable:
    """Write each row at once, so that an interrupted run keeps its rows. `done` names the files already in it."""

    def __init__(self, file: TextIO, is_csv: bool, done: Iterable[str] = ()) -> None:
        self._file, self._is_csv, self._done = file, is_csv, set(done)
        self._csv = csv.DictWriter(file, _COLUMNS, extrasaction="ignore")

    def begin(self) -> None:
        if self._is_csv:
            self._file.write(_BOM)
            self._csv.writeheader()

    def holds(self, path: Path) -> bool:
        """Return whether the table had this recording's caption when it was opened."""
        name = str(path)
        return (str(_cell(name)).encode(errors=_ESCAPED).decode() if self._is_csv else name) in self._done

    def write(self, row: Row) -> None:
        """Append a row. In CSV, an apostrophe goes before a cell that a spreadsheet would read as a formula."""
        if self._is_csv:
            self._csv.writerow({name: _cell(value) for name, value in row.items()})
        else:
            self._file.write(json_line(row) + "\n")
        self._file.flush()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _keep_rows(path: Path, is_csv: bool) -> list[str]:
    """Remove an incomplete row and failures from a table. Return the recordings of the remaining rows.

    Raises OptionError, and changes nothing, if the file has anything but captions of this format.
    """
    text = path.read_bytes().decode("utf-8-sig", errors="replace")
    rows = (_csv_rows if is_csv else _json_rows)(text)
    if rows is None:
        kind = "CSV" if is_csv else "JSON lines"
        hint = "Choose another --out, or remove the file."
        raise OptionError(f"{path} holds something other than captions as {kind}; it was not changed.", hint=hint)
    kept = [row for row in rows if not row.get("error")]
    if text and (len(kept) < len(rows) or not text.endswith("\n")):
        table = CaptionTable(whole := io.StringIO(newline=""), is_csv)
        table.begin()
        for row in kept:
            table.write(row)
        write_whole(path.resolve(), whole.getvalue().encode(errors=_ESCAPED), mode=path.stat().st_mode & 0o777)
    return [row["file"] for row in kept]


def _csv_rows(text: str) -> list[Row] | None:
    """Return the complete rows, None if the header is not ours."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    try:
        if text and tuple(reader.fieldnames or ()) != _COLUMNS:
            return None
        rows.extend(reader)
    except csv.Error as error:
        return rows if "end of data" in str(error) else None  # a quoted cell was cut off, or the file is damaged
    return rows if text.endswith("\n") else rows[:-1]


def _json_rows(text: str) -> list[Row] | None:
    """Return the complete rows, None if a line is not a row."""
    *lines, _cut = text.split("\n")
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError):
        return None
    known = {"text", "error"}
    is_ours = all(isinstance(row, dict) and isinstance(row.get("file"), str) and known & {*row} for row in rows)
    return rows if is_ours and (rows or _FIRST.startswith(text[: len(_FIRST)])) else None


@dataclass(frozen=True, slots=True)
class TableChoice:
    """The output file, by default stdout. Its suffix selects the format. Raises OptionError."""

    out: Path | None

    def __post_init__(self) -> None:
        if self.out is not None and self.out.suffix.lower() not in _ENDINGS:
            ending = f"--out {self.out} ends in {self.out.suffix}, but captions are written as .csv or .jsonl."
            raise OptionError(ending, hint="Use one of these suffixes.")

    @contextmanager
    def open(self) -> Iterator[CaptionTable]:
        """Open the table. Raises OptionError for a file of another kind."""
        out = self.out
        is_csv = out is not None and out.suffix.lower() == ".csv"
        with telling(OptionError, f"{out} cannot be written", "Choose another file."):
            done = _keep_rows(out, is_csv) if out and out.is_file() else []
            opened = out.open("a", encoding="utf-8", errors=_ESCAPED, newline="") if out else nullcontext(sys.stdout)
        with opened as file:
            table = CaptionTable(file, is_csv, done)
            if out and not out.stat().st_size:
                table.begin()
            yield table


table_section = section("table", "Output", TableChoice, [
    option("--out", "FILE", "Write to FILE (default: stdout). Recordings already in FILE are skipped; failed ones are "
           "tried again. FILE.csv is a table for spreadsheets; any other FILE has lines of JSON.", type=Path),
])  # fmt: skip
_question_section = section("messages", "What to write", asked, [
    option("--prompt", "TEXT", "The question about each recording.", default=CAPTION_PROMPT, callback=as_text),
    option("-s --system", "TEXT", "System prompt before each question.", callback=as_text),
])  # fmt: skip


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, type=Path)
@gate_section
@_question_section
@decoding_section
@table_section
@cloud_section
@models_section
@speech_section
def caption(
    files: tuple[Path, ...], messages: tuple[Message, ...], speech: SpeechChoice, decoding: DecodingChoice,
    gate: GateChoice, cloud: CloudChoice, models: ModelChoice, table: TableChoice,
) -> int:  # fmt: skip
    """Describe the speaker of each recording in FILES in one sentence.

    An unusable recording is named on stderr and in the output; the others are still described, and the exit status is
    1. The same command with the same --out continues where it stopped.

    If the server is lost, the small model continues alone unless you give --require-cloud. The exit status stays 0. The
    last line counts these captions; their rows have num_fallback_tokens.
    """
    load_library()  # fail now, not after the models are loaded
    request = GenerateRequest(
        messages, gate.plan, decoding.params(default_style=STYLE), think=decoding.think,
        share_audio=speech.share(gate, cloud), execution=gate.execution, breaks_loops=True,
    )  # fmt: skip
    with table.open() as rows:
        todo = [path for path in files if not rows.holds(path)]
        if num_done := len(files) - len(todo):
            TERMINAL.say(f"leaving out {num_done} of {len(files)} recordings that are already in {table.out}.")
        if not todo:
            return 0
        with cloud.sides(models, gate.plan) as (edge, target):
            if isinstance(side := edge or target, Engine) and not side.takes_audio:
                hint = "Name a pair that does, for example --edge-model tiny-omni-edge --cloud-model tiny-omni-cloud."
                raise OptionError(f"{side.name} takes no audio.", hint=hint)

            def described(path: Path) -> Row:
                recording = speech.read(path)
                asked = dataclasses.replace(request, messages=spoken(messages, recording.audio))
                with api.start(asked, edge=edge, cloud=target) as generation:
                    return _row(generation.run(), recording.figures(generation, request.share_audio))

            return _describe_all(todo, described, rows)


def _describe_all(files: list[Path], described: Callable[[Path], Row], rows: CaptionTable) -> int:
    num_failed = num_alone = 0
    with counted(len(files), "recordings") as done:
        for path in files:
            try:
                rows.write(row := described(path))
                num_alone += row["num_fallback_tokens"] > 0
            except (CloudError, OptionError):
                raise  # the next recording would fail too
            except SkydraftError as error:
                num_failed += 1
                TERMINAL.say(error.line)
                rows.write({"file": str(path), "error": str(error)})
            done()
    if num_alone:
        TERMINAL.say(f"{num_alone} of {len(files)} captions were made partly or wholly without the server.")
    return 1 if num_failed else 0


def _row(generation: Generation, audio: dict[str, Any]) -> Row:
    stats = {name: getattr(generation.stats, name) for name in _STATS}
    begin = {"file": audio.pop("path"), "text": generation.text, "mode": generation.request.plan.mode}
    return {**begin, "finish_reason": generation.finish_reason, **audio, **stats}
