"""`skydraft compare` on the toy pair: what it writes, how it goes on after an interruption, and what it refuses."""

import csv
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from skydraft.engines.toy import open_toy
from skydraft.lab.evaluation.runner import alone_in

from ..comparing import PROMPTS, TOYS, compare_args, compared, generations, read_lines, write_prompts
from ..serving import Serving, serving
from ..stock.fakes import fake
from .conftest import Invoke, Refused

MODES = "edge,cloud,lossless;k=5,quality,edge;style=zh-short"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared(tmp_path_factory.mktemp("compare"), "--repetitions", "2", modes=MODES)


@pytest.fixture
def again(out: Path, tmp_path: Path) -> Path:
    """A folder with the same prompts, to which parts of the records may be copied."""
    write_prompts(tmp_path)
    (tmp_path / "out").mkdir()
    return tmp_path


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["prompt"], line["mode"], line["repetition"]


def said(line: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same in every run."""
    names = ("round", "base", "num_draft", "outcome", "num_accepted", "reason", "num_audited", "num_agreed")
    rounds = [[entry["record"][name] for name in names] for entry in line["rounds"]]
    return key(line), line["token_ids"], line["pieces"], line["origins"], line["finish"], rounds


def table(out: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((out / f"{name}.csv").read_bytes().decode(), newline="")))


def test_figures_are_those_of_the_summary_and_baselines_do_no_extra_work(out: Path) -> None:
    settings, figures = json.loads((out / "summary.json").read_text())["settings"], table(out, "figures")
    for rows, of, skip in ((figures, "measures", 0), (table(out, "differences"), "differences", 1)):
        for row, setting in zip(rows, settings[skip:], strict=True):
            assert row["mode"] == setting["mode"] and row.get("less", "edge") == "edge"
            for name, figure in setting[of].items():
                assert [float(row[name + end]) for end in ("", "_low", "_high")] == [*figure.values()]
    edge, cloud, *_ = figures
    assert edge["target_rows_per_token"] == edge["target_ms_per_token"] == "0.0" == cloud["draft_ms_per_token"]
    assert cloud["target_rows_per_token"] == cloud["target_passes_per_token"] == "1.0"
    page = (out / "report.html").read_text(encoding="utf-8")  # agreement under two styles is on two planes
    assert page.count("Agreement against cost, ") == 2 and (out / "plane-zh-short.svg").exists()


def test_each_token_is_a_row_with_what_was_judged_of_it(out: Path) -> None:
    tokens = table(out, "tokens")
    for line in generations(out):
        rows = [row for row in tokens if key(row | {"repetition": int(row["repetition"])}) == key(line)]
        assert [row["text"] for row in rows] == line["pieces"]
        judged = [each["record"] for each in line["rounds"] if each["record"]["outcome"] == "verified"]
        found = [sum(row["accepted"] == mark for row in rows) for mark in "10"]
        rejected = sum(each["num_accepted"] < each["num_draft"] for each in judged)
        assert found == [sum(each["num_accepted"] for each in judged), rejected]
    for row in table(out, "figures"):
        agrees = [int(token["agrees"]) for token in tokens if token["mode"] == row["mode"]]
        assert float(row["target_agreement"]) == pytest.approx(sum(agrees) / len(agrees), abs=1e-5)


@pytest.mark.parametrize(("whole_lines", "more_bytes"), [(1, 30), (30, 777), (51, 0), (None, 0)])
def test_it_is_continued(out: Path, again: Path, invoke: Invoke, whole_lines: int | None, more_bytes: int) -> None:
    """An interrupted comparison goes on where it stopped, and a finished one computes nothing again."""
    records, whole = again / "out" / "records.jsonl", (out / "records.jsonl").read_bytes()
    kept = b"".join(whole.splitlines(keepends=True)[:whole_lines])
    records.write_bytes(whole[: len(kept) + more_bytes])
    status, _, err = invoke(*compare_args(again, "--repetitions", "2", modes=MODES))
    assert status == 0 and records.read_bytes().startswith(kept)  # with the times that were measured then
    assert list(map(said, generations(again / "out"))) == list(map(said, generations(out)))
    old, new = ([line for line in read_lines(of) if line["kind"] == "score"] for of in (out, again / "out"))
    assert sorted(map(str, old)) == sorted(map(str, new))
    assert ("has 29 generations" in err) == (whole_lines == 30)
    if whole_lines is None:
        assert records.read_bytes() == whole
        for file in out.iterdir():
            assert (again / "out" / file.name).read_bytes() == file.read_bytes()


WRONG = {
    "--modes edge,turbo": "no mode 'turbo'", "--prompts missing.txt": "missing.txt cannot be read",
    "--calibration missing.json": "missing.json cannot be read", "--limit 0": "--limit",
    "--emulate-rtt -1": "--emulate-rtt",
    **{f"--emulate-rtt 10 {where}": "--emulate-rtt slows the link to one server on this machine"
       for where in ("", "--cloud a.example", "--cloud localhost:1,localhost:2", "--cloud http://[::1]/")},
}  # fmt: skip


@pytest.mark.parametrize("args", WRONG)
def test_wrong_use_is_one_line(tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, args: str) -> None:
    write_prompts(tmp_path)
    monkeypatch.chdir(tmp_path)
    refused(*compare_args(tmp_path, *args.split(), modes="edge"), says=WRONG[args])
    assert not (tmp_path / "out").exists()


def test_an_emulated_link_costs_its_round_trip_and_changes_no_text(tmp_path: Path) -> None:
    modes, rtt_ms = "edge,cloud,lossless;k=5,gate=entropy:1.5;k=4", 60
    for each in ("near", "far"):
        (tmp_path / each).mkdir()
    with serving(open_toy("toy")) as server:
        link = ["--cloud", server.address, "--limit", "2"]
        near = {key(line): said(line) for line in generations(compared(tmp_path / "near", *link, modes=modes))}
        out = compared(tmp_path / "far", *link, "--emulate-rtt", str(rtt_ms), modes=modes)
    far = generations(out)
    assert {key(line): said(line) for line in far} == near and len(near) == 8
    for line in (line for line in far if line["mode"] != "edge"):  # which crosses no link
        judged = [entry["record"] for entry in line["rounds"] if entry["record"]["outcome"] == "verified"]
        assert judged and line["wall_ms"] > rtt_ms
        assert all(sum(record["link"][way] for record in judged) > 0 for way in ("bytes_up", "bytes_down"))
        if line["mode"] != "cloud":  # whose tokens come without being asked for
            assert all(record["link"]["rtt_ms"] >= rtt_ms and record["wall_ms"] >= rtt_ms for record in judged)
    assert min(line["wall_ms"] for line in far if line["mode"] == "cloud") < 6 * rtt_ms  # where nothing else took time
    assert "The link is emulated" in (out / "report.html").read_text(encoding="utf-8")


def test_calibrate_then_compare_with_what_it_wrote(again: Path, invoke: Invoke) -> None:
    """A calibration in the cache is found, and one by its name; another pair's is refused."""
    mode = "auto;gate=calibrated:0.85;k=12;hand-back=0"
    args = compare_args(again, modes=f"edge,{mode}", tokens=40)
    (again / "more.txt").write_text("你好\n早上好", encoding="utf-8")
    prompts = ("--prompts", str(again / "prompts.jsonl"), "--prompts", str(again / "more.txt"), "--limit", "4")
    status, stdout, _ = invoke("calibrate", *prompts, *TOYS, "--max-new-tokens", "48")
    (made,) = (again / "home" / "calibrations").iterdir()
    assert status == 0 and "toy:drift=0.2 alone agrees with toy on 0." in stdout and str(made) in stdout
    fitted = json.loads(made.read_text())["fitted"]
    assert (fitted["workload"], fitted["num_prompts"]) == ("prompts.jsonl + more.txt", 4 + 2)
    _, *rows = [line.split() for line in stdout.splitlines() if line.startswith("  ")]
    assert [row[0] for row in rows] == ["0", "agree:2", "agree:4", "agree:6", "8", "text"]
    assert invoke(*args)[0] == 0
    origins = {origin for line in generations(again / "out") if line["mode"] == mode for origin in line["origins"]}
    assert {"skipped", "accepted"} <= origins
    other = ["--calibration", str(made), "--edge-model", "toy:drift=0.3", "--out", str(again / "other")]
    status, _, err = invoke(*args, *other)
    assert status == 2 and "does not fit toy:drift=0.3 and toy" in err.splitlines()[-1]


def test_a_folder_that_is_in_use_or_of_others_or_none_is_one_line(tmp_path: Path, refused: Refused) -> None:
    write_prompts(tmp_path)
    with alone_in(tmp_path / "out"):
        refused(*compare_args(tmp_path, modes="edge"), says=f"Another comparison is writing to {tmp_path / 'out'}.")
    records = tmp_path / "out" / "records.jsonl"
    records.write_text("no last newline")
    refused(*compare_args(tmp_path, modes="edge"), says="records.jsonl")
    assert records.read_text() == "no last newline"
    no_folder = ("--out", str(tmp_path / "prompts.jsonl"))
    refused(*compare_args(tmp_path, *no_folder, modes="edge"), says="cannot be written")


def test_without_matplotlib_a_line_says_so(tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "my out"
    tasks.write_text('{"prompt": "一", "check": {"kind": "regex", "pattern": "."}}')
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        args = ["--tasks", str(tasks), *TOYS, "--modes", "edge,cloud,lossless;k=3", "-n", "8", "--out", str(out)]
        status, table, err = invoke("compare", *args)
    lines = [line for line in err.splitlines() if "plots" in line]
    assert status == 0 and (out / "summary.json").exists()
    assert re.match(r"mode +agreement +right +calls a token +target wrote +tokens/s\nedge +\S+ +1.000 ", table)
    assert max(map(len, table.splitlines())) <= 120 and re.search(r"\nmode +acceptance .* repeats of 3 ", table)
    assert len(lines) == 1 and lines[0].endswith(f"pip install 'skydraft[report]'. Then: skydraft report '{out}'")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<svg" not in page and "against cost" not in page and "Tasks: tasks" in page
    assert invoke("report", str(out)) == (0, table, f"Report: {out / 'report.html'}\n")
    assert (out / "report.html").read_text(encoding="utf-8").count("<svg") == 3


@pytest.mark.parametrize("kind", ["own", "vllm"])
def test_a_target_on_a_server_is_compared(kind: str, tmp_path: Path, invoke: Invoke, refused: Refused) -> None:
    """Nothing of it is loaded here; the texts of mode cloud are those of the target in one process."""
    write_prompts(tmp_path, PROMPTS[:2])
    edge = ["--edge-model", "toy:drift=0.2", "--max-new-tokens", "8", "--prompts", str(tmp_path / "prompts.jsonl")]
    here = ["compare", *edge, "--cloud-model", "toy", "--modes", "edge,cloud,quality", "--no-scores"]
    assert invoke(*here, "--out", str(tmp_path / "here"))[0] == 0
    with serving(open_toy("toy")) if kind == "own" else fake("vllm") as server:
        address = server.address if isinstance(server, Serving) else server.url
        there = ["compare", *edge, "--cloud", address, "--out", str(tmp_path / "out")]
        status, _, err = invoke(*there)
        assert status == 0 and "judged" not in err
        status, _, err = invoke(*there)
        assert status == 0 and "Continuing" in err
        wrong = {"--local-only": "choose one"}
        for args, says in wrong.items() | ({("--modes lossless;k=5", ": A server")} if kind == "vllm" else set()):
            refused(*there[:-1], str(tmp_path / "refused"), *args.split(), says=says)
            assert not [*(tmp_path / "refused").glob("[!.]*")]
    run = read_lines(tmp_path / "out")[0]
    assert run["target"]["name"].endswith(f" at {address}")
    modes = [mode["name"] for mode in run["modes"]]
    assert ("lossless;k=5" in modes) == (kind == "own") and {"edge", "cloud", "lossless", "quality"} <= set(modes)
    texts, known = ({key(line): line for line in generations(tmp_path / name)} for name in ("out", "here"))
    for name, line in texts.items():
        assert "edge-fallback" not in line["origins"]
        if line["mode"] in ("edge", "cloud"):
            assert line["token_ids"] == known[name]["token_ids"]
            spent = sum(entry["record"]["link"]["bytes_up"] for entry in line["rounds"])
            assert (spent > 0) == (line["mode"] == "cloud")
    assert (tmp_path / "out" / "entropies.svg").exists()  # of checked drafts
