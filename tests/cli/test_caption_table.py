"""The table of captions: what it is called, how it goes on, and what a spreadsheet makes of it."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from skydraft.cli.caption import _COLUMNS, TableChoice

from .conftest import Invoke, Refused

CLIP = str(Path(__file__).parents[2] / "data" / "speech_zh_heldout" / "demo-fast-loud-woman.flac")
HEAD = f"{','.join(_COLUMNS)}\n".encode()
FORMULAS = ["=1+1", "+1", "-1", "@A1", "\t=1", "\r=1"]


def write(out: Path, *rows: dict[str, Any]) -> None:
    with TableChoice(out).open() as table:
        for row in rows:
            table.write(row)


def said(name: str, text: str = "语速快。") -> dict[str, Any]:
    return {"file": name, "text": text, "duration_s": -1.5}


def read(out: Path) -> list[dict[str, Any]]:
    if out.suffix.lower() == ".csv":
        with out.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def held(out: Path, *names: str) -> list[str]:
    with TableChoice(out).open() as table:
        return [name for name in names if table.holds(Path(name))]


@pytest.mark.parametrize("name", ["a.csv", "a.CSV", "a.jsonl", "a"])
def test_a_second_run_adds_to_what_is_there_and_tries_failures_again(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    write(out, said("a.wav"), said("-b\udcff.wav", "他说：\r\n“快”。"))  # a name may be no UTF-8
    before = out.read_bytes()
    assert held(out, "a.wav", "-b\udcff.wav", "c.wav") == ["a.wav", "-b\udcff.wav"]
    assert out.read_bytes() == before and b"\\udcff" in before
    write(out, {"file": "c.wav", "error": "c.wav is empty."}, said("d.wav"))
    assert out.read_bytes().startswith(before)
    out.chmod(0o640)
    assert held(out, "c.wav", "d.wav") == ["d.wav"]
    write(out, said("c.wav"))
    assert [row["file"].lstrip("'")[0] for row in read(out)] == ["a", "-", "d", "c"]
    assert out.stat().st_mode & 0o777 == 0o640 and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_row_that_was_cut_off_is_made_again(tmp_path: Path, name: str) -> None:
    whole = tmp_path / name
    write(whole, said("a.wav"), said("b.wav", "他说：“快”，\n又说。"))
    content = whole.read_bytes()
    head = content.index(b"\n") + 1 if name == "a.csv" else 1
    for length in range(head, len(content), 3):
        whole.write_bytes(content[:length])
        write(whole, *(said(each) for each in ("a.wav", "b.wav") if each not in held(whole, "a.wav", "b.wav")))
        assert [row["file"] for row in read(whole)] == ["a.wav", "b.wav"], length


@pytest.mark.parametrize(("name", "content"), [
    ("a.csv", b"file,text,error\r\nx,3,\r\n"), ("a.csv", b'{"file": "a.wav", "text": "x"}\n'),
    ("a.csv", b"PK\x03\x04\xff\xfe\n\x00"), ("a.csv", HEAD + b'a,b\nb,"x"y\nc,d\n'),
    ("a.jsonl", b'{"file": [], "text": "x"}\n'), ("a.jsonl", b"[" * 100_000 + b"\n"),  # a damaged row loses nothing
    ("a.json", b'{\n"file": 3}\n'), ("a", b"buy milk"),
])  # fmt: skip
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, refused: Refused, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    table = ("--out", str(tmp_path / name))
    refused("caption", CLIP, "--edge-model", "not-looked-for", *table, says="something other than captions")
    assert (tmp_path / name).read_bytes() == content


def test_nothing_is_loaded_where_nothing_is_left_to_do(tmp_path: Path, invoke: Invoke) -> None:
    write(tmp_path / "a.csv", said(CLIP))
    status, out, err = invoke("caption", CLIP, "--edge-model", "not-looked-for", "--out", str(tmp_path / "a.csv"))
    assert (status, out) == (0, "") and err.count("\n") == 1 and "leaving out 1 of 1" in err


def test_excel_reads_chinese_and_runs_no_formula(tmp_path: Path, capsys: Any) -> None:
    out, plain = tmp_path / "a.csv", tmp_path / "a.jsonl"
    for table in (out, plain):
        write(table, *(said(text, text) for text in FORMULAS), said("=1", "语速=快"))
    assert out.read_bytes().startswith("\ufefffile,".encode()) and out.read_bytes().count("\ufeff".encode()) == 1
    rows = read(out)
    assert [row["text"] for row in rows] == [*(f"'{text}" for text in FORMULAS), "语速=快"]
    assert rows[-1]["file"] == "'=1" and {row["duration_s"] for row in rows} == {"-1.5"}
    assert held(out, *FORMULAS) == FORMULAS == [row["text"] for row in read(plain)][:-1]
    with TableChoice(None).open() as table:
        table.write(said("a.wav", "\x1b[2J快"))
    assert json.loads(piped := capsys.readouterr().out)["text"] == "\x1b[2J快" and "\x1b" not in piped  # for a terminal
