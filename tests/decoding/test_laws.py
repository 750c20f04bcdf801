"""The laws of the one idea: decoding is a pure function of the prefix, so speculation changes nothing but the cost."""

from collections.abc import Callable
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import entr

from skydraft import DecodingParams, Engine, Generation, generate, make_plan
from skydraft.choosing.thinking import tags_of
from skydraft.decoding.plan import Plan
from skydraft.engines.vocab import Vocab
from skydraft.thinking import split
from skydraft.types import Signals

from .. import reference, toys
from ..toys import PROMPT, PROMPT_IDS, law

ks = st.integers(1, 12) | st.none()
executions = st.sampled_from(["exact", "throughput"])
gates = st.one_of(
    st.builds("entropy:{}".format, st.floats(0, 3.5)),
    st.builds("margin:{}".format, st.floats(0, 1)),
    st.builds("prob:{}".format, st.floats(0, 1)),
)


Choice = Callable[[Engine, list[int], int, DecodingParams], int]
DRAFTED = ("skipped", "edge", "edge-fallback")


def decode(
    plan: Plan, params: DecodingParams, edge: object, cloud: object, *, prompt: str = PROMPT, **options: object
) -> Generation:
    sides = {"edge": edge, "cloud": cloud, "break_loops": False}  # a loop that is left is no plain text: F6
    return generate(prompt, plan=plan, params=params, raw=True, **sides, **options).run()


def assert_whose(
    done: Generation, edge: Engine, cloud: Engine, params: DecodingParams, *, choice: Choice = reference.next_token
) -> None:
    """Every token is the choice, after its prefix, of the model that its origin names."""
    prompt = done.request.prompts.target.token_ids
    for index, (token_id, origin) in enumerate(zip(done.token_ids, done.origins, strict=True)):
        model, prefix = edge if origin in DRAFTED else cloud, [*prompt, *done.token_ids[:index]]
        assert token_id == choice(model, prefix, len(prompt), params), (index, origin)


def assert_consistent(generation: Generation, params: DecodingParams, vocab: Vocab = toys.VOCAB) -> None:
    """What must hold between tokens, origins, records and stats of any finished generation."""
    records, origins = generation.records, generation.origins
    assert sum(record.num_committed for record in records) == len(generation.token_ids) == len(origins)
    assert 1 <= len(origins) <= params.max_new_tokens
    base = 0
    for number, record in enumerate(records):
        mine = origins[base : base + record.num_committed]
        assert (record.round, record.base) == (number, base)
        assert mine.count("accepted") == record.num_accepted <= record.num_draft
        if record.outcome in ("verified", "written"):
            is_whole = record.num_accepted == record.num_draft
            added = "cloud" if not record.num_draft else "bonus" if is_whole else "recovered"
            ends_here = number == len(records) - 1 and generation.finish_reason is not None
            assert record.reason and mine[: record.num_accepted] == ("accepted",) * record.num_accepted
            assert mine[record.num_accepted :] == (added,) or (mine.count("accepted") == len(mine) and ends_here)
        else:
            assert record.reason == "" and record.num_committed == record.num_draft > 0
            assert set(mine) <= {"skipped", "edge"}
        base += record.num_committed
    reasoning, text = split(vocab.decode(generation.token_ids), tags_of(params))
    if generation.finish_reason in ("stop_string", "eos"):  # a stop token may end a stop string
        text = text[: min((text.find(stop) for stop in params.stop if stop in text), default=None)]
    assert (generation.reasoning, generation.text) == (reasoning, text)
    stats = generation.stats
    assert stats.num_tokens == len(origins)
    assert stats.num_accepted_tokens == origins.count("accepted")
    assert stats.num_escalated == sum(record.outcome == "verified" for record in records)


# Two files of one tokenizer may call other tokens special: what a text is made of is for its author to say.
VOCABS = [
    toys.VOCAB,
    toys.vocab(special_ids=[toys.TOOL], end_ids=[]),
    toys.vocab(special_ids=[toys.EOS, *toys.ids("。", "我们")], end_ids=[toys.EOS, *toys.ids("我们")]),
]
vocabs = st.just(VOCABS[0]) | st.sampled_from(VOCABS)


@law(130)
@given(toys.seeds, st.sampled_from(toys.DRAFTERS), vocabs, vocabs, toys.params(), ks, executions)
def test_lossless_is_the_target_alone_and_edge_the_draft_model(seed, drafter, mine, theirs, params, k, execution):
    if not (mine.end_ids and theirs.end_ids):
        params = replace(params, grammar="")
    edge, cloud = toys.toy(seed, drafter[0], sign=drafter[1], vocab=mine), toys.toy(seed, vocab=theirs)
    lossless = make_plan("lossless", k=k) if execution == "exact" else make_plan(gate="always", k=k)
    for plan, sides, model in (
        (lossless, (edge, cloud), cloud), (make_plan("cloud"), (None, cloud), cloud),
        (make_plan("edge"), (edge, None), edge), (make_plan(gate="never", k=k), (edge, None), edge),
    ):  # fmt: skip
        done = decode(plan, params, *sides, execution=execution)
        assert (done.token_ids, done.finish_reason) == reference.plain(model, PROMPT_IDS, params)
        assert_consistent(done, params, model.vocab)
        assert plan == lossless or set(done.origins) == {"edge" if model is edge else "cloud"}


@law(60)
@given(toys.pairs(), toys.params(), gates, st.integers(1, 12), st.booleans())
def test_a_block_is_skipped_only_where_the_gate_allows_and_ends_where_it_must(pair, params, gate, k, ends_early):
    edge, cloud = pair
    plan = replace(make_plan(gate=gate, k=k), ends_early=ends_early)
    generation = generate(PROMPT, edge=edge, cloud=cloud, plan=plan, params=params, raw=True)
    context = list(PROMPT_IDS)
    for done, _ in generation.rounds():
        block, unsure = done.block, []
        for index, signals in enumerate(block.signals):
            prefix = [*context, *block.token_ids[:index]]
            row = reference.row_after(edge, prefix)
            expected = signals_of(reference.follow_grammar(row, prefix, len(PROMPT_IDS), params, toys.VOCAB))
            assert astuple(signals) == pytest.approx(astuple(expected), abs=2e-5)
            unsure.append(passes(gate, signals))
        assert len(block.signals) == len(block.token_ids)
        assert len(block.free_signals) <= k  # forced tokens come free
        assert done.record.reason == "uncertain" if any(unsure) else done.record.reason != "uncertain"
        if ends_early:
            assert not any(unsure[:-1])
        assert (block.ended_by == "gate") <= (ends_early and unsure[-1])
        assert (block.ended_by == "k") <= (len(block.token_ids) >= k)
        context += done.token_ids


@law(60)
@given(toys.pairs(), toys.params(), st.sampled_from(["entropy:1", "prob:0.5"]), st.integers(1, 12))
def test_a_beginning_that_is_checked_is_as_long_as_the_draft_model_is_sure(pair, params, gate, k):
    plan, params = (
        make_plan(gate=f"{gate}+start", k=k),
        replace(params, grammar="", think_start="", think_end="", think_budget=0),
    )
    generation = generate(PROMPT, edge=pair[0], cloud=pair[1], plan=plan, params=params, raw=True)
    first, *others = [done.block for done, _ in generation.rounds()]
    unsure = [passes(gate, signals) for signals in first.signals]
    assert all(len(block.token_ids) <= k for block in others) and not any(unsure[k - 1 : -1])
    if not first.finish:
        assert len(unsure) in (16, params.max_new_tokens) or (len(unsure) >= k and any(unsure))


def signals_of(row: np.ndarray) -> Signals:
    probs = np.sort(reference.probabilities(row.astype(np.float64)))
    return Signals(float(entr(probs).sum()), float(probs[-1] - probs[-2]), float(probs[-1]))


def passes(gate: str, signals: Signals) -> bool:
    kind, value = gate.split(":")
    if kind == "entropy":
        return signals.entropy > float(value)
    return (signals.margin if kind == "margin" else signals.top_prob) < float(value)
