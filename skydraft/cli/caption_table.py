"""The table that `skydraft caption` writes, a row a recording, and goes on with when it is there already."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

import click

from skydraft.characters import json_line, visible
from skydraft.cli.sections import Section, option
from skydraft.errors import OptionError

Format = Literal["jsonl", "csv"]
Row = dict[str, Any]
_COLUMNS = ("file", "text", "error", "duration_s", "finish_reason", "num_tokens", "num_escalated", "share",
            "bytes_shared", "preprocess_ms", "tokens_per_s", "ttft_ms")  # fmt: skip
_ENDINGS: dict[str, Format] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", "": "jsonl"}
_BOM = "\ufeff"  # without it Excel takes UTF-8 for the system's old encoding
_FIRST = '{"file":'  # how a row of JSON begins
_FORMULA = tuple("=+-@\t\r\n")


@dataclass(frozen=True, slots=True)
class TableChoice:
    """Where rows are written, and how; by default to stdout, as the name ends. Raises OptionError for other endings."""

    out: Path | None
    format: Format | None

    def __post_init__(self) -> None:
        if self.format is None and self.out is not None and self.out.suffix.lower() not in _ENDINGS:
            raise OptionError(
                f"--out {self.out} ends in {self.out.suffix}, and captions are written as .csv or .jsonl.",
                hint="Choose one of these, or say which with --format.",
            )

    @property
    def is_csv(self) -> bool:
        """Whether rows are CSV, and not JSON lines."""
        ending = self.out.suffix.lower() if self.out else ""
        return (self.format or _ENDINGS[ending]) == "csv"

    @contextmanager
    def open(self) -> Iterator[CaptionTable]:
        """The table; rows that a file has already stay there. Raises OptionError for a file of something else."""
        if self.out is None:
            yield CaptionTable(sys.stdout, self.is_csv, [], has_head=False)
            return
        file, rows = self._opened(self.out)
        with file:
            has_head = self.out.is_file() and self.out.stat().st_size > 0
            if self.is_csv and not has_head:
                file.write(_BOM)
            yield CaptionTable(file, self.is_csv, rows, has_head=has_head)

    def _opened(self, path: Path) -> tuple[TextIO, list[Row]]:
        try:
            rows = _kept(path, self.is_csv) if path.is_file() else []
            return path.open("a", encoding="utf-8", newline=""), rows
        except OSError as error:
            raise OptionError(f"{path} cannot be written: {error.strerror}.", hint="Choose another file.") from error


class CaptionTable:
    """Rows as they are written, each at once, so that an interrupted run keeps what it has."""

    def __init__(self, file: TextIO, is_csv: bool, rows: list[Row], *, has_head: bool) -> None:
        self._file, self._is_csv = file, is_csv
        self._names = {row["file"] for row in rows}
        if is_csv and not has_head:
            csv.writer(file).writerow(_COLUMNS)
            file.flush()

    def holds(self, path: Path) -> bool:
        """Whether an earlier run has described this recording."""
        return (_cell(str(path)) if self._is_csv else str(path)) in self._names

    def write(self, row: Row) -> None:
        """Append a row. Of CSV, cells that a spreadsheet would take for a formula get an apostrophe before them."""
        _write(self._file, row, self._is_csv)
        self._file.flush()


def _write(file: TextIO, row: Row, is_csv: bool) -> None:
    if is_csv:
        cells = [_cell(row.get(name)) for name in _COLUMNS]
        csv.writer(file).writerow(map(_visible, cells) if file.isatty() else cells)
    else:
        file.write(json_line(row) + "\n")


def _visible(value: Any) -> Any:
    return visible(value) if isinstance(value, str) else value


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _kept(path: Path, is_csv: bool) -> list[Row]:
    """The rows of a file that stay; a row that was cut off, and those that tell of failures, are taken out of it.

    Raises OptionError where the file holds anything else than captions of this format; it is left as it is then.
    """
    text = path.read_bytes().decode("utf-8-sig", errors="replace")
    rows = (_csv_rows if is_csv else _json_rows)(text)
    if rows is None:
        kind = "CSV" if is_csv else "JSON lines"
        raise OptionError(
            f"{path} holds something else than captions as {kind}, and is left as it is.",
            hint="Choose another --out, or remove the file.",
        )
    kept = [row for row in rows if not row.get("error")]
    if text and (len(kept) < len(rows) or not text.endswith("\n")):
        _rewrite(path, kept, is_csv)
    return kept


def _csv_rows(text: str) -> list[Row] | None:
    """The whole rows, or None where the head is another."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    try:
        if text and tuple(reader.fieldnames or ()) != _COLUMNS:
            return None
        for row in reader:
            rows.append(row)
    except csv.Error:
        return rows  # cut off between quotation marks
    return rows if text.endswith("\n") else rows[:-1]


def _json_rows(text: str) -> list[Row] | None:
    """The whole rows, or None where a line is none."""
    *lines, _cut = text.split("\n")
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
    except ValueError:
        return None
    is_ours = all(isinstance(row, dict) and "file" in row and ("text" in row or "error" in row) for row in rows)
    begins_so = _FIRST.startswith(text[: len(_FIRST)])  # where not even one row is whole
    return rows if is_ours and (rows or begins_so) else None


def _rewrite(path: Path, rows: list[Row], is_csv: bool) -> None:
    """Replace a file at once, so that no row is lost if this is interrupted."""
    target = path.resolve()
    partial = target.with_name(f"{target.name}.partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        if is_csv:
            file.write(_BOM)
            csv.writer(file).writerow(_COLUMNS)
        for row in rows:
            _write(file, row, is_csv)
    shutil.copymode(target, partial)
    os.replace(partial, target)


table_section = Section(
    "table",
    "Output",
    TableChoice,
    [
        option(
            "--out", "FILE", "Write to FILE (default: stdout). Recordings that it has already are left out; those that "
            "failed are tried again.", type=Path,
        ),
        option(
            "--format", None, "How to write it (default: csv if FILE ends in .csv, else jsonl).",
            type=click.Choice(get_args(Format)),
        ),
    ],
)  # fmt: skip
