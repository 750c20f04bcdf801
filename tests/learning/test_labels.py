"""Labels: what is collected equals what the models would say at that prefix, what nobody judged is no label, and what a
draft model says along a text is held against what the target says there.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import astuple
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft.choosing.chooser import Chooser
from skydraft.config import DecodingParams
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import Plan, make_plan
from skydraft.engines.base import Engine
from skydraft.engines.toy import ToyEngine
from skydraft.errors import CloudLost, NotEnoughDisk
from skydraft.gating.fitting import agreement
from skydraft.gating.hand_back import parse_hand_back
from skydraft.lab.evaluation.scoring import scores
from skydraft.lab.learning.calibrating import calibrate_lessons, label_texts, labelled, read_lessons
from skydraft.lab.learning.collect import Collector, lesson_of, marks_of
from skydraft.lab.learning.dataset import choose
from skydraft.lab.learning.lessons import Lesson, Store
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt
from skydraft.types import DraftBlock, Round, StepRecord
from tests import reference, toys
from tests.evaluation import pairs
from tests.serving import serving
from tests.toys import PROMPT, PROMPT_IDS

from .conftest import lesson, read

PLANS = [
    make_plan(k=5), make_plan("cloud"), make_plan("lossless"), make_plan("answers", gate="entropy:1", k=3, hand_back=0),
    make_plan(k=4, hand_back="agree:2"), make_plan(gate="entropy:1", k=3, hand_back="agree:1"),
    make_plan("auto", gate="prob:0.4", k=6, hand_back="agree:3"), make_plan(gate="entropy:1", k=4, hand_back=3),
]  # fmt: skip


def answered(pair: tuple[Engine, Engine], plan: Plan, params: DecodingParams) -> Generation:
    return skydraft.generate(PROMPT, edge=pair[0], cloud=pair[1], plan=plan, params=params, raw=True).run()


def assert_marks_are_true(done: Generation, pair: tuple[Engine, Engine]) -> None:
    """Each mark is what the two models say at that prefix, and all that was judged is said."""
    found, params = lesson_of(done, "d", "t", "v", ()), done.request.params
    prefix = list(done.request.prompts.edge.token_ids)
    judged = {i for i, origin in enumerate(done.origins) if origin not in ("skipped", "edge", "edge-fallback")}
    if found is None:
        assert not judged or params.grammar  # what is forced is no label
        return
    chooser = Chooser(params, pair[0].vocab, prompt_len := len(prefix))
    for index, (token_id, mark) in enumerate(zip(found.token_ids, found.marks, strict=True)):
        # The grammar allows one token only, or a budget of thinking, so that no model has a say.
        is_forced = chooser.forced(toys.array(prefix)) is not None
        mine, theirs = (reference.next_token(model, prefix, prompt_len, params) for model in pair)
        says = {
            "a": mine == theirs == token_id, "c": mine != theirs == token_id, "t": theirs == token_id,
            "w": mine == token_id != theirs, "-": index > max(judged) or is_forced,
        }  # fmt: skip
        assert says[mark] and (mark in "t-" or not is_forced), (index, mark)
        prefix.append(token_id)


@toys.law(80)
@given(toys.pairs(), toys.params(40), st.sampled_from(PLANS))
def test_marks_are_what_both_models_say(pair: tuple[ToyEngine, ToyEngine], params: DecodingParams, plan: Plan) -> None:
    done = answered(pair, plan, params)
    assert_marks_are_true(done, pair)
    if plan.back.reads:
        marks = marks_of(done.rounds_so_far)
        written = [mark for mark, origin in zip(marks, done.origins, strict=True) if origin == "cloud"]
        # The draft model has read them, but maybe not the text's last; what is forced is no label.
        assert set(written[:-1]) <= set("ac-" if params.think_budget or params.grammar else "ac")


def rounds(*given: tuple[Any, ...]) -> Iterator[Round]:
    """Rounds of (outcome, drafted, accepted, audit, read along); the target adds a token to one that it judged."""
    base = 0
    for number, (outcome, num_draft, num_accepted, audit, *along) in enumerate(given):
        num_committed = num_accepted + 1 if outcome in ("verified", "written") else num_draft
        record = StepRecord(number, base, num_draft, num_accepted, num_committed, outcome, "", 0, 0)  # type: ignore[arg-type]
        tokens = tuple(range(num_committed))
        block = DraftBlock(base, tuple(range(num_draft)), read=tuple(*along))
        yield Round(record, block, tokens, ("accepted",) * num_committed, audit)
        base += num_committed


@pytest.mark.parametrize(("given", "marks"), [
    ([("fallback", 2, 0, ()), ("verified", 2, 2, (True, True))], "aaaat"),
    ([("skipped", 2, 0, ()), ("verified", 1, 0, (True,))], "a-c"),  # an audit that does not reach the end
    ([("skipped", 1, 0, ()), ("verified", 1, 0, (False,)), ("skipped", 2, 0, ())], "wc--"),
    ([("verified", 2, 0, ()), ("written", 0, 0, ()), ("written", 0, 0, ())], "ctt"),  # nobody reads along
    ([("verified", 2, 0, ()), ("written", 0, 0, ()), ("written", 0, 0, (), [True]),
      ("skipped", 2, 0, (), [False])], "cac--"),
    ([("verified", 1, 0, ()), ("written", 0, 0, ()), ("written", 0, 0, ()), ("skipped", 1, 0, (), [True, True]),
      ("verified", 1, 0, (False,))], "caawc"),
    ([("skipped", 1, 0, ()), ("verified", 1, 0, (False,)), ("written", 0, 0, ()),
      ("verified", 1, 1, (), [True, False])], "wccat"),  # what it corrected is known: read again, it stays
])  # fmt: skip
def test_marks_by_rounds(given: list[tuple[Any, ...]], marks: str) -> None:
    assert marks_of(rounds(*given)) == marks


def test_a_generation_is_kept_at_its_end_or_where_it_breaks_off_and_names_both_models(tmp_path: Path) -> None:
    edge, cloud = toys.toy(1, 0.7), toys.toy(1)
    request = answered((edge, cloud), make_plan("lossless"), DecodingParams(max_new_tokens=20)).request
    texts = []
    for is_whole in (True, False):
        with skydraft.start(request, edge=edge, cloud=cloud, observers=[Collector(tmp_path)]) as generation:
            generation.run() if is_whole else next(iter(generation.rounds()))
        texts.append(generation.token_ids)
    (found, begun), _ = read(tmp_path)
    assert (found.draft, found.target, found.vocab) == (edge.fingerprint, cloud.fingerprint, cloud.vocab.fingerprint)
    assert (found.prompt_ids, found.decoding) == (PROMPT_IDS, request.params)
    assert [found.token_ids, begun.token_ids] == texts


def test_what_nobody_judged_is_not_kept(tmp_path: Path) -> None:
    pair, params = (toys.toy(1, 0.7), toys.toy(1)), DecodingParams(max_new_tokens=1)
    for plan in (make_plan("edge"), make_plan(gate="entropy:99")):
        assert not Collector(tmp_path).keep(answered(pair, plan, params))
    assert read(tmp_path)[0] == []


@pytest.mark.parametrize("hand_back", ["0", "3", "text", "agree:2"])
def test_what_a_server_says_is_kept_like_what_is_said_here(tmp_path: Path, hand_back: str) -> None:
    edge, cloud = toys.toy(3, 0.7), toys.toy(3)
    plan, params = make_plan(gate="entropy:1", k=4, hand_back=hand_back), DecodingParams(max_new_tokens=30)
    with serving(toys.toy(3)) as server, closing(skydraft.connect(server.address)) as remote:
        for side, folder in ((cloud, "here"), (remote, "there")):
            done = skydraft.generate(PROMPT, edge=edge, cloud=side, plan=plan, params=params, raw=True).run()
            assert Collector(tmp_path / folder).keep(done)
            assert_marks_are_true(done, (edge, cloud))
    if hand_back == "0":  # else drafts may come while a server writes, which say more
        assert read(tmp_path / "here") == read(tmp_path / "there")


def test_what_cannot_be_kept_is_a_line_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, add = list[str](), Store.add
    done = answered((toys.toy(1, 0.7), toys.toy(1)), make_plan(), DecodingParams(max_new_tokens=8))

    def full(store: Store, each: Lesson) -> None:
        if each == lesson(1):
            raise NotEnoughDisk("No room.")
        add(store, each)

    monkeypatch.setattr("skydraft.decoding.target.LocalTarget.facts", Mock(side_effect=CloudLost("No connection.")))
    with closing(Collector(tmp_path, notify=said.append)) as collector:
        assert [collector.keep(done) for _ in range(3)] == [False] * 3
    monkeypatch.setattr(Store, "add", full)
    with closing(Collector(tmp_path, notify=said.append)) as collector:
        for each in (lesson(0), lesson(1), lesson(1), lesson(2)):
            collector.add(each)
    assert read(tmp_path)[0] == [lesson(0), lesson(2)]
    begins = ("The cloud was lost", "3 answers could not be kept", "No room", "2 answers could not be kept")
    assert len(said) == len(begins) and all(begin in line for begin, line in zip(begins, said, strict=True))


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
    for each in choose(Store(request.getfixturevalue(folder)), pair[0].vocab)[0][:10]:
        found = labelled(pair[0], each)
        places = [index for index, mark in enumerate(each.marks) if mark != "-"]
        assert len(places) == len(found.disagrees) == len(found.signals)
        for index, wrong in zip(places, found.disagrees, strict=True):
            assert each.marks[index] in ("t", *("cw" if wrong else "a"))
        marks.update(each.marks)
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
