"""Labels: what a draft model says along a text against what the target says there."""

from collections import Counter
from dataclasses import astuple
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft.config import DecodingParams
from skydraft.decoding.plan import make_plan
from skydraft.gating.fitting import agreement
from skydraft.gating.hand_back import parse_hand_back
from skydraft.lab.evaluation.scoring import scores
from skydraft.lab.learning.calibrating import calibrate_lessons, label_texts, labelled, read_lessons
from skydraft.lab.learning.dataset import choose
from skydraft.lab.learning.lessons import Store
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt
from tests.evaluation import pairs


def test_prompts_are_labelled_along_what_each_model_writes_alone() -> None:
    (edge, cloud), workload, done = pairs.pair(0.3), pairs.workload(4, 3), []
    texts = label_texts(edge, cloud, [asked(entry.prompt) for entry in workload.prompts], 20, lambda: done.append(1))
    assert [text.path for text in texts] == ["target", "draft"] * 3 and len(done) == 3
    params = DecodingParams(max_new_tokens=20)
    for mine, (entry, mode) in zip(texts, product(workload.prompts, ("cloud", "edge")), strict=True):
        alone = skydraft.generate(entry.prompt, edge=edge, cloud=cloud, plan=make_plan(mode), params=params).run()
        (line,) = scores((edge, cloud), entry.id, read_prompt(edge, asked(entry.prompt)), params, [alone.token_ids])
        assert mine.disagrees == tuple(one != other for one, other in zip(line.drafted, line.choices, strict=True))
        for one, other in zip(mine.signals, line.signals, strict=True):
            assert astuple(one) == pytest.approx(other, abs=1e-4)  # a record has them rounded
    share, num_tokens = agreement(texts[1::2])
    assert num_tokens == 60 and 0.2 < share < 1


@pytest.mark.parametrize("folder", ["taught", "written_on"])
def test_a_label_is_what_was_collected(pair: tuple[Any, Any], folder: str, request: pytest.FixtureRequest) -> None:
    """And has signals everywhere."""
    marks = Counter[str]()
    for lesson in choose(Store(request.getfixturevalue(folder)), pair[0].vocab)[0][:10]:
        found = labelled(pair[0], lesson)
        places = [index for index, mark in enumerate(lesson.marks) if mark != "-"]
        assert len(places) == len(found.disagrees) == len(found.signals)
        for index, wrong in zip(places, found.disagrees, strict=True):
            assert lesson.marks[index] in ("t", *("cw" if wrong else "a"))
        marks.update(lesson.marks)
    assert marks["a"] > 20 and marks["c"] > 20, marks


def test_what_the_target_wrote_on_calibrates_and_teaches(pair: tuple[Any, Any], written_on: Path) -> None:
    lessons, _ = choose(Store(written_on), pair[0].vocab)
    texts = read_lessons(pair[0], lessons, lambda: None)
    made, unseen = calibrate_lessons(lessons, texts, pair[0], "written")
    judged = sum(len(lesson.marks) - lesson.marks.count("-") for lesson in lessons)
    assert agreement(unseen)[1] == made.fitted["num_tokens"] == judged
    assert sum(map(len, (lesson.known for lesson in lessons))) > 0.5 * judged
    for name in ("0", "agree:4"):
        points = made.curve(6, parse_hand_back(name)).points
        assert points[0].agreement == 1 > points[-1].agreement


def test_a_label_by_another_model_is_what_that_model_says(pair: tuple[Any, Any], taught: Path) -> None:
    lesson = choose(Store(taught), pair[0].vocab)[0][0]
    assert not any(labelled(pair[1], lesson).disagrees)  # the target agrees with itself
    known = {"marks": "w" + lesson.marks[1:]}
    assert labelled(pair[1], lesson.model_copy(update=known)).disagrees[0]  # whatever it says
