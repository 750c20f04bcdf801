"""Audits: what the target says of a finished answer, and what is told of it."""

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, GenerateRequest, Generation, make_plan
from skydraft.decoding.accounts import audits
from skydraft.decoding.accounts.audits import Audit, Auditor
from skydraft.decoding.target import target_of
from skydraft.engines.base import Engine
from skydraft.errors import EngineError, OptionError
from skydraft.lab.learning.collect import Collector
from skydraft.prompts.audio import Audio
from skydraft.prompts.messages import asked
from tests import reference, toys
from tests.decoding.test_slots import begun, few, is_free, slots_of, text
from tests.learning.conftest import read
from tests.serving import PATIENCE_S, Serving, free_port, serving, waiting
from tests.toys import PROMPT, PROMPT_IDS

EDGE, QUALITY = make_plan("edge"), make_plan("lossless")
FLUENCY, GATED = make_plan("fluency"), make_plan(gate="entropy:2.5", k=4)
REQUEST = GenerateRequest(asked(PROMPT), EDGE, DecodingParams(max_new_tokens=20, min_new_tokens=20), raw=True)


class Watching:
    """An auditor, what it kept, and what it said."""

    def __init__(self, edge: Engine, cloud: Any, share: float = 1.0, **options: Any) -> None:
        self.kept: list[tuple[Generation, Audit]] = []
        self.lines: list[str] = []
        target = target_of(cloud if isinstance(cloud, Engine) else cloud.in_background())
        self._sides = {"edge": edge, "cloud": cloud}
        self.auditor = Auditor(edge, target, share, self.lines.append, lambda *of: self.kept.append(of), **options)
        self.close = self.auditor.close

    def begin(self, request: GenerateRequest = REQUEST) -> Generation:
        return skydraft.start(request, observers=[self.auditor], **self._sides)

    def write(self, request: GenerateRequest = REQUEST) -> Generation:
        generation = self.begin(request).run()
        self.auditor.finish()
        return generation


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(toys.toy(1)) as running:
        yield running


@toys.law(25)
@given(toys.pairs(), toys.params(20), st.sampled_from([EDGE, FLUENCY, GATED]))
def test_an_audit_is_the_choice_of_the_target(pair: Any, params: DecodingParams, plan: Any) -> None:
    edge, target = pair
    with closing(Watching(edge, target)) as watching:
        done = watching.write(replace(REQUEST, plan=plan, params=params))
    ((_, audit),) = watching.kept
    text = [*PROMPT_IDS, *done.token_ids]
    begin = len(PROMPT_IDS)
    theirs = [reference.next_token(target, text[:at], begin, params) for at in range(begin, len(text))]
    assert audit == tuple(map(int.__eq__, theirs, done.token_ids))
    figures = watching.auditor.figures_of(done)
    assert figures and figures.agreement == round(sum(audit) / len(audit), 3) and figures.num_answers == 1


@pytest.mark.parametrize("plan", [EDGE, GATED])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_server_says_what_the_model_says_here(server: Serving, plan: Any, temperature: float) -> None:
    edge = toys.toy(1, 0.7)
    params = replace(REQUEST.params, temperature=temperature, seed=3)
    request = replace(REQUEST, plan=plan, params=params, cache_scope="mine")
    with closing(skydraft.connect(server.address)) as cloud:
        pairs = [Watching(edge, each) for each in (toys.toy(1), cloud)]
        texts = [watching.write(request).token_ids for watching in pairs]
        for watching in pairs:
            watching.close()
    here, there = (watching.kept[0][1] for watching in pairs)
    assert texts[0] == texts[1] and here == there and any(here) and not all(here)
    Serving.wait_until(lambda: server.num_sessions == 0)  # nothing is left behind


def test_which_answers_are_read_is_drawn_before_they_begin() -> None:
    draws = iter([0.0, 0.9, 0.2, 0.31, 0.29])
    with closing(Watching(toys.toy(1, 0.7), toys.toy(1), 0.3, draw=lambda: next(draws))) as watching:
        seen = [watching.write(replace(REQUEST, plan=plan)) for plan in (EDGE, EDGE, FLUENCY, FLUENCY, GATED)]
        assert [each.is_audited for each in seen] == [True, False, True, False, True]
        assert [each for each, _ in watching.kept] == seen[::2]
        for plan in (QUALITY, make_plan("cloud")):  # nothing can be found there, so nothing is drawn
            assert not watching.write(replace(REQUEST, plan=plan)).is_audited
    assert watching.auditor.counts == {"read": 3, "lost": 0, "dropped": 0}


def test_what_must_stay_here_is_read_here_alone_and_a_receipt_says_what_a_server_reads_later(server: Serving) -> None:
    own = toys.toy(1)
    with closing(skydraft.connect(server.address)) as cloud:
        for target, share, stays, is_read in (
            (own, 1.0, True, True), (cloud, 1.0, True, False), (cloud, 1.0, False, True), (cloud, 1e-9, False, False)
        ):  # fmt: skip
            with closing(Watching(toys.toy(1, 0.7), target, share)) as watching:
                done = watching.write(replace(REQUEST, local_only=stays, cache_scope="mine"))
                assert done.is_audited is is_read and done.receipt.audited is (is_read and target is cloud)
                assert watching.auditor.counts["read"] == is_read
    assert not own.prefixes._kept  # what is kept for conversations stays theirs


def test_an_adapter_that_agrees_too_little_gets_one_line_and_others_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gate and adapter has figures of its own, and clients with gates of their own do not fill the memory."""
    monkeypatch.setattr(audits, "_ENOUGH", 3)
    monkeypatch.setattr(audits, "_MAX_WATCHED", 4)
    edge, worse = toys.toy(1), toys.toy(1, 50.0)  # one agrees with toy 1, and its adapter "worse" does not
    worse.adapter, worse.fingerprint = "worse", "another"
    monkeypatch.setattr(edge.adapters, "choose", lambda name, _: worse if name == "worse" else edge)
    low, num_lines = replace(REQUEST, adapter="worse"), []
    with closing(Watching(edge, toys.toy(1))) as watching:
        for _ in range(5):
            for each in (REQUEST, replace(low, plan=FLUENCY), low):  # no agreement is asked for in fluency
                assert watching.write(each).request.plan == each.plan
            num_lines.append(len(watching.lines))
        assert num_lines == [0, 0, 1, 1, 1]
        of = {(each.adapter, each.gate): each for each in watching.auditor.figures}
        assert of[None, "never"].agreement == 1 and of["worse", "entropy:5.5"].asked is None
        assert f"Adapter worse, gate never: agreement {of['worse', 'never'].agreement:g} over" in watching.lines[0]
        worse.fingerprint = "trained again"
        watching.write(low)
        assert sorted(each.num_answers for each in watching.auditor.figures) == [1, 5, 5]
        for number in range(6):
            watching.write(replace(REQUEST, plan=make_plan(gate=f"entropy:{number}")))
        assert [each.gate for each in watching.auditor.figures] == ["never", "entropy:5.5", "never", "entropy:5"]


def test_lessons_are_complete_where_an_answer_was_audited(tmp_path: Path) -> None:
    edge, target = toys.toy(1, 0.7), toys.toy(1)
    collector = Collector(tmp_path)
    auditor = Auditor(edge, target_of(target), 0.5, print, collector.keep, draw=iter([0.0, 0.9]).__next__)
    with closing(auditor):
        done = [skydraft.start(REQUEST, edge=edge, cloud=target, observers=[collector, auditor]).run() for _ in "12"]
        auditor.finish()
    (lesson,), _ = read(tmp_path)  # nobody judged the second one
    assert lesson.token_ids == done[0].token_ids and set(lesson.marks) == {"a", "w"}


@pytest.mark.parametrize("ends_by", ["finish", "close"])
def test_an_answer_waits_for_no_audit_too_many_are_dropped_and_closing_breaks_off_the_rest(ends_by: str) -> None:
    held, go_on = threading.Event(), threading.Event()
    target = waiting(toys.toy(1), lambda: (held.set(), go_on.wait(PATIENCE_S)))
    with closing(Watching(toys.toy(1, 0.7), target)) as watching:
        assert len({watching.begin().run().text for _ in range(20)}) == 1
        num_dropped = watching.auditor.counts["dropped"]
        assert 3 <= num_dropped <= 4 and len(watching.kept) == num_dropped  # one is being read
        held.wait()
        threading.Timer(0.2, go_on.set).start()
        getattr(watching.auditor, ends_by)()
        assert watching.auditor.counts["read"] == (20 - num_dropped if ends_by == "finish" else 0)
    assert [audit for _, audit in watching.kept].count(()) == (num_dropped if ends_by == "finish" else 20)
    assert watching.write().text and len(watching.kept) == 21  # one that ends later


def test_an_audit_waits_for_its_place_among_the_texts() -> None:
    target = few()
    with closing(Watching(toys.toy(1), target)) as watching:
        with begun(text(cloud=target)):
            watching.begin().run()
            Serving.wait_until(lambda: bool(slots_of(target).line))
            assert not watching.kept
        watching.auditor.finish()
        assert [len(audit) for _, audit in watching.kept] == [20] and is_free(target)
        with begun(text(cloud=target)):
            watching.begin().run()
            Serving.wait_until(lambda: bool(slots_of(target).line))
            watching.close()
    assert watching.kept[1][1] == () and is_free(target)


def test_answers_to_speech_and_those_that_somebody_began_are_not_read() -> None:
    """An audit sent the speech that no question had allowed to leave, or asked a target that had not heard it."""
    spoken = GenerateRequest(asked("我", audio=Audio(np.zeros(1600, np.float32))), EDGE)
    with closing(Watching(toys.toy(1), toys.toy(1))) as watching:
        assert watching.auditor.begins(replace(spoken, messages=asked("我")))
        assert not watching.auditor.begins(spoken)
        assert not watching.auditor.begins(replace(REQUEST, begun=(3,)))


def test_a_target_that_is_gone_or_fails_costs_only_the_audit(server: Serving) -> None:
    failing, broken = toys.toy(1), toys.toy(1)
    failing.forward = Mock(side_effect=EngineError("broken"))
    broken.forward = Mock(side_effect=RuntimeError("a bug"))
    gone = skydraft.connect("127.0.0.1:1", notify=lambda line: pytest.fail(line))
    with closing(gone), closing(skydraft.connect(server.address, max_calls=1)) as frugal:
        for target, num_read in ((gone, 0), (failing, 0), (broken, 0), (frugal, 1)):
            with closing(Watching(toys.toy(1, 0.7), target)) as watching:
                assert len({watching.write().token_ids for _ in range(2)}) == 1
                assert watching.auditor.counts == {"read": num_read, "lost": 2 - num_read, "dropped": 0}
                assert len(watching.kept) == 2 and not watching.lines


def test_what_went_on_without_its_server_is_no_fault_of_the_gate() -> None:
    port, edge = free_port(), toys.toy(1)
    cloud = skydraft.connect(f"127.0.0.1:{port}", fallback="start")
    with closing(cloud), closing(Watching(edge, cloud)) as watching:
        alone = skydraft.start(replace(REQUEST, plan=FLUENCY), edge=edge, cloud=cloud).run()
        alone.is_audited = True  # as if it had been drawn
        assert alone.stats.num_fallback_tokens
        with serving(toys.toy(2), port=port):
            while not any(audit for _, audit in watching.kept):
                watching.auditor.ended(alone)
                watching.auditor.finish()
            assert not watching.auditor.figures
            assert watching.write(replace(REQUEST, plan=FLUENCY)) and watching.auditor.figures


def test_a_server_without_skydraft_is_refused() -> None:
    cloud = skydraft.connect("http://127.0.0.1:1/v1")
    with closing(cloud), pytest.raises(OptionError, match="audit_share does not apply to a server without skydraft"):
        cloud.in_background()
