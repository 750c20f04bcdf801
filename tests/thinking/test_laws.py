"""Thinking changes no law: whole = streamed, speculative = plain, remote = local, resumed = uncut."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.choosing.thinking import ThinkingAlong
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import OptionError
from skydraft.prompts.messages import Message
from skydraft.thinking import Tags, split

from .. import reference
from ..serving import serving
from ..stock.fakes import fake
from ..toys import law
from .scripts import OPENED, TEMPLATES, pair_of, thinking_toy, vocab_of

TAGS = Tags("<think>", "</think>")
SAID = ["<think>", "</think>", "<", "</", "think>", "</th", "ink>", " ", "\n", "快", "a", "<think", "员"]


@law(300)
@given(st.lists(st.sampled_from(SAID), max_size=12), st.sampled_from([TAGS, Tags("", "</think>")]))
def test_the_pieces_of_a_text_are_the_whole_split_however_it_is_cut(said: list[str], tags: Tags) -> None:
    text, state, thought, answer = "".join(said), tags.begin, "", ""
    for piece in said:
        state, more, said_more = state.then(piece)
        thought, answer = thought + more, answer + said_more
    assert (thought + state.rest[0], answer + state.rest[1]) == split(text, tags)
    bare = text.lstrip()
    if tags.start and not bare.startswith(tags.start):
        assert (thought + state.rest[0], answer + state.rest[1]) == ("", text)
    else:
        inside, end, after = bare.removeprefix(tags.start).partition(tags.end)
        assert thought + state.rest[0] == (inside.strip() if end else inside.lstrip())
        assert answer == after.lstrip()


THOUGHT = "<think>\nhm, 2 + 2?\n</think>\n\nIt is 4. No. Yes."


def run(pair, plan="lossless", think="auto", messages=None, **given) -> Generation:
    params = DecodingParams(**{"max_new_tokens": 80, **given})
    plan = make_plan(plan) if isinstance(plan, str) else plan
    asked = messages or (Message("user", "快 </think>"),)
    request = GenerateRequest(asked, plan=plan, params=params, think=think)
    return skydraft.api.start(request, edge=pair[0], cloud=pair[1]).run()


MODES = ["cloud", "lossless", "quality", "answers", "fluency", "edge"]


TAGGED: dict[str, dict[str, Any]] = {"one token": {}, "spelled": {"words": ()}, "special": {"special": True}}


@pytest.mark.parametrize("tagged", TAGGED.values(), ids=TAGGED)
@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("mode", MODES)
def test_thinking_is_told_apart_in_every_mode(mode: str, kind: str, tagged: dict[str, Any]) -> None:
    script = THOUGHT.removeprefix("<think>\n") if kind == "opened" else THOUGHT
    done = run(pair_of(script, TEMPLATES[kind], slip=0, **tagged), mode)
    assert (done.reasoning, done.text, done.finish_reason) == ("hm, 2 + 2?", "It is 4. No. Yes.", "eos")
    assert done.reasoning == "".join(token.reasoning for token in done)
    assert done.stats.num_reasoning_tokens == len(done.token_ids) - len("It is 4. No. Yes.") - 1


GRAMMAR = "regex:([ab35]|在){5}"
GIVEN = [
    {}, {"think_budget": 4}, {"grammar": GRAMMAR}, {"grammar": GRAMMAR, "think_budget": 1}, {"sentences": 1},
    {"stop": ("2 +",)}, {"stop": ("4",)}, {"max_new_tokens": 5}, {"min_new_tokens": 3, "sentences": 2},
    {"temperature": 0.7, "seed": 3, "think_budget": 6}, {"style": "zh-short"},
]  # fmt: skip
TOYS, SAID_ONCE = (thinking_toy(0.2), thinking_toy()), (Message("user", "语速"),)


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_speculative_is_plain_here_and_over_a_link(given) -> None:
    given = dict(given)
    params = skydraft.decoding_params(given.pop("style", None), **{"max_new_tokens": 60, **given})
    request = GenerateRequest(SAID_ONCE, params=params)
    alone = skydraft.api.start(replace(request, plan=make_plan("cloud")), edge=TOYS[0], cloud=TOYS[1]).run()
    prompt, tagged = alone.request.prompts.target.token_ids, alone.request.params
    assert (alone.token_ids, alone.finish_reason) == reference.plain(TOYS[1], prompt, tagged)
    lossless = skydraft.api.start(request, edge=TOYS[0], cloud=TOYS[1]).run()
    with serving(TOYS[1]) as server, closing(skydraft.connect(server.address)) as cloud:
        far = skydraft.api.start(request, edge=TOYS[0], cloud=cloud).run()
    for each in (lossless, far):
        assert (each.token_ids, each.reasoning, each.text) == (alone.token_ids, alone.reasoning, alone.text)
    if "grammar" in given:
        assert set(alone.text) <= set("ab35在") and len(alone.text) == 5
        assert bool(alone.reasoning) == (given.get("think_budget") != 1)  # the tag is one of its tokens
    if budget := given.get("think_budget"):
        assert budget < alone.stats.num_reasoning_tokens <= budget + 2 and alone.text


@pytest.mark.parametrize("dialect", ["vllm", "llama-server", "sglang"])
def test_a_server_of_ids_thinks_as_its_model_does(dialect: str) -> None:
    with fake(dialect, engine=TOYS[1]) as server, closing(skydraft.connect(server.url, require=True)) as cloud:
        ruled = [] if dialect == "llama-server" else [{"grammar": GRAMMAR}, {"grammar": GRAMMAR, "think_budget": 5}]
        for given in ({}, {"think_budget": 4}, *ruled):
            params = DecodingParams(**{"max_new_tokens": 24, **given})
            drafting = () if "grammar" in given else (make_plan(gate="always", k=4), make_plan(gate="entropy:0.3", k=4))
            for plan in (make_plan("cloud"), *drafting):
                request = GenerateRequest(SAID_ONCE, params=params, plan=plan, execution="throughput")
                far, near = (skydraft.api.start(request, edge=TOYS[0], cloud=each).run() for each in (cloud, TOYS[1]))
                assert (far.token_ids, far.reasoning, far.text) == (near.token_ids, near.reasoning, near.text)
        # A tag that must come asks nothing; above temperature 0 the server keeps a budget, too.
        begun = len(server.model.asked)
        drawn = run((TOYS[0], cloud), "cloud", messages=SAID_ONCE, max_new_tokens=24, think_budget=4, temperature=0.9)
        ids = list(drawn.request.prompts.target.token_ids)  # a new connection asks who the server is, too
        calls = [each for each in server.model.asked[begun:] if any(of[: len(ids)] == ids for of in each.prompts)]
        assert drawn.stats.num_reasoning_tokens == 5 and len(calls) == drawn.receipt.calls == 2


CASES = {
    "cut in the middle": ("<think>\nabc", {"max_new_tokens": 4}, ("ab", ""), "length"),
    "none": ("ab</think>c", {}, ("", "ab</think>c"), "eos"),
    "stops after it": ("<think>a b</think>c b", {"stop": (" b", "\n", "</think>")}, ("a b", "c"), "stop_string"),
    "sentences are the answer's": ("<think>A. B. C.</think>D. E. F.", {"sentences": 2}, ("A. B. C.", "D. E. "), ""),
    "a budget": ("<think>abcdefgh</think>ij", {"think_budget": 4}, ("abc", ""), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("words", [("<think>", "</think>"), ()], ids=["one token", "spelled"])
def test_what_is_thought_and_what_is_said(name: str, words: tuple[str, ...]) -> None:
    script, given, (thought, answer), finish = CASES[name]
    if name in ("cut in the middle", "a budget") and not words:
        pytest.skip("tokens are counted")
    done = run(pair_of(script, words=words), **given)
    assert done.reasoning == thought and done.text.startswith(answer.rstrip())
    assert done.finish_reason == (finish or done.finish_reason)


@pytest.mark.parametrize("cut", range(1, len(vocab_of().encode(THOUGHT))))
@pytest.mark.parametrize("kind", ["switched", "opened"])
@pytest.mark.parametrize("as_written", [False, True])
def test_a_text_that_was_cut_goes_on_as_if_it_were_not(kind: str, cut: int, as_written: bool) -> None:
    """From its parts, or from the text as the model wrote it, with its tags: clients prefill these, too."""
    script = THOUGHT.removeprefix("<think>\n") if kind == "opened" else THOUGHT
    if cut >= len(vocab_of().encode(script)):
        return
    pair = pair_of(script, TEMPLATES[kind], slip=4)
    first = run(pair, max_new_tokens=cut)
    written = "<think>\n" * (kind == "opened") + pair[1].vocab.written(first.token_ids)
    if not as_written and not first.text and (not first.reasoning or "</think>" in written):
        return  # nothing to go on from, or its end tag is in no message
    more = (("reasoning_content", first.reasoning),) if first.reasoning and not as_written else ()
    begun = Message("assistant", written if as_written else first.text, more, is_open=True)
    then = run(pair, messages=(Message("user", "快"), begun))
    both = (first.reasoning + then.reasoning).rstrip("\n")  # a line break that is told is not taken back
    assert (both, first.text + then.text) == ("hm, 2 + 2?", "It is 4. No. Yes.")


def test_on_off_and_what_cannot_be() -> None:
    answer = "<think>a</think>b"
    off = run(pair_of("b"), think="off").request.prompts.edge
    assert off.token_ids[-6:] == vocab_of().encode("<think>\n\n</think>\n\n")
    assert run(pair_of("<think>\n\n</think>\n\nab"), think="off", grammar="regex:ab").text == "ab"
    assert run(pair_of(answer), think="on").reasoning == "a"
    assert run(pair_of("a</think>b", OPENED), think="on").reasoning == "a"
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    for template, asked in [(plain, {"think": "on"}), (plain, {"think_budget": 3}), (OPENED, {"think": "off"})]:
        with pytest.raises(OptionError, match="think"):
            run(pair_of(answer, template), **asked)
    assert run(pair_of("b", plain), think="off").text == "b"


def test_history_keeps_what_the_template_keeps_and_tags_of_users_are_text() -> None:
    pair = pair_of("b")
    said = (("user", "<think>我</think>"), ("assistant", "<think>\nold\n</think>\n\nsaid"), ("user", "在"))
    turns = tuple(Message(role, text) for role, text in said)
    done = run(pair, messages=turns)
    written = pair[0].vocab.written(done.request.prompts.edge.token_ids)
    assert "old" not in written and "[assistant]said[end]" in written and "<think>我</think>" in written
    tags = set(pair[0].vocab.encode("<think></think>"))
    assert not tags & set(done.request.prompts.edge.token_ids)  # the user's are characters
    tool = (*turns[:2], Message("tool", "x"))
    assert "<think>\nold\n</think>" in pair[0].vocab.written(run(pair, messages=tool).request.prompts.edge.token_ids)


@law(150)
@given(st.lists(st.sampled_from(SAID), max_size=6), st.sampled_from([TAGS, Tags("", "</think>"), Tags("a", "a<")]))
def test_the_mask_of_a_grammar_lets_those_tokens_think_that_do(said: list[str], tags: Tags) -> None:
    params = DecodingParams(think_start=tags.start, think_end=tags.end)
    vocab = vocab_of(words=("<think>", "</think>", " </", "a<b"))
    ids = np.array(vocab.encode("".join(said)), np.int32)
    along, nothing = ThinkingAlong(params, vocab), np.zeros(vocab.size, bool)
    before = along.at(ids)
    if before.has_ended:
        return
    after = [along.at(np.append(ids, np.int32(each))).thought.phase for each in range(vocab.size)]
    thinks = [phase != "answer" and (bool(vocab.pieces[i]) or before.thinks) for i, phase in enumerate(after)]
    may_come = along.may_come(ids, nothing, has_left=False)
    ends = sorted(vocab.end_ids) if before.thinks else []
    assert (np.delete(may_come, ends) == np.delete(thinks, ends)).all() and not may_come[ends].any()
