"""`skydraft generate` on the toy pair: what it prints, where, and with which exit status."""

import json
import re
import signal
import subprocess
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
