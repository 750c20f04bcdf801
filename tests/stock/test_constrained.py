"""What changes the target's choices holds at a server without skydraft, too: the text is that of the target here."""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.choosing.chooser import Chooser
from skydraft.choosing.grammar import GrammarAlong, compile_grammar, only_one
from skydraft.edge.stock.chat import HOSTS
from skydraft.edge.stock.choices import Choices
from skydraft.edge.stock.dialect import Row
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError
from skydraft.grammars import json_schema, regex
from tests.hostile.texts import DRAFT, TARGET, TEXT, choices

from .. import reference, toys
from ..grammars import PERSON
from ..toys import PROMPT, law
from . import faults
from .fakes import GENERATING, fake
from .test_laws import DIALECTS, GATED, NAMES, SEED, decode, plans

constrained = st.builds(
    lambda params, top_k: replace(params, top_k=top_k, min_call_prob=0.0, repetition_penalty=1.0, content_penalty=1.0),
    toys.params(),
    st.integers(1, 20),
)


@pytest.fixture(scope="module")
def clouds() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr("skydraft.edge.stock.connection.SAMPLE", PROMPT)
        servers = {dialect: stack.enter_context(fake(dialect, engine=toys.toy(SEED))) for dialect in DIALECTS}
        for server in servers.values():
            server.model.usual = {"repetition_penalty": 1.3, "presence_penalty": 1.5}
        yield {
            dialect: (server, stack.enter_context(closing(skydraft.connect(server.url, require=True))))
            for dialect, server in servers.items()
        }


def restricted(server: Any, begun: int) -> int:
    """How many requests said which tokens may come."""
    bodies = [asked.body or {} for asked in server.model.asked[begun:]]
    return sum(bool({"logit_bias", "allowed_token_ids"} & {*body, *body.get("sampling_params", {})}) for body in bodies)


@law(150)
@given(st.sampled_from(DIALECTS), st.sampled_from(toys.DRAFTERS), constrained, plans, st.sampled_from([2, 20]))
def test_a_constrained_text_is_local(
    clouds: dict[str, Any], dialect: str, drafter: tuple[float, int], params: DecodingParams, plan: Any, num_best: int
) -> None:
    """Also where the best tokens of a server are so few that none of them is allowed, or another one might win."""
    server, cloud = clouds[dialect]
    edge, begun = toys.toy(SEED, drafter[0], sign=drafter[1]), len(server.model.asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skydraft.edge.stock.choices.MAX_BEST", 20 if params.temperature else num_best)
        far = decode(plan, params, edge, cloud)
    near = decode(plan, params, edge, toys.toy(SEED))
    if params.temperature and restricted(server, begun):
        return  # the server has drawn one of these, with numbers of its own
    assert far.token_ids == near.token_ids
    assert (far.origins, far.finish_reason, far.text) == (near.origins, near.finish_reason, near.text)


RULED = [{}, {"grammar": regex("[^大一]{4,20}。")}, {"presence_penalty": 0.6}]
VALUE = re.compile(r'(?<=:) ?("[^"]*"?|\d+)')


def assert_answers(far: Generation, edge: Any, target: Any, is_ruled: Callable[[int], Any]) -> None:
    """Each token is the constrained choice of the model that it comes from; the target has judged how the text begins
    and what `is_ruled`, if the grammar left a choice."""
    params, prompt = far.request.params, far.prompts.edge.token_ids
    chooser, text = Chooser(params, target.vocab, len(prompt)), [*prompt, *far.token_ids]
    for at, origin in enumerate(far.origins):
        before, is_checked = text[: len(prompt) + at], origin not in ("skipped", "edge-fallback")
        row, before = reference.row_after(target if is_checked else edge, before), toys.array(before)
        chosen = chooser.choose(row, before)
        assert far.token_ids[at] == chosen, (at, origin)
        assert is_checked or not is_ruled(at) or chooser.forced(before) is not None, (at, origin)


@law(24)
@given(st.sampled_from(DIALECTS), st.sampled_from(toys.DRAFTERS), st.sampled_from(RULED), st.integers(1, 24))
def test_what_answers_checks_is_plain_decoding_and_the_rest_is_local(
    clouds: dict[str, Any], dialect: str, drafter: tuple[float, int], given: dict[str, Any], length: int
) -> None:
    params, digits = DecodingParams(max_new_tokens=length, **given), toys.ids("3", "5")
    edge, target = toys.toy(SEED, drafter[0], sign=drafter[1]), toys.toy(SEED)
    for back in (
        None,
        "4",
    ):  # after how many agreements in a row it is the draft model's turn depends on when they come
        plan = make_plan("answers", hand_back=back)
        far, near = (decode(plan, params, edge, each) for each in (clouds[dialect][1], target))
        if back:
            assert (far.token_ids, far.origins, far.finish_reason) == (near.token_ids, near.origins, near.finish_reason)
        assert_answers(far, edge, target, lambda at, ids=far.token_ids: not at or ids[at] in digits)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_answers_checks_what_json_says(dialect: str) -> None:
    grammar = regex(r'[a-z]{20}\{"n": "(快慢|轻重)[a-z]{2}", [a-z]{3}: [0-9]{2}\}[a-z]{9}')
    with fake(dialect, TARGET) as server, closing(skydraft.connect(server.url, require=True)) as cloud:
        params = DecodingParams(max_new_tokens=80, grammar=grammar)
        plan = make_plan("answers", k=3, hand_back="0")
        done = skydraft.generate(TEXT, edge=DRAFT, cloud=cloud, plan=plan, params=params, raw=True).run()
    values = [range(*found.span()) for found in VALUE.finditer(done.text)]
    assert len(values) == 2 and len(done.token_ids) == len(done.text) + 1 and "skipped" in done.origins
    assert_answers(done, DRAFT, TARGET, lambda at: not at or any(at in each for each in values))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("more", [{}, {"presence_penalty": 0.5}, {"content_penalty": 1.2, "repetition_penalty": 1.0}])
def test_what_divides_logits_is_done_by_the_server_or_refused(
    clouds: dict[str, Any], dialect: str, more: dict[str, Any]
) -> None:
    params = DecodingParams(**{"max_new_tokens": 24, "repetition_penalty": 1.3, **more})
    given = {"plan": make_plan("cloud"), "params": params, "raw": True}
    if dialect == "sglang" or more:
        with pytest.raises(OptionError, match="needs logits"):
            skydraft.generate(PROMPT, edge=toys.toy(SEED), cloud=clouds[dialect][1], **given).run()
        return
    far = skydraft.generate(PROMPT, edge=toys.toy(SEED), cloud=clouds[dialect][1], **given).run()
    assert far.token_ids == skydraft.generate(PROMPT, cloud=toys.toy(SEED), **given).run().token_ids


def test_among_equals_a_token_that_was_not_told_may_win() -> None:
    """The target takes the lowest id; 16-bit logits are often equal."""
    vocab = toys.toy(SEED).vocab
    for spare, is_known in ((5, False), (40, True)):
        params = DecodingParams(logit_bias=tuple((i, -100.0) for i in range(vocab.size) if i not in (20, spare)))
        made = Choices(params, make_plan("cloud"), vocab, 0, "vllm")
        told = [i for i in range(10, 31) if i not in (20, spare)][:19]
        row = Row(10, (*((i, -1.0) for i in told), (20, -2.0)))
        assert (made.row_of(row, np.array([], np.int32), 0) is not None) == is_known


@pytest.mark.parametrize("dialect", ["completions", "deepseek", "mistral"])
def test_text_is_cut_where_it_leaves_the_grammar_and_the_draft_model_goes_on(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = "completions" if dialect == "completions" else "chat"
    monkeypatch.setitem(
        HOSTS, "127.0.0.1", next(how for host, how in HOSTS.items() if NAMES.get(dialect, "moon") in host)
    )
    edge, origins = open_toy("toy:drift=0.2"), set[str]()
    with fake(dialect, TARGET) as server, closing(skydraft.connect(server.url, api=api, model="toy")) as cloud:
        for grammar in (json_schema(PERSON), regex("(语速|的|，|[a-z]){9,12}。"), regex("[^a]{8}")):
            for gate, k, back in GATED:
                plan, params = (
                    make_plan(gate=gate, k=k, hand_back=back),
                    DecodingParams(max_new_tokens=80, grammar=grammar),
                )
                done = skydraft.generate("语速", edge=edge, cloud=cloud, plan=plan, params=params).run()
                origins |= {*done.origins}
                follows(done, grammar)
                assert done.finish_reason == "eos"
    assert origins & {"recovered", "cloud"}


def follows(done: Generation, grammar: str) -> None:
    """Fails unless each token is one that the grammar allows."""
    vocab = TARGET.vocab
    along = GrammarAlong(compile_grammar(grammar, vocab), vocab, 0)
    for at, token_id in enumerate(done.token_ids):
        assert along.allowed(np.array(done.token_ids[:at], np.int32))[token_id]


GRAMMARS = [json_schema(PERSON), regex("(语速|的|，|[a-z]){9,12}。"), regex("今天天气(很好|不好)，请慢慢说。")]


def requests(server: Any, begun: int) -> int:
    return sum(bool(asked.prompts) for asked in server.model.asked[begun:])


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_stream_takes_no_more_calls_than_choices_that_the_server_does_not_write(dialect: str, grammar: str) -> None:
    """Forced tokens ask nothing, and what a server is asked, and read and wrote, is counted."""
    params = DecodingParams(max_new_tokens=32, grammar=grammar)
    with fake(dialect, TARGET) as server, closing(skydraft.connect(server.url, require=True)) as cloud:
        skydraft.generate("语速", edge=TARGET, cloud=cloud, plan=make_plan("cloud"), params=DecodingParams()).run()
        begun = len(server.model.asked)
        done = skydraft.generate(TEXT, edge=TARGET, cloud=cloud, plan=make_plan("cloud"), params=params, raw=True).run()
        server.wait_until_idle()
        num_asked, num_restricted = requests(server, begun), restricted(server, begun)
    near = skydraft.generate(TEXT, cloud=TARGET, plan=make_plan("cloud"), params=params, raw=True).run()
    assert done.token_ids == near.token_ids
    along, num_streams, is_streaming = GrammarAlong(compile_grammar(grammar, TARGET.vocab), TARGET.vocab, 0), 0, False
    for at, (token_id, own) in enumerate(zip(done.token_ids, choices(TARGET, done.token_ids), strict=True)):
        forced = only_one(along.allowed(np.array(done.token_ids[:at], np.int32))) is not None
        if not is_streaming and not forced:
            num_streams, is_streaming = num_streams + 1, True
        is_streaming = is_streaming and token_id == own
    assert num_asked <= num_streams + num_restricted
    assert done.receipt.calls == num_asked and done.stats.num_requests == num_asked


FAULTS = {"500": faults.refuses(500), "cut": faults.cut(2), "hangs up": faults.hangs_up()}


@pytest.mark.parametrize("dialect", ["vllm", "llama-server"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_constrained_text_survives_what_breaks(dialect: str, fault: str) -> None:
    params = DecodingParams(max_new_tokens=24, grammar=GRAMMARS[0], presence_penalty=0.5)
    near = skydraft.generate(TEXT, cloud=TARGET, plan=make_plan("cloud"), params=params, raw=True).run()
    with fake(dialect, TARGET) as server, closing(skydraft.connect(server.url, require=True, timeout_s=60)) as cloud:
        number = itertools.count()
        server.fault_of = lambda path: FAULTS[fault] if path in GENERATING and next(number) % 3 == 1 else None
        far = skydraft.generate(TEXT, edge=TARGET, cloud=cloud, plan=make_plan("cloud"), params=params, raw=True).run()
    assert (far.token_ids, far.text) == (near.token_ids, near.text)
