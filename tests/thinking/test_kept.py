"""Audits and lessons of texts that think: what is judged and kept is what was written, tags and all."""

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import skydraft
from skydraft import DecodingParams, GenerateRequest, make_plan
from skydraft.choosing.thinking import tags_of
from skydraft.lab.learning.collect import Collector
from skydraft.prompts.messages import Message
from skydraft.thinking import split

from .. import reference
from ..decoding.test_audits import Watching
from ..learning.test_collect import assert_marks_are_true, read
from ..serving import serving
from .scripts import thinking_toy

PAIR = thinking_toy(1), thinking_toy()
ASKED = Message("user", "语速")
CASES = [
    ({"mode": "edge"}, {}), ({"mode": "edge"}, {"think_budget": 3, "temperature": 0.7, "seed": 4}),
    ({"gate": "entropy:1", "k": 3}, {"think_budget": 3}),
    ({"gate": "entropy:1", "k": 3, "hand_back": "agree:2"}, {}),
    ({"gate": "entropy:1", "k": 3, "hand_back": "2"}, {"grammar": "regex:([ab35]|在){5}"}),
]  # fmt: skip


BEGUN = [(), (Message("assistant", "", (("reasoning_content", "ab"),), is_open=True),),
         (Message("assistant", "cd", (("reasoning_content", "ab"),), is_open=True),)]  # fmt: skip


@pytest.mark.parametrize(("plan", "given"), CASES, ids=str)
@pytest.mark.parametrize("is_far", [False, True], ids=["here", "there"])
def test_what_is_audited_and_learned_is_what_was_written(plan, given, is_far: bool, tmp_path: Path) -> None:
    """Also of a text that was cut in its thinking, or after it, and goes on."""
    edge, target = PAIR
    with ExitStack() as stack:
        far = stack.enter_context(serving(target)) if is_far else None
        cloud = stack.enter_context(closing(skydraft.connect(far.address))) if far else target
        watching = stack.enter_context(closing(Watching(edge, cloud)))
        for begun in BEGUN:
            asked = DecodingParams(**{"max_new_tokens": 16, **given})
            done = watching.write(GenerateRequest((ASKED, *begun), make_plan(**plan), asked))
            kept, audit = watching.kept[-1]
            params, prompt, ids = done.request.params, done.prompts.target.token_ids, done.token_ids
            assert bool(params.think_end) == (begun != BEGUN[2]) == bool(done.stats.num_reasoning_tokens)
            before = ([*prompt, *ids[:at]] for at in range(len(ids)))
            theirs = tuple(reference.next_token(target, each, len(prompt), params) for each in before)
            assert kept is done and audit == tuple(map(int.__eq__, theirs, ids))
            assert_marks_are_true(done, PAIR, audit)
            assert Collector(tmp_path).keep(done, audit)
            lesson = read(tmp_path)[0][-1]
            assert (lesson.prompt_ids, lesson.token_ids, lesson.decoding) == (prompt, ids, params)
            written = edge.vocab.written(ids).removesuffix("<eos>")
            assert split(written, tags_of(lesson.decoding)) == (done.reasoning, done.text)
        assert plan != {"mode": "edge"} or not all(sum((kept for _, kept in watching.kept), ()))
