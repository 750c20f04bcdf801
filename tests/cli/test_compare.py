"""`skydraft compare` and `report` on the toy pair: what they write and refuse. Figures: tests/evaluation."""

import csv
import io
import json
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from skydraft import api
from skydraft.engines.toy import open_toy
from skydraft.lab.evaluation.records import read_records
from skydraft.lab.evaluation.runner import alone_in
from skydraft.origins import LOOKS

from ..comparing import PROMPTS, TOYS, compare_args, compared, generations, read_lines, write_prompts
from ..serving import Serving, serving
from ..stock.fakes import fake
from .conftest import Invoke, Refused

MODES = "edge,cloud,lossless;k=5,quality,edge;style=zh-short"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared(tmp_path_factory.mktemp("compare"), "--repetitions", "2", modes=MODES)


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["prompt"], line["mode"], line["repetition"]


def said(line: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same in every run."""
    names = ("round", "base", "num_draft", "outcome", "num_accepted", "reason", "num_audited", "num_agreed")
    rounds = [[entry["record"][name] for name in names] for entry in line["rounds"]]
    return line["token_ids"], line["pieces"], line["origins"], line["finish"], rounds


def test_baselines_do_no_extra_work_and_each_style_has_a_plane(out: Path) -> None:
    settings = json.loads((out / "summary.json").read_text())["settings"]
    edge, cloud, *_ = ({name: of["value"] for name, of in each["measures"].items()} for each in settings)
    assert edge["target_rows_per_token"] == edge["target_ms_per_token"] == 0 == cloud["draft_ms_per_token"]
    assert cloud["target_rows_per_token"] == cloud["target_passes_per_token"] == 1
    page = (out / "report.html").read_text(encoding="utf-8")  # agreement under two styles is on two planes
    assert page.count("Agreement against cost, ") == 2 and (out / "plane-zh-short.svg").exists()


def test_each_token_is_a_row_with_what_was_judged_of_it(out: Path) -> None:
    tokens = list(csv.DictReader(io.StringIO((out / "tokens.csv").read_bytes().decode(), newline="")))
    for line in generations(out):
        rows = [row for row in tokens if key(row | {"repetition": int(row["repetition"])}) == key(line)]
        assert [row["text"] for row in rows] == line["pieces"]
        judged = [each["record"] for each in line["rounds"] if each["record"]["outcome"] == "verified"]
        found = [sum(row["accepted"] == mark for row in rows) for mark in "10"]
        rejected = sum(each["num_accepted"] < each["num_draft"] for each in judged)
        assert found == [sum(each["num_accepted"] for each in judged), rejected]
    for each in json.loads((out / "summary.json").read_text())["settings"]:
        agrees = [int(token["agrees"]) for token in tokens if token["mode"] == each["mode"]]
        assert each["measures"]["target_agreement"]["value"] == pytest.approx(sum(agrees) / len(agrees), abs=1e-5)


def test_tokens_are_marked_by_origin_and_boxed_where_the_target_disagrees(out: Path) -> None:
    page = (out / "report.html").read_text(encoding="utf-8")
    records = read_records(out / "records.jsonl")
    scores = {(line.prompt, line.style, line.token_ids): line for line in records.scores}
    lines = {(line.prompt, line.mode): line for line in records.generations if line.repetition == 0}
    shown = iter(re.findall('<i class="([^"]*)" title="([^"]+)">', page))
    for prompt, mode in product(records.run.prompts, records.run.modes):
        line = lines[prompt.id, mode.name]
        score = scores[line.prompt, mode.style, line.token_ids]
        for at, (origin, text) in enumerate(zip(line.origins, line.pieces, strict=True)):
            agrees, (classes, tells) = score.choices[at] == line.token_ids[at], next(shown)
            assert set(classes) - {" "} == {origin[0], *"x" * (not agrees), *"n" * text.startswith("\n")}
            assert tells.startswith(f"{origin} · round ") and f"entropy {score.signals[at][0]:.2f} nats" in tells
            assert tells.endswith("target agrees") == agrees
    assert next(shown, None) is None
    for origin, look in LOOKS.items():  # as everywhere
        assert f"color: light-dark({look.light}, {look.dark}); text-decoration: {look.line};" in page
        assert f">{origin}</i></dt><dd>{look.meaning}</dd>" in page


def test_records_alone_make_a_page(out: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(api, "load")
    for library in ("torch", "transformers", "llama_cpp"):
        monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "records.jsonl").write_bytes((out / "records.jsonl").read_bytes())
    status, stdout, err = invoke("report", str(tmp_path))
    assert status == 0 and stdout.startswith("mode ") and "\nedge " in stdout and "report.html" in err
    for file in out.iterdir():
        assert file.name == ".lock" or (tmp_path / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("keep", ["run", "half"])
def test_an_unfinished_comparison_has_a_page_so_far(out: Path, invoke: Invoke, tmp_path: Path, keep: str) -> None:
    lines = (out / "records.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_text("".join(lines[:1] if keep == "run" else lines[:14]), encoding="utf-8")
    assert invoke("report", str(tmp_path))[0] == 0
    settings = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["settings"]
    assert [setting["num_prompts"] for setting in settings] == ([] if keep == "run" else [2] * 5)


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


def test_calibrate_then_compare_with_what_it_wrote(tmp_path: Path, invoke: Invoke) -> None:
    """A calibration in the cache is found, and one by its name; another pair's is refused."""
    mode = "auto;gate=calibrated:0.85;k=12;hand-back=0"
    write_prompts(tmp_path)
    args = compare_args(tmp_path, modes=f"edge,{mode}", tokens=40)
    (tmp_path / "more.txt").write_text("你好\n早上好", encoding="utf-8")
    prompts = ("--prompts", str(tmp_path / "prompts.jsonl"), "--prompts", str(tmp_path / "more.txt"), "--limit", "4")
    status, stdout, _ = invoke("calibrate", *prompts, *TOYS, "--max-new-tokens", "48")
    (made,) = (tmp_path / "home" / "calibrations").iterdir()
    assert status == 0 and "toy:drift=0.2 alone agrees with toy on 0." in stdout and str(made) in stdout
    fitted = json.loads(made.read_text())["fitted"]
    assert (fitted["workload"], fitted["num_prompts"]) == ("prompts.jsonl + more.txt", 4 + 2)
    costs = [float(cost) for cost in re.findall(r"^calibrated:0\.\d+ takes (0\.\d+) calls a token", stdout, re.M)]
    assert len(costs) > 1 and costs == sorted(costs)
    assert invoke(*args)[0] == 0
    origins = {origin for line in generations(tmp_path / "out") if line["mode"] == mode for origin in line["origins"]}
    assert {"skipped", "accepted"} <= origins
    other = ["--calibration", str(made), "--edge-model", "toy:drift=0.3", "--out", str(tmp_path / "other")]
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
    assert max(map(len, table.splitlines())) <= 120
    assert len(lines) == 1 and lines[0].endswith(f"pip install 'skydraft[report]'. Then: skydraft report '{out}'")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<svg" not in page and "against cost" not in page and "Tasks: tasks" in page
    assert invoke("report", str(out)) == (0, table, f"Report: {out / 'report.html'}\n")
    assert (out / "report.html").read_text(encoding="utf-8").count("<svg") == 2


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
        if kind == "vllm":
            refused(*there[:-1], str(tmp_path / "refused"), "--modes", "lossless;k=5", says=": A server")
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
