"""Laws of the two sides: any block, any catch-up, any failure, and the verdict is still the target's own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft import DecodingParams, generate, make_plan
from skydraft.decoding.choose import Chooser
from skydraft.decoding.context import BaseMismatch
from skydraft.decoding.drafting import Drafter
from skydraft.decoding.gates import Gate
from skydraft.decoding.loop import SpeculativeLoop
from skydraft.errors import EngineError, LimitExceeded
from skydraft.types import DraftBlock, Signals, Verdict

from . import reference, toys
from .toys import PROMPT, PROMPT_IDS, VOCAB, FlakyEngine, law

any_token = st.integers(0, VOCAB.size - 1)


def target_choices(target, params, start, num_tokens):
    """What the target would write after `start`, whatever the stopping rules say."""
    token_ids = list(start)
    for _ in range(num_tokens):
        token_ids.append(reference.next_token(target, token_ids, len(PROMPT_IDS), params))
    return token_ids[len(start) :]


def expected_verdict(target, params, committed, block):
    """The verdict from its definition: walk the block until a difference or an end."""
    _, stopping = toys.rules(params)
    for index, drafted in enumerate(block):
        prefix = [*committed, *block[:index]]
        choice = reference.next_token(target, prefix, len(PROMPT_IDS), params)
        finish = stopping.finish(toys.array([*prefix, choice]))
        if choice != drafted:
            return Verdict(len(committed), index, choice, finish)
        if finish:
            return Verdict(len(committed), index + 1, None, finish)
    bonus = reference.next_token(target, [*committed, *block], len(PROMPT_IDS), params)
    finish = stopping.finish(toys.array([*committed, *block, bonus]))
    return Verdict(len(committed), len(block), bonus, finish)


def endless():
    """Any parameters, but a length limit that no test here reaches."""
    return toys.params().map(lambda params: dataclasses.replace(params, max_new_tokens=200))


@st.composite
def requests(draw):
    """A target, its parameters, catch-up tokens and a block that may be right, wrong later, or go on past a stop."""
    target, params = toys.toy(draw(toys.seeds)), draw(toys.params())
    # Catch-up tokens past the length limit cannot be: the generation would have ended there.
    catch_up = draw(st.lists(any_token, max_size=min(10, params.max_new_tokens - 1)))
    if draw(st.booleans()):
        catch_up = target_choices(target, params, PROMPT_IDS, len(catch_up))
    block = target_choices(target, params, [*PROMPT_IDS, *catch_up], draw(st.integers(0, 8)))
    if block and draw(st.booleans()):
        block[draw(st.integers(0, len(block) - 1))] = draw(any_token)
    return target, params, tuple(catch_up), tuple(block)


@law(250)
@given(requests(), st.integers(1, 9))
def test_a_verdict_is_the_definition_for_any_block_and_any_split_into_passes(request_, max_rows):
    target, params, catch_up, block = request_
    committed = [*PROMPT_IDS, *catch_up]
    verdict = toys.verifier_of(target, params, max_rows=max_rows).verify(DraftBlock(len(committed), block), catch_up)
    audit, ranks = [], []
    for length in range(len(PROMPT_IDS), len(committed)):
        choice = reference.next_token(target, committed[:length], len(PROMPT_IDS), params)
        audit.append(choice == committed[length])
        if not audit[-1]:
            ranks.append(reference.rank(target, committed[:length], committed[length], len(PROMPT_IDS), params))
    expected = expected_verdict(target, params, committed, block)
    assert verdict == dataclasses.replace(expected, audit=tuple(audit), audit_ranks=tuple(ranks))
    assert verdict.num_tokens == expected.num_accepted + (expected.token_id is not None)
    # Rows: the catch-up and one per judged position, in passes of max_rows; no pass after the last judged row.
    needed = len(catch_up) + verdict.num_tokens
    assert verdict.cost.num_passes == -(-needed // max_rows)
    assert needed <= verdict.cost.num_rows <= min(needed + max_rows - 1, len(catch_up) + len(block) + 1)


def test_a_stop_inside_an_accepted_block_counts_only_what_comes_before_it():
    params = DecodingParams(stop=("ab",), max_new_tokens=50)
    last = np.full((VOCAB.size, VOCAB.size), -9, np.float32)
    for before, after in (("3", "a"), ("a", "b"), ("b", "e"), ("e", "S")):
        last[toys.ids(before), toys.ids(after)] = 9
    target = toys.ToyEngine(VOCAB, last)
    block = tuple(toys.ids("a", "b", "e", "S"))
    verdict = toys.verifier_of(target, params).verify(DraftBlock(2, block), ())
    assert verdict == Verdict(2, 2, None, "stop_string")
    context = toys.Context(PROMPT_IDS)
    assert context.commit_verdict(DraftBlock(2, block), verdict) == block[:2]
    assert len(context) == 4 and context.finish == "stop_string" and context.seen_len == 4


@law(60)
@given(requests(), st.integers(-3, 3).filter(bool), requests())
def test_a_wrong_base_raises_and_changes_nothing(first, shift, second):
    target, params, catch_up, block = first
    verifier, untouched = (toys.verifier_of(target, params) for _ in range(2))
    base = len(PROMPT_IDS) + len(catch_up)
    for wrong in ((base + shift), base + 100):
        with pytest.raises(BaseMismatch) as raised:
            verifier.verify(DraftBlock(max(1, wrong), block), catch_up)
        assert raised.value.length == len(PROMPT_IDS)  # what is committed on that side, without the catch-up
    verdicts = [side.verify(DraftBlock(base, block), catch_up) for side in (verifier, untouched)]
    assert verdicts[0] == verdicts[1]
    with pytest.raises(BaseMismatch):  # the same block once more: it was committed
        verifier.verify(DraftBlock(base, block), catch_up)
    new_base = base + verdicts[0].num_tokens
    if verdicts[0].finish:
        with pytest.raises(LimitExceeded):
            verifier.verify(DraftBlock(new_base, second[3]), ())
        return
    follow_up = [side.verify(DraftBlock(new_base, second[3]), ()) for side in (verifier, untouched)]
    assert follow_up[0] == follow_up[1]


def test_a_context_refuses_what_does_not_extend_it_and_stays_as_it_was():
    context = toys.Context([1, 2, 3])
    block = DraftBlock(3, (4, 5))
    context.commit_skip(block, None)
    for commit in (
        lambda: context.commit_skip(block, "eos"),
        lambda: context.commit_verdict(block, Verdict(3, 0, 9)),
        lambda: context.commit_verdict(DraftBlock(5, (6,)), Verdict(4, 1, 9)),
    ):
        with pytest.raises(BaseMismatch):
            commit()
        assert context.token_ids.tolist() == [1, 2, 3, 4, 5]
        assert (context.catch_up, context.seen_len, context.finish) == ((4, 5), 3, None)


@law(120)
@given(st.data(), toys.seeds, endless(), st.integers(1, 6), st.integers(1, 5))
def test_a_failed_forward_can_be_repeated_as_if_it_had_not_been(data, seed, params, fail_at, max_rows):
    target = toys.toy(seed, kind=FlakyEngine)
    verifier, sound = toys.verifier_of(target, params, max_rows=max_rows), toys.verifier_of(toys.toy(seed), params)
    base = len(PROMPT_IDS)
    for _ in range(2):
        catch_up = tuple(data.draw(st.lists(any_token, max_size=6)))
        block = target_choices(toys.toy(seed), params, [*sound._session.token_ids.tolist(), *catch_up], 4)
        if data.draw(st.booleans()):
            block[data.draw(st.integers(0, 3))] = data.draw(any_token)
        request_ = DraftBlock(base + len(catch_up), tuple(block))
        target.fail_at, target.num_asked = fail_at, 0
        try:
            verdict = verifier.verify(request_, catch_up)
        except EngineError:
            verdict = verifier.verify(request_, catch_up)
        assert verdict == sound.verify(request_, catch_up)
        base = request_.base + verdict.num_tokens
        if verdict.finish:
            break


@law(80)
@given(
    toys.seeds, st.sampled_from(toys.DRAFTERS), toys.params(), st.integers(1, 12), st.tuples(*[st.integers(1, 30)] * 2)
)
def test_a_generation_survives_forwards_that_fail_on_both_sides(seed, drafter, params, k, fail_at):
    edge = toys.toy(seed, drafter[0], sign=drafter[1], kind=FlakyEngine)
    cloud = toys.toy(seed, kind=FlakyEngine)
    edge.fail_at, cloud.fail_at = fail_at
    loop, context = toys.loop_of(edge, cloud, params, policy=toys.FixedK(k))
    rounds = []
    for _ in range(3):
        try:
            for done in loop.rounds():
                rounds.append(done)
        except EngineError:
            continue
    assert [token_id for done in rounds for token_id in done.token_ids] == context.token_ids[2:].tolist()
    expected = reference.plain(toys.toy(seed), PROMPT_IDS, params)
    assert (tuple(context.token_ids[2:].tolist()), context.finish) == expected


@law(100)
@given(toys.pairs(), endless(), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_verifier_that_catches_up_judges_like_one_that_saw_all(pair, params, skips):
    edge, cloud = pair
    token_ids = list(PROMPT_IDS)
    late = toys.verifier_of(cloud, params)
    for num_tokens in skips:  # several catch-ups, each after a verdict of its own
        catch_up = tuple(target_choices(edge, params, token_ids, num_tokens))
        token_ids += catch_up
        block = DraftBlock(len(token_ids), tuple(target_choices(edge, params, token_ids, 3)))
        verdict = late.verify(block, catch_up)
        saw_all = toys.TargetVerifier(cloud, token_ids, *toys.rules(params), max_rows=2).verify(block, ())
        assert dataclasses.replace(verdict, audit=(), audit_ranks=()) == saw_all
        token_ids += [*block.token_ids[: verdict.num_accepted], verdict.token_id]
        if verdict.finish:
            break


def unsure_after(num_rounds):
    """A gate that skips so many rounds and then asks the target, over and over."""

    class Rhythm(Gate):
        num_rounds_seen = 0

        def reason(self, context, block, vocab):
            Rhythm.num_rounds_seen += 1
            return "" if Rhythm.num_rounds_seen % (num_rounds + 1) else "uncertain"

    return Rhythm("entropy", 1.0)


@law(60)
@given(toys.pairs(), toys.params(), st.integers(0, 5), st.integers(1, 5))
def test_rounds_carry_one_audit_flag_per_catch_up_token_and_it_is_true(pair, params, num_skips, k):
    chooser, stopping = toys.rules(params)
    context = toys.Context(PROMPT_IDS)
    loop = SpeculativeLoop(
        context,
        Drafter(pair[0], chooser, stopping),
        unsure_after(num_skips),
        toys.verifier_of(pair[1], params),
        toys.FixedK(k),
        stopping,
        VOCAB,
    )
    pending = list(PROMPT_IDS)  # everything committed, and how much of it the target has judged
    seen_len = len(pending)
    for done in loop.rounds():
        if done.record.outcome == "verified":
            expected = [
                reference.next_token(pair[1], pending[:at], len(PROMPT_IDS), params) == pending[at]
                for at in range(seen_len, len(pending))
            ]
            assert list(done.audit) == expected
            seen_len = len(pending) + len(done.token_ids)
        else:
            assert done.audit == ()
        pending += done.token_ids
        assert context.token_ids.tolist() == pending
        assert context.seen_len == seen_len
        assert context.catch_up == tuple(pending[seen_len:])


@law(60)
@given(toys.pairs(), toys.params(), st.integers(1, 8), st.integers(0, 6))
def test_an_interrupted_generation_keeps_a_prefix_of_the_full_one(pair, params, k, num_rounds):
    edge, cloud = pair
    full = generate(PROMPT, edge=edge, cloud=cloud, plan=make_plan(k=k), params=params, raw=True).run()
    broken = generate(PROMPT, edge=edge, cloud=cloud, plan=make_plan(k=k), params=params, raw=True)
    rounds = broken.rounds()
    for _ in range(num_rounds):
        next(rounds, None)
    broken.interrupt()
    assert next(rounds, None) is None and broken.run().token_ids == full.token_ids[: len(broken.token_ids)]
    assert full.text.startswith(broken.text)
    assert len(broken.records) == min(num_rounds, len(full.records))
    is_whole = num_rounds >= len(full.records)
    assert broken.finish_reason == (full.finish_reason if is_whole else "interrupted")


def test_an_interrupt_that_comes_during_a_forward_is_not_lost():
    generation = None

    class Interrupting(toys.ToyEngine):
        def forward(self, feeds, *, want_logits):
            if self.num_forwards == 5:
                generation.interrupt()
            return super().forward(feeds, want_logits=want_logits)

    cloud = toys.toy(3, kind=Interrupting)
    params = DecodingParams(max_new_tokens=50, min_new_tokens=50)
    generation = generate(PROMPT, cloud=cloud, plan=make_plan("cloud"), params=params, raw=True)
    generation.run()
    assert generation.finish_reason == "interrupted"
    assert len(generation.token_ids) == 5
    assert generation.text == VOCAB.decode(generation.token_ids)


def test_the_drafter_repeats_a_draft_and_follows_any_context():
    params = DecodingParams(temperature=1.0, seed=5)
    chooser, stopping = toys.rules(params)
    edge = toys.toy(6)
    drafter = Drafter(edge, chooser, stopping)
    context = toys.Context(PROMPT_IDS)
    first = drafter.draft(context, 6)
    assert drafter.draft(context, 6) == first
    assert drafter.draft(context, 3).token_ids == first.token_ids[:3]
    for tokens in (first.token_ids[:2], (7, 8, 9), first.token_ids):
        context.commit_skip(DraftBlock(len(context), tokens), None)
        expected = target_choices(edge, params, context.token_ids.tolist(), 4)
        drafted = drafter.draft(context, 4).token_ids
        assert drafted == tuple(expected)[: len(drafted)] and drafted


def test_a_loop_without_verifier_takes_no_gate_that_needs_one():
    chooser, stopping = toys.rules(DecodingParams())
    drafter = Drafter(toys.toy(1), chooser, stopping)
    with pytest.raises(ValueError, match="verifier"):
        SpeculativeLoop(toys.Context(PROMPT_IDS), drafter, Gate("always"), None, toys.FixedK(1), stopping, VOCAB)


def test_verdicts_and_blocks_are_valid_by_construction():
    for wrong in ((0, 0, 5, None), (3, -1, 5, None), (3, 0, None, "eos"), (3, 2, None, None)):
        with pytest.raises(ValueError):
            Verdict(*wrong)
    with pytest.raises(ValueError):
        DraftBlock(0, (1,))
    with pytest.raises(ValueError):
        DraftBlock(1, (1, 2), signals=(Signals(0.0, 1.0, 1.0),))
    assert isinstance(Chooser(DecodingParams(), VOCAB, 1).choose(np.ones(VOCAB.size, np.float32), toys.array([1])), int)
