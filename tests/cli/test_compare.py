"""`skydraft compare` and `report` on the toy pair: what they write and refuse. Figures: tests/evaluation."""

import csv
import io
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from skydraft.engines.toy import open_toy
from skydraft.lab.evaluation.runner import alone_in

from ..evaluation.pairs import PROMPTS, TOYS, compare_args, compare_toys, generations, read_lines, write_prompts
from ..serving import Serving, serving
from ..stock.fakes import fake
from .conftest import Invoke, Refused

MODES = "edge,cloud,lossless;k=5,quality,edge;style=zh-short"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compare_toys(tmp_path_factory.mktemp("compare"), "--repetitions", "2", modes=MODES)


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["prompt"], line["mode"], line["repetition"]


def said(line: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same in every run."""
    return line["token_ids"], line["pieces"], line["origins"], line["finish"]


def test_each_token_is_a_row_with_what_was_judged_of_it(out: Path) -> None:
    assert (out / "plane.svg").exists() and (out / "plane-zh-short.svg").exists()  # one for each style
    assert (out / "indicators.svg").read_text(encoding="utf-8").startswith("<svg")
    tokens = list(csv.DictReader(io.StringIO((out / "tokens.csv").read_bytes().decode(), newline="")))
    for line in generations(out):
        rows = [row for row in tokens if key(row | {"repetition": int(row["repetition"])}) == key(line)]
        assert [row["text"] for row in rows] == line["pieces"]
        judged = [each["record"] for each in line["rounds"] if each["record"]["outcome"] == "verified"]
        rejected = sum(each["num_accepted"] < each["num_draft"] for each in judged)
        marks = Counter(row["accepted"] for row in rows)
        assert (marks["1"], marks["0"]) == (sum(each["num_accepted"] for each in judged), rejected)
    for each in json.loads((out / "summary.json").read_text())["settings"]:
        agrees = [int(token["agrees"]) for token in tokens if token["mode"] == each["mode"]]
        assert each["measures"]["target_agreement"]["value"] == pytest.approx(sum(agrees) / len(agrees), abs=1e-5)


@pytest.mark.parametrize("num_lines", [1, 14])
def test_an_unfinished_comparison_has_a_page_so_far(out: Path, invoke: Invoke, tmp_path: Path, num_lines: int) -> None:
    lines = (out / "records.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_text("".join(lines[:num_lines]), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        for library in ("torch", "transformers", "llama_cpp"):  # no model is needed
            patch.setitem(sys.modules, library, None)
        status, table, err = invoke("report", str(tmp_path))
    assert status == 0 and table.startswith("mode ") and "report.html" in err
    settings = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["settings"]
    assert [setting["num_prompts"] for setting in settings] == [2] * 5 * (num_lines > 1)


def test_an_emulated_link_costs_its_round_trip_and_changes_no_text(tmp_path: Path) -> None:
    modes, rtt_ms, lines = "edge,cloud,lossless;k=5", 60, {}
    with serving(open_toy("toy")) as server:
        for name, more in (("near", ()), ("far", ("--emulate-rtt", str(rtt_ms)))):
            (tmp_path / name).mkdir()
            out = compare_toys(tmp_path / name, "--cloud", server.address, "--limit", "1", *more, modes=modes)
            lines[name] = {key(line): line for line in generations(out)}
    assert [*map(said, lines["far"].values())] == [*map(said, lines["near"].values())] and len(lines["far"]) == 3
    _, cloud, lossless = lines["far"].values()
    judged = [entry["record"] for entry in lossless["rounds"] if entry["record"]["outcome"] == "verified"]
    assert judged and all(min(record["link"]["rtt_ms"], record["wall_ms"]) >= rtt_ms for record in judged)
    assert rtt_ms < cloud["wall_ms"] < len(cloud["token_ids"]) * rtt_ms  # tokens come without being asked for
    assert "The link is emulated" in (out / "report.html").read_text(encoding="utf-8")


def test_calibrate_then_compare_with_what_it_wrote(tmp_path: Path, invoke: Invoke) -> None:
    """A calibration in the cache is found, and one by its name; another pair's is refused."""
    mode, prompts = "auto;gate=calibrated:0.85;k=12;hand-back=0", str(write_prompts(tmp_path))
    args = compare_args(tmp_path, modes=f"edge,{mode}", tokens=40)
    (more := tmp_path / "more.txt").write_text("你好\n早上好", encoding="utf-8")
    given = ("--prompts", prompts, "--prompts", str(more), "--limit", "4", *TOYS, "-n", "48")
    status, stdout, _ = invoke("calibrate", *given)
    (made,) = (tmp_path / "home" / "calibrations").iterdir()
    assert status == 0 and "toy:drift=0.2 alone agrees with toy on 0." in stdout and str(made) in stdout
    fitted = json.loads(made.read_text())["fitted"]
    assert (fitted["workload"], fitted["num_prompts"]) == ("prompts.jsonl + more.txt", 4 + 2)
    costs = re.findall(r"^calibrated:0\.\d+ takes (0\.\d+) calls a token", stdout, re.M)
    assert len(costs) > 1 and costs == sorted(costs, key=float) and invoke(*args)[0] == 0
    origins = {origin for line in generations(tmp_path / "out") if line["mode"] == mode for origin in line["origins"]}
    assert {"skipped", "accepted"} <= origins
    status, _, err = invoke(*args, "--calibration", str(made), "--edge-model", "toy", "--out", str(tmp_path / "other"))
    assert status == 2 and "does not fit toy and toy" in err.splitlines()[-1]


def test_a_folder_that_is_in_use_is_one_line(tmp_path: Path, refused: Refused) -> None:
    write_prompts(tmp_path)
    with alone_in(tmp_path / "out"):
        refused(*compare_args(tmp_path, modes="edge"), says=f"Another comparison is writing to {tmp_path / 'out'}.")


def test_without_matplotlib_a_line_says_so(tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "my out"
    tasks.write_text('{"prompt": "一", "check": {"kind": "regex", "pattern": "."}}')
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        args = ["--tasks", str(tasks), *TOYS, "--modes", "edge,cloud,lossless;k=3", "-n", "8", "--out", str(out)]
        status, table, err = invoke("compare", *args)
    (line,) = (line for line in err.splitlines() if "plots" in line)
    assert status == 0 and line.endswith(f"pip install 'skydraft[report]'. Then: skydraft report '{out}'")
    assert re.match(r"mode +agreement +right +calls a token +.*tokens/s\nedge +\S+ +1.000 ", table)
    assert max(map(len, table.splitlines())) <= 120 and "<svg" not in (page := out / "report.html").read_text("utf-8")
    assert invoke("report", str(out)) == (0, table, f"Report: {page}\n")
    assert page.read_text("utf-8").count("<svg") == 2


@pytest.mark.parametrize("kind", ["own", "vllm"])
def test_a_target_on_a_server_is_compared(kind: str, tmp_path: Path, invoke: Invoke, refused: Refused) -> None:
    """Nothing of it is loaded here; the texts of mode cloud are those of the target in one process."""
    prompts = str(write_prompts(tmp_path, PROMPTS[:2]))
    args = ["compare", "--edge-model", "toy:drift=0.2", "-n", "8", "--prompts", prompts, "--out"]
    here = ["--cloud-model", "toy", "--modes", "edge,cloud,quality", "--no-scores"]
    assert invoke(*args, str(tmp_path / "here"), *here)[0] == 0
    with serving(open_toy("toy")) if kind == "own" else fake("vllm") as server:
        address = server.address if isinstance(server, Serving) else server.url
        for says in ("", "Continuing"):
            status, _, err = invoke(*args, str(tmp_path / "out"), "--cloud", address)
            assert status == 0 and "judged" not in err and says in err
        if kind == "vllm":
            more = ("--cloud", address, "--modes", "lossless;k=5")
            refused(*args, str(tmp_path / "refused"), *more, says=": A server")
            assert not [*(tmp_path / "refused").glob("[!.]*")]
    run = read_lines(tmp_path / "out")[0]
    modes = {mode["name"] for mode in run["modes"]}
    assert run["target"]["name"].endswith(f" at {address}") and modes >= {"edge", "cloud", "lossless", "quality"}
    assert ("lossless;k=5" in modes) == (kind == "own")
    texts, known = ({key(line): line for line in generations(tmp_path / name)} for name in ("out", "here"))
    assert not any("edge-fallback" in line["origins"] for line in texts.values())
    for name, line in texts.items():
        if line["mode"] in ("edge", "cloud"):
            assert line["token_ids"] == known[name]["token_ids"]
            spent = sum(entry["record"]["link"]["bytes_up"] for entry in line["rounds"])
            assert (spent > 0) == (line["mode"] == "cloud")
