"""`skydraft compare` on the toy pair: what it writes, how it goes on after an interruption, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skydraft.engines.toy import open_toy

from ..comparing import PROMPTS, TOYS, compare_args, compared, generations, read_lines, write_prompts
from ..serving import Serving, free_port, serving
from ..starting import Started
from ..stock.fakes import fake
from .conftest import Invoke, Refused

MODES = "edge,cloud,lossless;k=5,quality,edge;style=zh-short"
NAMES = MODES.split(",")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared(tmp_path_factory.mktemp("compare"), "--repetitions", "2", modes=MODES)


@pytest.fixture
def again(out: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder with the same prompts, to which parts of the records may be copied."""
    write_prompts(tmp_path)
    (tmp_path / "out").mkdir()
    yield tmp_path


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["prompt"], line["mode"], line["repetition"], line["link_ms"]


def said(line: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same in every run."""
    names = ("round", "base", "num_draft", "outcome", "num_accepted", "reason", "num_audited", "num_agreed")
    rounds = [[entry["record"][name] for name in names] for entry in line["rounds"]]
    return key(line), line["token_ids"], line["pieces"], line["origins"], line["finish"], rounds


def test_baselines_carry_no_extra_work(out: Path) -> None:
    for line in generations(out):
        for entry in line["rounds"]:
            record, draft, target = entry["record"], entry["record"]["draft"], entry["record"]["target"]
            assert not any(record["link"].values())  # all in one process
            if line["mode"].startswith("edge"):
                assert entry["signals"] == [] and record["num_draft"] > 0
                assert not any(target.values())
            if line["mode"] == "cloud":
                assert (entry["draft_ids"], entry["signals"]) == ([], [])
                assert not any(draft.values())
                assert (target["num_passes"], target["num_rows"], record["num_committed"]) == (1, 1, 1)
            if line["mode"] == "lossless;k=5":
                assert entry["signals"] == []
            if line["mode"] == "quality":
                assert len(entry["signals"]) == record["num_draft"]
                assert (record["num_draft"] == 0) == (record["outcome"] == "written")


def cut(out: Path, whole_lines: int, more_bytes: int) -> bytes:
    """The records as an interruption would leave them."""
    content = (out / "records.jsonl").read_bytes()
    ends = [at + 1 for at, byte in enumerate(content) if byte == ord("\n")]
    return content[: ends[whole_lines - 1] + more_bytes]


@pytest.mark.parametrize(("whole_lines", "more_bytes"), [(1, 30), (4, 0), (30, 777), (51, 0), (53, 100)])
def test_an_interrupted_comparison_goes_on_where_it_stopped(
    out: Path, again: Path, invoke: Invoke, whole_lines: int, more_bytes: int
) -> None:
    records = again / "out" / "records.jsonl"
    left = cut(out, whole_lines, more_bytes)
    records.write_bytes(left)
    status, _, err = invoke(*compare_args(again, "--repetitions", "2", modes=MODES))
    assert status == 0
    kept = left[: left.rindex(b"\n") + 1]
    assert records.read_bytes().startswith(kept)  # with the times that were measured then
    assert list(map(said, generations(again / "out"))) == list(map(said, generations(out)))
    old, new = ([line for line in read_lines(of) if line["kind"] == "score"] for of in (out, again / "out"))
    assert sorted(map(str, old)) == sorted(map(str, new))
    num_done = min(whole_lines - 1, 50)
    assert (f"has {num_done} generations" in err) == (num_done > 0)


def test_a_finished_comparison_computes_nothing_again(out: Path, again: Path, invoke: Invoke) -> None:
    content = (out / "records.jsonl").read_bytes()
    (again / "out" / "records.jsonl").write_bytes(content)
    assert invoke(*compare_args(again, "--repetitions", "2", modes=MODES))[0] == 0
    assert (again / "out" / "records.jsonl").read_bytes() == content
    for name in ("report.html", "summary.json"):
        assert (again / "out" / name).read_bytes() == (out / name).read_bytes()


OTHER = {"--modes edge,cloud": "modes", "--context 512": "engine options", "--limit 2": "prompts",
         "--cloud-model toy:drift=0.3": "target model"}  # fmt: skip


@pytest.mark.parametrize("args", OTHER)
def test_another_run_in_the_same_folder_is_refused(out: Path, again: Path, refused: Refused, args: str) -> None:
    content = (out / "records.jsonl").read_bytes()
    (again / "out" / "records.jsonl").write_bytes(content)
    mine = [*compare_args(again, "--repetitions", "2", modes=MODES), *args.split()]
    for says in ("holds another run", f"{OTHER[args]} differs", "--out"):
        refused(*mine, says=says)
    assert (again / "out" / "records.jsonl").read_bytes() == content


@pytest.mark.parametrize("line", ['{"kind": "run", "schema": 3}\n', "notes of mine\n", "no last newline"])
def test_a_file_of_others_is_refused_and_left_alone(again: Path, refused: Refused, line: str) -> None:
    records = again / "out" / "records.jsonl"
    records.write_text(line)
    refused(*compare_args(again, modes=MODES), says="records.jsonl")
    assert records.read_text() == line


WRONG = {
    "--modes edge,turbo": "no mode 'turbo'", "--modes edge,cloud,edge": "edge was named twice",
    "--modes ,": "No mode was named", "--modes lossless;gate=entropy:1": "lossy",
    "--prompts missing.txt": "missing.txt cannot be read", "--prompts empty.txt": "holds no prompt",
    "--calibration missing.json": "missing.json cannot be read", "--limit 0": "--limit",
    "--emulate-rtt -1": "--emulate-rtt", "--edge-model qwen2.5-coder-0.5": "qwen2.5-coder-0.5",
    "--style zh-long": "zh-short", "--temperature nan": "--temperature", "--max-new-tokens 0": "--max-new-tokens",
    "--share-audio none": "--share-audio is about recordings",
}  # fmt: skip


@pytest.mark.parametrize("args", WRONG)
def test_wrong_use_is_one_clear_line_and_leaves_no_folder(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, args: str
) -> None:
    write_prompts(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    refused(*compare_args(tmp_path, modes="edge"), *args.split(), says=WRONG[args])
    assert not (tmp_path / "out").exists()


def test_a_pair_that_never_disagrees_has_a_summary_that_is_json(again: Path, invoke: Invoke) -> None:
    def refuse(name: str) -> None:
        raise ValueError(name)

    assert invoke(*compare_args(again, modes="edge,cloud"), "--edge-model", "toy")[0] == 0
    json.loads((again / "out" / "summary.json").read_text(), parse_constant=refuse)


def test_an_emulated_link_costs_its_round_trip_and_changes_no_text(tmp_path: Path) -> None:
    modes, rtt_ms = "edge,cloud,lossless;k=5,gate=entropy:1.5;k=4", 60
    with serving(open_toy("toy")) as server:
        link = ["--cloud", server.address, "--emulate-rtt", str(rtt_ms)]
        out = compared(tmp_path, *link, "--limit", "2", modes=modes)
    lines = generations(out)
    near = {key(line)[:2]: said(line)[1:] for line in lines if line["link_ms"] is None}
    far = [line for line in lines if line["link_ms"] == rtt_ms]
    assert {line["mode"] for line in far} == set(modes.split(",")) - {"edge"}  # which crosses no link
    assert len(near) == 8 and len(far) == 6
    for line in far:
        assert said(line)[1:] == near[key(line)[:2]]
        records = [entry["record"] for entry in line["rounds"]]
        judged = [record for record in records if record["outcome"] == "verified"]
        assert judged and line["wall_ms"] > rtt_ms
        assert sum(record["link"]["bytes_up"] for record in records) > 0
        assert sum(record["link"]["bytes_down"] for record in records) > 0
        if line["mode"] == "cloud":
            assert len(judged) == 1 and sum(record["outcome"] == "written" for record in records) > 6
        else:
            assert all(record["link"]["rtt_ms"] >= rtt_ms and record["wall_ms"] >= rtt_ms for record in judged)
            assert all(record["link"]["bytes_up"] > 0 and record["link"]["bytes_down"] > 0 for record in judged)
    assert min(line["wall_ms"] for line in far if line["mode"] == "cloud") < 6 * rtt_ms  # where nothing else took time
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Links are emulated" in page and f"lossless;k=5 @ {rtt_ms} ms" in page


@pytest.mark.parametrize(
    "where",
    [[], ["--cloud", "a.example"], ["--cloud", "localhost:1,localhost:2"], ["--cloud", "http://localhost:1/v1"]],
)
def test_a_link_is_emulated_to_one_server_on_this_machine_alone(
    again: Path, refused: Refused, where: list[str]
) -> None:
    args = compare_args(again, "--emulate-rtt", "10", *where, modes="edge,cloud")
    refused(*args, says="--emulate-rtt slows the link to one server on this machine")


def test_calibrate_then_compare_with_what_it_wrote(again: Path, invoke: Invoke) -> None:
    path = again / "c.json"
    prompts = ("--prompts", str(again / "prompts.jsonl"))
    status, stdout, _ = invoke("calibrate", *prompts, *TOYS, "--max-new-tokens", "48", "--out", str(path))
    assert status == 0
    assert "toy:drift=0.2 alone agrees with toy on 0." in stdout and str(path) in stdout
    found = json.loads(path.read_text())
    assert (found["draft"]["name"], found["target"]["name"]) == ("toy:drift=0.2", "toy")
    assert (found["fitted"]["num_prompts"], found["fitted"]["num_tokens"]) == (5, 2 * 5 * 48)
    head, *rows = [line.split() for line in stdout.splitlines() if line.startswith("  ")]
    assert [row[0] for row in rows] == ["0", "agree:2", "agree:4", "agree:6", "8", "text"]
    for row in rows:
        calls, written = list(map(float, row[1::2])), list(map(float, row[2::2]))
        assert len(calls) == len(written) == len(head) - 1 > 0
        assert calls == sorted(calls) and written == sorted(written)  # more agreement takes more
        assert all(few < many for few, many in zip(calls, written, strict=True)) or row[0] == "0"
    mode = "gate=calibrated:0.85;k=12;eager"
    args = compare_args(again, "--calibration", str(path), modes=f"edge,{mode}", tokens=40)
    assert invoke(*args)[0] == 0
    origins = {origin for line in generations(again / "out") if line["mode"] == mode for origin in line["origins"]}
    assert {"skipped", "accepted"} <= origins
    (again / "other").mkdir()
    status, _, err = invoke(*args, "--edge-model", "toy:drift=0.3", "--out", str(again / "other"))
    assert status == 2 and err.count("\n") == 1
    assert "made for toy:drift=0.2 and toy" in err and "does not fit toy:drift=0.3 and toy" in err


def test_a_calibration_made_here_is_found_without_being_named(again: Path, invoke: Invoke) -> None:
    args = compare_args(again, modes="gate=calibrated:0.85;k=12;eager", tokens=40)
    status, _, err = invoke(*args)
    assert status == 2 and "no calibration for toy:drift=0.2 and toy" in err.splitlines()[-1]
    assert "skydraft calibrate" in err
    (again / "more.txt").write_text("你好\n早上好", encoding="utf-8")
    prompts = ("--prompts", str(again / "prompts.jsonl"), "--prompts", str(again / "more.txt"), "--limit", "4")
    assert invoke("calibrate", *prompts, *TOYS, "--max-new-tokens", "48")[0] == 0
    (made,) = (again / "home" / "calibrations").iterdir()
    about = json.loads(made.read_text())["fitted"]
    assert (about["workload"], about["num_prompts"]) == ("prompts.jsonl + more.txt", 4 + 2)
    assert invoke(*args)[0] == 0
    assert len(generations(again / "out")) == 5


RECORDS = "records.jsonl"


@contextmanager
def running(folder: Path) -> Iterator[Started]:
    """A comparison that takes long and has begun to write; it is killed at the end."""
    args = compare_args(folder, "--min-new-tokens", "900", "--repetitions", "500", modes="edge,cloud", tokens=900)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with Started(*args, **quiet, env=os.environ | {"SKYDRAFT_HOME": str(folder / "home")}) as child:
        try:
            end, records = time.monotonic() + 60, folder / "out" / RECORDS
            while not (records.exists() and records.read_bytes().count(b"\n") > 1):
                assert time.monotonic() < end and child.poll() is None
                time.sleep(0.05)
            yield child
        finally:
            child.kill()


def test_a_second_comparison_in_a_folder_is_refused_and_harms_nothing(tmp_path: Path, invoke: Invoke) -> None:
    write_prompts(tmp_path)
    again = compare_args(tmp_path, modes="edge,cloud")
    with running(tmp_path) as child:
        status, out, err = invoke(*again)
        assert (status, out) == (2, "")
        assert err == (
            f"skydraft: Another comparison is writing to {tmp_path / 'out'}. "
            "Give another --out, or wait until that one is done.\n"
        )
        assert child.poll() is None
        child.send_signal(signal.SIGKILL)
        child.wait()
    lines = (tmp_path / "out" / RECORDS).read_bytes().split(b"\n")[:-1]
    assert [json.loads(line)["kind"] for line in lines] == ["run"] + ["generation"] * (len(lines) - 1)
    # What a killed process leaves does not stand in the way.
    assert "holds another run" in invoke(*again)[2]
    (tmp_path / "out" / RECORDS).unlink()
    assert invoke(*again)[0] == 0 and len(generations(tmp_path / "out")) == 10


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path, refused: Refused) -> None:
    write_prompts(tmp_path)
    (tmp_path / "out").touch()
    refused(*compare_args(tmp_path, modes="edge"), says="cannot be written")


def test_what_a_report_lacks_is_said_before_models_load(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_prompts(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    args = compare_args(tmp_path, "--no-scores", "--edge-model", "not-even-looked-for", modes="edge,cloud")
    refused(*args, says="pip install 'skydraft[report]'.", status=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["own", "vllm"])
def test_a_target_on_a_server_is_compared_over_its_link(kind: str, tmp_path: Path, invoke: Invoke) -> None:
    """Nothing of it is loaded here; the texts of mode cloud are those of the target in one process."""
    write_prompts(tmp_path, PROMPTS[:2])
    edge = ["--edge-model", "toy:drift=0.2", "--max-new-tokens", "8", "--prompts", str(tmp_path / "prompts.jsonl")]
    here = ["compare", *edge, "--cloud-model", "toy", "--modes", "edge,cloud,quality", "--no-scores"]
    assert invoke(*here, "--out", str(tmp_path / "here"))[0] == 0
    with serving(open_toy("toy")) if kind == "own" else fake("vllm") as server:
        address = server.address if isinstance(server, Serving) else server.url
        there = ["compare", *edge, "--cloud", address, "--out", str(tmp_path / "out")]
        status, _, err = invoke(*there)
        assert status == 0 and "not scored" in err
        again = invoke(*there)
        assert again[0] == 0 and "Continuing" in again[2]
        refusals = {
            "chooses its own": ["--execution", "exact"],
            "choose one": ["--local-only"],
            **({"--modes lossless;k=5: A server": ["--modes", "edge,lossless;k=5"]} if kind == "vllm" else {}),
        }
        for says, more in refusals.items():
            status, _, err = invoke(*there[:-1], str(tmp_path / "refused"), *more)
            assert status == 2 and says in err and err.count("\n") == 1
            assert not (tmp_path / "refused").exists()
    run = read_lines(tmp_path / "out")[0]
    assert run["target"]["name"].endswith(f" at {address}") and run["links"] == [None]
    modes = [mode["name"] for mode in run["modes"]]
    assert ("lossless;k=5" in modes) == (kind == "own") and {"edge", "cloud", "lossless", "quality"} <= set(modes)
    texts, known = ({key(line): line for line in generations(tmp_path / name)} for name in ("out", "here"))
    for name, line in texts.items():
        assert "edge-fallback" not in line["origins"]
        if line["mode"] in ("edge", "cloud"):
            assert line["token_ids"] == known[name]["token_ids"]
            spent = sum(entry["record"]["link"]["bytes_up"] for entry in line["rounds"])
            assert (spent > 0) == (line["mode"] == "cloud")
    assert (tmp_path / "out" / "report.html").exists()


def test_a_server_that_is_not_there_is_one_line_and_leaves_no_folder(tmp_path: Path, refused: Refused) -> None:
    write_prompts(tmp_path)
    where = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out"), "--edge-model", "toy"]
    cloud = ["--cloud", f"127.0.0.1:{free_port()}", "--cloud-timeout", "0.5"]
    refused("compare", *where, *cloud, says="did not answer", status=1)
    assert not (tmp_path / "out").exists()
