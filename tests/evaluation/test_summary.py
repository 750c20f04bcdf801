"""Figures of records made by hand, also of sets of tasks: intervals are paired, and none where there is nothing to
divide by. The report under docs/ says what the records beside it say.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.intervals import Figure, Resamples, share
from skydraft.lab.evaluation.findings import Findings
from skydraft.lab.evaluation.measures import INDICATORS, MEASURES, Case
from skydraft.lab.evaluation.records import PromptEntry, Records, VerdictLine, read_records
from skydraft.lab.evaluation.report.page import write_report
from skydraft.lab.evaluation.summary import summarize
from skydraft.lab.tasks.checks import Task
from skydraft.lab.tasks.figures import TaskMode, TaskSet, task_sets
from skydraft.types import Cost, LinkCost

from ..toys import law
from . import lines

MODES = ("edge", "cloud", "quality", "lossless")
Scores = list[tuple[float, float, float]]  # of edge, cloud, quality for each task
REPORT = Path(__file__).parents[2] / "docs" / "report-zh-dev"


def records(scores: Scores, modes: tuple[str, ...] = MODES) -> Records:
    """A run with these scores. Each mode writes texts of its own, but lossless has those of cloud."""
    task = Task.model_validate({"set": "s", "check": {"kind": "number", "answer": 1}})
    prompts = tuple(PromptEntry(id=f"s/{n}", prompt="x", task=task) for n in range(len(scores)))
    ids = {"edge": (1, 2, 3), "cloud": (4, 5, 6), "quality": (7, 8, 9), "lossless": (4, 5, 6)}
    made, judged = [], []
    for prompt, of in zip(prompts, scores, strict=True):
        made += [lines.generation(prompt=prompt.id, mode=mode, token_ids=ids[mode]) for mode in modes]
        for mode, score in zip(("edge", "cloud", "quality"), of, strict=True):
            judged.append(VerdictLine(prompt=prompt.id, token_ids=ids[mode], score=score, answer="", note=""))
    run = lines.run_line(prompts=prompts, modes=lines.modes(",".join(modes)))
    return Records(run=run, generations=tuple(made), scores=(), verdicts=tuple(judged))


def only_set(of: Records) -> tuple[TaskSet, dict[str, TaskMode]]:
    (found,) = task_sets(Findings(of))
    return found, {mode.mode: mode for mode in found.modes}


@law(20)
@given(st.integers(0, 10_000), st.integers(1, 40), st.just(1.0) | st.floats(0.5, 3))
def test_pairs_are_drawn_together(seed: int, size: int, factor: float) -> None:
    parts, wholes = np.random.default_rng(seed).uniform(1, 20, (2, size))
    changed = {np.divide: factor * parts, np.subtract: parts + factor * wholes}
    for how, theirs in changed.items():  # whatever is drawn; unpaired draws would spread
        figure = Resamples(size).compared(how, (theirs, wholes), (parts, wholes))
        assert figure and list(dict(figure).values()) == pytest.approx([factor] * 3, abs=1e-5)


def test_nothing_to_divide_by_is_no_interval_and_draws_without_the_one_prompt_that_counts_are_left_out() -> None:
    zeros, ones, resamples = np.zeros(4), np.ones(4), Resamples(4)
    assert resamples.figure(ones, zeros) is None
    for a, b in (((ones, zeros), (ones, ones)), ((ones, ones), (zeros, ones)), ((ones, ones), (ones, zeros))):
        assert resamples.compared(np.divide, a, b) is None
    assert resamples.figure(np.array([2.0, 0, 0, 0]), np.array([4.0, 0, 0, 0])) == Figure(value=0.5, low=0.5, high=0.5)


# The tokens of a text: parts and wholes of punctuation, repeats of 2 and of 3, adjacent repeats.
@pytest.mark.parametrize(("pieces", "found"), {
    (): [(0, 0)] * 4,
    ("员，", "在、员", "，在", "，员"): [(4, 9), (2, 4), (1, 3), (0, 9)],  # tokens that hold a mark
    ("在", "在", "在。在"): [(1, 5), (2, 3), (1, 2), (2, 5)],
    ("你好,世界！",): [(2, 6), (0, 3), (0, 2), (0, 6)],
    ("The cat", ", the cat sees", "."): [(2, 22), (1, 4), (0, 3), (0, 0)],
    ("公", "", "园", ""): [(0, 2), (0, 1), (0, 0), (0, 2)],  # ends within a character
}.items())  # fmt: skip
def test_punctuation_and_repeats_are_counted_by_the_characters(pieces: tuple[str, ...], found: Any) -> None:
    line = lines.generation().model_copy(update={"pieces": pieces})
    case = Case(lines.run_line().prompts[0], line, None, None)
    assert [measure.count(case) for measure in INDICATORS] == found


def test_differences_are_to_the_first_mode_and_paired_and_names_are_escaped(tmp_path: Path) -> None:
    edge, cloud = lines.modes("edge,cloud")
    run = lines.run_line(modes=(edge, replace(cloud, name=r"a|b_50%\c")))
    of = {"a": ("员", "在", "。"), "b": ("员，", "在", "。")}
    made = tuple(lines.generation(prompt=at, mode=mode.name, pieces=of[at]) for mode in run.modes for at in of)
    first, other = write_report(Findings(Records(run=run, generations=made, scores=())), tmp_path).settings
    assert first.differences == {} and first.measures["punctuation_density"].low < 3 / 7
    assert other.differences["punctuation_density"] == Figure(value=0, low=0, high=0)
    assert r"| a&#124;b_50%\c |" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_every_figure_of_a_text_is_what_its_rounds_say() -> None:
    ids, cost, nothing = (5, 1, 2, 1, 2, 7), Cost(2, 2, forward_ms=3.0), Cost()
    skipped = lines.record(outcome="skipped", num_draft=2, num_accepted=0, num_committed=2, target=nothing, wall_ms=4.0)
    checked = lines.record(num_audited=2, num_agreed=1, link=LinkCost(6.0, 40, 10), draft=cost, ended_ms=25.0)
    written = lines.record(outcome="written", num_draft=0, num_accepted=0, num_committed=1, draft=nothing, wall_ms=7.0,
                           target=Cost(1, 1, forward_ms=4.0), ended_ms=30.0)  # fmt: skip
    ids_of = [(each, (1,) * each.num_draft) for each in (skipped, checked, written)]
    rounds = tuple(lines.round_line(record=each, draft_ids=drafts, signals=()) for each, drafts in ids_of)
    of = {"origins": ("edge",) * 6, "pieces": ("a",) * 6, "rounds": rounds}
    made = lines.generation(mode="quality", token_ids=ids, wall_ms=20.0, **of)
    cloud = lines.generation(mode="cloud", token_ids=(5, 1, 2, 1, 2, 8), wall_ms=60.0, **of)
    score = lines.score(ids, choices=(5, 1, 2, 1, 2, 8))
    run = lines.run_line(modes=lines.modes("cloud,quality"))
    theirs, ours = summarize(Findings(Records(run=run, generations=(cloud, made), scores=(score,)))).settings
    expected = {
        "target_agreement": 5 / 6, "target_nll": 0.5, "same_as_cloud": 0, "cloud_calls_per_token": 1 / 6,
        "target_written_per_token": 2 / 6, "target_passes_per_token": 2 / 6, "target_rows_per_token": 5 / 6,
        "acceptance_rate": 2 / 3, "blocks_sent": 1, "mean_acceptance_length": 3,
        "tokens_per_s": 300, "ttft_ms": 12, "itl_ms": 18 / 4, "draft_ms_per_token": 1, "target_ms_per_token": 9 / 6,
        "overhead_ms_per_round": (1 + 1 + 3) / 3, "bytes_per_token": 50 / 6,
    }  # fmt: skip
    assert {name: ours.value(name) for name in expected} == pytest.approx(expected, abs=1e-5)
    of_texts = {measure.name for measure in INDICATORS}  # above
    assert {measure.name for measure in MEASURES} - expected.keys() == {"task_score"} | of_texts
    assert ours.differences["tokens_per_s"].value == pytest.approx(300 - 100)
    assert ours.speed_over["cloud"].value == pytest.approx(3) and theirs.value("same_as_cloud") == 1
    assert (ours.num_prompts, ours.num_generations, ours.num_tokens) == (1, 1, 6)


def test_figures_are_of_the_same_tasks_and_the_same_answers_have_the_same() -> None:
    scores = [(0.0, 1.0, 1.0)] * 12 + [(0.0, 1.0, 0.0)] * 12 + [(1.0, 1.0, 1.0)] * 4 + [(1.0, 1.0, 0.0)] * 2
    found, modes = only_set(records(scores))
    assert (found.num_tasks, found.is_apart) == (30, True)
    assert found.gap and found.gap.value == pytest.approx(0.8) and found.gap.low > 0.5
    figures = {name: (mode.score, mode.over_cloud, mode.recovered) for name, mode in modes.items()}
    values = {name: [each.value for each in of if each] for name, of in figures.items()}
    assert values["edge"] == pytest.approx([0.2, -0.8, 0])
    assert values["quality"] == pytest.approx([16 / 30, -14 / 30, (16 / 30 - 0.2) / 0.8], abs=1e-4)
    assert values["lossless"] == values["cloud"] == [1, 0, 1]
    assert all(each.low <= each.value <= each.high for of in figures.values() for each in of if each)
    assert {(each.low, each.high) for each in figures["lossless"][1:] if each} == {(0, 0), (1, 1)}  # they are paired


def test_a_small_gap_and_one_that_may_be_none_say_so() -> None:
    near, modes = only_set(records([(0.0, 1.0, 1.0)] + [(1.0, 1.0, 1.0)] * 39))
    assert not near.is_apart and modes["quality"].recovered is None
    # A gap of 10 points between so few tasks may be none.
    few, modes = only_set(records([(0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (0.0, 1.0, 0.0)] + [(1.0, 1.0, 1.0)] * 7))
    assert few.is_apart and few.gap and few.gap.low <= 0 and modes["quality"].recovered is None


def test_without_edge_or_cloud_only_scores_are_known() -> None:
    found, modes = only_set(records([(0.0, 1.0, 1.0)] * 3, ("cloud", "quality")))
    assert found.gap is None and not found.is_apart
    assert modes["quality"].recovered is None and modes["quality"].over_cloud
    assert only_set(records([(0.0, 1.0, 1.0)] * 3, ("quality",)))[1]["quality"].score.value == 1


@pytest.mark.parametrize("num_judged", [5, 0])
def test_a_task_without_a_verdict_is_left_out_everywhere(num_judged: int) -> None:
    whole = records([(0.0, 1.0, 1.0), (1.0, 1.0, 1.0)])
    found = task_sets(Findings(whole.model_copy(update={"verdicts": whole.verdicts[:num_judged]})))
    assert [each.num_tasks for each in found] == [1] * (num_judged // 3)


def test_wilsons_interval_is_the_known_one() -> None:
    found = share(np.array([1.0] * 15 + [0.0] * 5))  # 0.5313 to 0.8881 in tables
    assert (found.value, found.low, found.high) == pytest.approx((0.75, 0.5313, 0.8881), abs=1e-4)
    assert share(np.zeros(10)).high == pytest.approx(0.2775, abs=1e-4) and share(np.ones(10)).low > 0.7


def test_everything_beside_the_records_is_made_from_them(tmp_path: Path) -> None:
    published = json.loads((REPORT / "summary.json").read_text(encoding="utf-8"))
    findings = Findings(read_records(REPORT / "records.jsonl"))
    made = write_report(findings, tmp_path).model_dump(mode="json", by_alias=True)
    assert made["run"] == published["run"] and made["run"]["num_prompts"] == 62
    for mine, theirs in zip(made["settings"], published["settings"], strict=True):
        for of in ("measures", "differences", "speed_over"):
            assert mine[of].keys() == theirs[of].keys()
            for name, figure in mine[of].items():
                assert figure == pytest.approx(theirs[of][name], abs=2e-5), (mine["mode"], name)
    for name in ("report.html", "table.md"):
        ours, shown = ((folder / name).read_text(encoding="utf-8") for folder in (tmp_path, REPORT))
        assert ours.count("<svg") == shown.count("<svg") == (name == "report.html")
        # Plots may differ with another version of matplotlib.
        assert len({re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL) for text in (ours, shown)}) == 1
