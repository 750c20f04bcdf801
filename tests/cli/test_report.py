"""Every figure of a report, counted again from its records by other code: in summary.json and on the page."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from skydraft import api
from skydraft.cli.main import run
from skydraft.evaluation.measures import MEASURES
from skydraft.origins import LOOKS

from ..comparing import compared, read_lines
from ..evaluation.recount import Recount, tables_of
from .conftest import Invoke, Refused

MODES = "edge,cloud,lossless;k=5,quality,gate=entropy:1.5;k=4,cloud;style=zh-short,gate=entropy:2;k=3;style=zh-short"
NOT_HERE = {"bytes_per_token", "task_score"}  # no link, and no tasks


def doctored(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records whose drafts go round in circles: what the toys write has no repeats to count."""
    changed: dict[Any, list[int]] = {}
    for line in lines:
        if line["kind"] == "generation" and line["mode"] == "edge":
            size, key = len(line["token_ids"]), (line["prompt"], tuple(line["token_ids"]))
            line["token_ids"] = changed[key] = ([5, 5, 5, 5, 8, 1, 2, 1, 2, 1, 2, 9, 1, 2, 3, 1, 2, 3] * size)[:size]
    scores = [line for line in lines if line["kind"] == "score" and line["style"] is None]
    news = [(line, changed.get((line["prompt"], tuple(line["token_ids"])))) for line in scores]
    return [*lines, *(line | {"token_ids": new} for line, new in news if new)]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison whose records were changed by hand, and its report made again."""
    out = compared(tmp_path_factory.mktemp("report"), "--repetitions", "2", modes=MODES)
    changed = doctored(read_lines(out))
    (out / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed), encoding="utf-8")
    assert run(["report", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def recount(out: Path) -> Recount:
    return Recount(out / "records.jsonl")


@pytest.fixture(scope="module")
def summary(out: Path) -> Any:
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(out: Path) -> str:
    return (out / "report.html").read_text(encoding="utf-8")


def test_the_records_have_something_of_everything_to_count(recount: Recount) -> None:
    shown = {name for setting in recount.pairs for name in recount.pairs[setting] if recount.value(setting, name)}
    assert {measure.name for measure in MEASURES} - shown == NOT_HERE


@pytest.mark.parametrize(
    "measure", [each for each in MEASURES if each.name != "task_score"], ids=lambda each: each.name
)
def test_a_figure_of_the_summary_is_what_the_records_say(recount: Recount, summary: Any, measure: Any) -> None:
    assert [setting["mode"] for setting in summary["settings"]] == MODES.split(",")
    for setting in summary["settings"]:
        expected = recount.value(setting["mode"], measure.name)
        found = setting["measures"].get(measure.name)
        assert (found is None) == (expected is None)
        if found and expected is not None:
            assert found["value"] == pytest.approx(expected, abs=1e-5)
            close = pytest.approx(recount.interval(setting["mode"], measure.name), abs=2e-5, rel=1e-6)
            assert (found["low"], found["high"]) == close


def test_every_cell_of_the_page_is_a_figure_of_the_summary(summary: dict[str, Any], page: str) -> None:
    by_label = {measure.label: measure for measure in MEASURES}
    figures = {setting["mode"]: setting["measures"] for setting in summary["settings"]}
    seen = set()
    for table in tables_of(page):
        for mode, cells in table.items():
            for label in cells.keys() & by_label.keys():
                measure, (shown, interval) = by_label[label], cells[label]
                found = figures[mode].get(measure.name)
                assert (shown == "") == (found is None)
                if found:
                    seen.add(measure.name)
                    close = 0.5 * 10**-measure.digits + 1e-5
                    bounds = list(map(float, interval.split(" to "))) if interval else [float(shown)] * 2
                    told = [found["value"], found["low"], found["high"]]
                    assert [float(shown), *bounds] == pytest.approx(told, abs=close)
    assert seen == {measure.name for measure in MEASURES} - NOT_HERE


def test_speeds_in_units_of_a_baseline_and_counts(recount: Recount, page: str, summary: dict[str, Any]) -> None:
    table = tables_of(page)[0]
    for setting in summary["settings"]:
        mode, lines = setting["mode"], recount.of(setting["mode"])
        mine, theirs = recount.value(mode, "tokens_per_s"), recount.value("cloud", "tokens_per_s")
        assert mine is not None and theirs is not None
        assert setting["speed_over"]["cloud"]["value"] == pytest.approx(mine / theirs, abs=1e-5)
        assert float(table[mode]["speed, cloud = 1"][0]) == pytest.approx(mine / theirs, abs=0.0051)
        assert (setting["num_prompts"], setting["num_generations"]) == (5, 10)
        assert setting["num_tokens"] == sum(len(line["token_ids"]) for line in lines)


def test_tokens_are_marked_by_origin_and_boxed_where_the_target_disagrees(recount: Recount, page: str) -> None:
    first = {(line["prompt"], line["mode"]): line for line in reversed(recount.generations)}
    lines = [first[prompt["id"], mode] for prompt in recount.run["prompts"] for mode in MODES.split(",")]
    expected = []
    for line in lines:
        score = recount.score(line)
        assert score
        for at, origin in enumerate(line["origins"]):
            agrees = score["choices"][at] == line["token_ids"][at]
            also = {"x": not agrees, "n": line["pieces"][at].startswith("\n")}
            marks = {origin[0], *(mark for mark, has in also.items() if has)}
            expected.append((origin, agrees, marks, f"entropy {score['signals'][at][0]:.2f} nats"))
    shown = re.findall('<i class="([^"]*)" title="([^"]+)">', page)
    for (classes, tells), (origin, agrees, marks, entropy) in zip(shown, expected, strict=True):
        assert tells.startswith(f"{origin} · round ") and entropy in tells
        assert set(classes.split()) == marks
        assert tells.endswith("target agrees") == agrees


def test_origins_are_shown_and_explained_as_everywhere(page: str) -> None:
    for origin, look in LOOKS.items():
        assert f"color: light-dark({look.light}, {look.dark}); text-decoration: {look.line};" in page
        assert f">{origin}</i></dt><dd>{look.meaning}</dd>" in page


def test_the_page_is_made_of_the_records_alone(
    out: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(api, "load")
    for library in ("torch", "transformers", "llama_cpp"):
        monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "records.jsonl").write_bytes((out / "records.jsonl").read_bytes())
    status, stdout, err = invoke("report", str(tmp_path))
    assert status == 0 and stdout.startswith("mode ") and "\nedge " in stdout and "report.html" in err
    for name in ("report.html", "summary.json"):
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes()


@pytest.mark.parametrize("keep", ["run", "half"])
def test_a_comparison_that_was_not_finished_has_a_page_of_what_is_there(
    out: Path, invoke: Invoke, tmp_path: Path, keep: str
) -> None:
    lines = (out / "records.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_text("".join(lines[:1] if keep == "run" else lines[:20]), encoding="utf-8")
    assert invoke("report", str(tmp_path))[0] == 0
    settings = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["settings"]
    assert [setting["num_prompts"] for setting in settings] == ([] if keep == "run" else [2] * 7)


def test_a_folder_without_records_is_one_line_and_exit_status_2(refused: Refused, tmp_path: Path) -> None:
    refused("report", str(tmp_path / "nowhere"), says="nowhere/records.jsonl cannot be read")
