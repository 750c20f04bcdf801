"""`skydraft generate` on the toy pair: what it prints, where, and with which exit status; what it reads from a pipe,
and what it does not wait for; and what --learn keeps, which `skydraft learn` shows and forgets.
"""

import io
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from skydraft.cli.options.pair import ModelChoice
from skydraft.decoding.accounts.audits import Auditor
from skydraft.decoding.accounts.stats import Stats
from skydraft.engines.toy import character_vocab, random_toy

from ..choosing.test_stopping import follower
from ..serving import Serving
from ..starting import command as skydraft
from .conftest import TOYS, Invoke, Refused

GENERATE = ["generate", "--edge-model", "toy", "-m", "edge", "-n", "12"]
Said = Callable[..., str]
ASKS = ("generate", "你好", *TOYS, "--k", "5", "-n", "12", "-q")


@pytest.fixture
def said(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> Said:
    """What a command prints beside a pipe with these bytes, or beside this open file."""

    def call(*args: str, piped: bytes | str | int | None = None, quiet: bool = True) -> str:
        read = piped if isinstance(piped, int) else os.open(os.devnull, os.O_RDONLY)
        if isinstance(piped, (bytes, str)):
            read, write = os.pipe()
            os.write(write, piped if isinstance(piped, bytes) else piped.encode())
            os.close(write)
        with open(read, encoding="utf-8") as stdin:
            assert isinstance(stdin, io.TextIOWrapper)
            monkeypatch.setattr("sys.stdin", stdin)
            status, out, err = invoke(*GENERATE, *(["-q"] if quiet else []), "--", *args)
        assert not quiet or status == 0, err
        return out + ("" if quiet else err)

    return call


def test_text_goes_to_stdout_and_figures_to_stderr(invoke: Invoke) -> None:
    status, out, err = invoke("generate", "你好", *TOYS, "-n", "20")
    assert status == 0 and len(out.strip()) >= 10
    assert "20 tokens" in err and "20 tokens" not in out
    assert "\x1b" not in out + err  # no terminal, no colours
    _, out, err = invoke("generate", "你好", *TOYS, "--k", "5", "--color", "always")
    assert "\x1b[32m" in out and "accepted" in err
    assert "\x1b[1;4;33m" in out and "recovered" in err


def test_json_has_the_fixed_fields_and_the_trace_a_line_a_round(invoke: Invoke, tmp_path: Path) -> None:
    (trace := tmp_path / "trace.jsonl").write_text("of an earlier text\n" * 2000)
    args = ["generate", "你好", *TOYS, "--json", "--trace", str(trace), "--mode", "quality", "--max-new-tokens", "20"]
    status, out, err = invoke(*args)
    answer, rounds = json.loads(out), [json.loads(line) for line in trace.read_text().splitlines()]
    assert (status, err, answer["finish_reason"]) == (0, "", "length")
    assert list(answer) == ["text", "token_ids", "origins", "finish_reason", "prompt_tokens", "stats", "receipt"]
    assert answer["stats"].keys() >= {each.name for each in fields(Stats)}  # which tests/docs/test_figures.py reads
    assert len(answer["token_ids"]) == len(answer["origins"]) == answer["stats"]["num_tokens"] == 20
    assert answer["stats"]["num_accepted_tokens"] == answer["origins"].count("accepted")
    assert len(rounds) == answer["stats"]["num_rounds"] and rounds[0]["draft"]["prefill_ms"] > 0
    assert [token_id for line in rounds for token_id in line["token_ids"]] == answer["token_ids"]
    assert "".join(line["text"] for line in rounds) == answer["text"]
    assert all(len(line["signals"]) == line["num_draft"] and line["link"]["bytes_up"] == 0 for line in rounds)


def test_a_style_for_chinese_needs_a_vocabulary_with_chinese(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelChoice, "load", lambda *_: random_toy(character_vocab("abcdef")))
    refused("generate", "abc", *TOYS, "--style", "zh-short", says="Chinese")


def test_the_audit_of_an_answer_is_in_its_json(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["generate", "你好", *TOYS, "--json", "--mode", "edge", "-n", "8", "--audit-share", "1"]
    assert json.loads(invoke(*args)[1])["stats"]["audits"]["num_answers"] == 1
    waits = iter([KeyboardInterrupt()])

    def finish(_: Auditor) -> None:
        for interrupt in waits:
            raise interrupt

    monkeypatch.setattr(Auditor, "finish", finish)
    assert len(json.loads(invoke(*args)[1])["token_ids"]) == 8  # Ctrl-C ends the wait alone


def test_ctrl_c_ends_with_what_was_generated(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    args = ["generate", "你好", *TOYS, "--json", "--trace", str(trace), "-n", "90000", "--context", "100000"]
    with subprocess.Popen([skydraft(), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        Serving.wait_until(lambda: trace.exists() and trace.stat().st_size > 2000)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    answer = json.loads(out)
    assert (child.returncode, err, answer["finish_reason"]) == (130, b"", "interrupted")
    assert 0 < answer["stats"]["num_tokens"] == len(answer["token_ids"]) == len(answer["origins"]) < 90000
    assert len(trace.read_text().splitlines()) == answer["stats"]["num_rounds"]


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    options = "--edge-model toy --mode edge --max-new-tokens 3000"
    command = f"{skydraft()} generate 你好 {options} | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
    assert len(done.stdout) == 10
    assert b"Traceback" not in done.stderr


def test_the_text_is_of_the_schema_or_of_the_pattern(invoke: Invoke, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    schema = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}'
    (file := tmp_path / "schema.json").write_text(schema)
    asks = ("generate", "你好", *TOYS, "-q", "-n", "300")
    for given in (str(file), f" {schema}"):
        assert isinstance(json.loads(invoke(*asks, "--json-schema", given)[1])["ok"], bool)
    for flags in (("--regex", "2[0-9]{3}"), ("--grammar", "lark:start: /2[0-9]{3}/")):
        assert re.fullmatch("2[0-9]{3}\n", invoke(*asks, *flags)[1])


def test_text_reaches_stdout_as_it_is(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelChoice, "load", lambda *_: follower("[/b]\t:x", character_vocab("[/b]\t:x")))
    args = ["generate", "x", *TOYS, "--mode", "edge", "--max-new-tokens", "14", "--quiet"]
    assert invoke(*args)[1] == "[/b]\t:x" * 2 + "\n"
    colored = invoke(*args, "--color", "always")[1]
    assert "\t" in colored and "[" in colored


@pytest.mark.parametrize("piped", ["语速", "语速\n", "一\n二\n\n", "\ufeff语速\n"])
def test_what_is_piped_in_stands_before_the_prompt(said: Said, piped: str) -> None:
    text = piped.removeprefix("\ufeff")
    assert said("情绪", piped=piped) == said(f"{text.removesuffix(chr(10))}\n情绪") != said("情绪")
    assert said(piped=piped) == said("-", piped=piped) == said(text)  # the prompt, where there is no other


def test_a_file_is_read_like_a_pipe_and_one_without_text_changes_nothing(said: Said, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("语速\n")
    assert said("情绪", piped=os.open(tmp_path / "a.txt", os.O_RDONLY)) == said("情绪", piped="语速\n")
    assert said("情绪", piped="") == said("情绪", piped=" \n\n") == said("-", piped="情绪") == said("情绪")


@pytest.mark.parametrize("odd", ["<&-", "0>/dev/null"])
def test_closed_and_odd_stdin_change_nothing(said: Said, odd: str) -> None:
    shell = ["bash", "-c", f'exec "$@" {odd}', "-", skydraft(), *GENERATE, "-q", "情绪"]
    assert subprocess.run(shell, capture_output=True, text=True, timeout=60, check=True).stdout == said("情绪")


def test_a_slow_writer_is_heard_to_the_end_a_silent_one_is_not(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.cli.generate._SILENT_S", 0.3)
    read, write = os.pipe()
    told = said("情绪", piped=read, quiet=False)
    os.close(write)
    assert told.startswith(said("情绪")) and "nothing came from stdin for 0.3 s, so it is left out" in told
    read, write = os.pipe()
    os.write(write, "语".encode())
    writer = threading.Timer(0.6, lambda: (os.write(write, "速".encode()), os.close(write)))
    writer.start()
    assert said("情绪", piped=read) == said("情绪", piped="语速")
    writer.join()


def test_bytes_that_are_no_text_are_one_line(said: Said) -> None:
    told = said("情绪", piped=b"\xff\xfe", quiet=False)
    assert told.count("\n") == 1 and "not valid UTF-8" in told


def test_the_text_is_the_same_and_what_was_said_is_kept_counted_and_forgotten(invoke: Invoke, tmp_path: Path) -> None:
    folder = tmp_path / "l"
    _, plain, err = invoke(*ASKS)
    assert not err and not list(tmp_path.rglob("lessons*"))  # without the option nothing is kept
    for prompt in ("你好", "我们", "他在"):
        status, out, err = invoke("generate", prompt, *ASKS[2:], "--learn", str(folder))
        assert status == 0 and (out == plain or prompt != "你好") and "are kept in" in err and "learn forget" in err
    with (folder / "lessons.jsonl").open("a") as file:
        file.write("poison\n")
    out = invoke("learn", "status", str(folder))[1]
    says = ("3 answers of 36 tokens", "confirmed 36 of", "21 more are needed", "1 lines are cut, damaged")
    assert all(each in out for each in says), out
    kept = [json.loads(line) for line in invoke("learn", "export", str(folder), *TOYS[:2])[1].splitlines()]
    assert (kept[0]["prompt"], kept[0]["text"]) == ("你好", plain.strip()) and len(kept[0]["marks"]) == 12
    assert len(kept) == 3 and "1 files deleted" in invoke("learn", "forget", str(folder))[1]
    assert "0.0 MB in 0 files" in invoke("learn", "status", str(folder))[1]


def test_where_nothing_is_checked_nothing_can_be_learned(invoke: Invoke, tmp_path: Path) -> None:
    for args in (("generate", "你好", *TOYS, "--mode", "edge"), ("gateway", "--edge-only", "--edge-model", "toy")):
        status, _, err = invoke(*args, "--learn", str(tmp_path / "l"))
        assert status == 2 and "nothing is checked" in err.splitlines()[-1]


def test_a_conversation_is_kept_too(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("你好\n我们\n".encode())))
    assert invoke("chat", *TOYS, "-n", "8", "--k", "5", "--learn", str(tmp_path / "l"))[0] == 0
    assert "2 answers" in invoke("learn", "status", str(tmp_path / "l"))[1]
