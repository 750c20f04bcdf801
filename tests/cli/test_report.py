"""`skydraft report`: the page and the summary, made of the records alone; figures: tests/evaluation/test_summary.py."""

import json
import re
import sys
from pathlib import Path

import pytest

from skydraft import api
from skydraft.lab.evaluation.records import read_records
from skydraft.origins import LOOKS

from ..comparing import compared
from .conftest import Invoke

MODES = "edge,cloud,lossless;k=5,quality,gate=entropy:1.5;k=4"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared(tmp_path_factory.mktemp("report"), modes=MODES)


@pytest.fixture(scope="module")
def page(out: Path) -> str:
    return (out / "report.html").read_text(encoding="utf-8")


def test_tokens_are_marked_by_origin_and_boxed_where_the_target_disagrees(out: Path, page: str) -> None:
    records = read_records(out / "records.jsonl")
    scores = {(line.prompt, line.token_ids): line for line in records.scores}
    lines = {(line.prompt, line.mode): line for line in records.generations}
    shown = iter(re.findall('<i class="([^"]*)" title="([^"]+)">', page))
    for line in (lines[prompt.id, mode] for prompt in records.run.prompts for mode in MODES.split(",")):
        score = scores[line.prompt, line.token_ids]
        for at, (origin, text) in enumerate(zip(line.origins, line.pieces, strict=True)):
            agrees, (classes, tells) = score.choices[at] == line.token_ids[at], next(shown)
            assert set(classes) - {" "} == {origin[0], *"x" * (not agrees), *"n" * text.startswith("\n")}
            assert tells.startswith(f"{origin} · round ") and f"entropy {score.signals[at][0]:.2f} nats" in tells
            assert tells.endswith("target agrees") == agrees
    assert next(shown, None) is None


def test_origins_are_shown_and_explained_as_everywhere(page: str) -> None:
    for origin, look in LOOKS.items():
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
