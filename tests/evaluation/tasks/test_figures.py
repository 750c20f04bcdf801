"""The figures of a set of tasks, of records made by hand."""

import numpy as np
import pytest

from skydraft.intervals import share
from skydraft.lab.evaluation.findings import Findings
from skydraft.lab.evaluation.records import PromptEntry, Records, VerdictLine
from skydraft.lab.tasks.checks import Task
from skydraft.lab.tasks.figures import TaskMode, TaskSet, task_sets

from .. import lines

MODES = ("edge", "cloud", "quality", "lossless")
Scores = list[tuple[float, float, float]]  # of edge, cloud, quality for each task


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
