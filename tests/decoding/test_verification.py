"""Laws of the two sides: any block, any catch-up, any failure, and the verdict is still the target's own."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft import DecodingParams, generate, make_plan
from skydraft.choosing.stopping import Stopping
from skydraft.decoding.context import Context
from skydraft.decoding.drafting import Drafter
from skydraft.decoding.verification import TargetSession
from skydraft.engines.model import FairLock
from skydraft.errors import BaseMismatch, EngineError, LimitExceeded
from skydraft.types import Cost, DraftBlock, Prompt, Verdict

from .. import reference, toys
from ..toys import ASKED, PROMPT, PROMPT_IDS, VOCAB, FlakyEngine, law

any_token = st.integers(0, VOCAB.size - 1)
other_prompts = st.lists(any_token, min_size=1, max_size=12).map(lambda token_ids: Prompt(tuple(token_ids)))


def choices(engine, params, generated, num_tokens, prompt=PROMPT_IDS):
    """What a model would write after `prompt` and `generated`, whatever the stopping rules say."""
    token_ids = [*prompt, *generated]
    for _ in range(num_tokens):
        token_ids.append(reference.next_token(engine, token_ids, len(prompt), params))
    return token_ids[len(token_ids) - num_tokens :]


def expected_verdict(target, params, generated, block, prompt=PROMPT_IDS):
    """The verdict from its definition: walk the block until a difference or an end."""
    stopping, base = Stopping(params, VOCAB, params.max_new_tokens), len(generated)
    for index, drafted in enumerate(block):
        written = [*generated, *block[:index]]
        (choice,) = choices(target, params, written, 1, prompt)
        finish = stopping.finish(toys.array([*written, choice]))
        if choice != drafted:
            return Verdict(base, index, choice, finish)
        if finish:
            return Verdict(base, index + 1, None, finish)
    (bonus,) = choices(target, params, [*generated, *block], 1, prompt)
    return Verdict(base, len(block), bonus, stopping.finish(toys.array([*generated, *block, bonus])))


@st.composite
def rounds(draw, target, params, written, prompt):
    """Catch-up tokens and a block after them that may be right, wrong somewhere, or go on past a stop."""
    # Catch-up tokens past the length limit cannot be: the generation would have ended there.
    catch_up = draw(st.lists(any_token, max_size=min(10, params.max_new_tokens - 1 - len(written))))
    if draw(st.booleans()):
        catch_up = choices(target, params, written, len(catch_up), prompt)
    block = choices(target, params, [*written, *catch_up], draw(st.integers(0, 8)), prompt)
    if block and draw(st.booleans()):
        block[draw(st.integers(0, len(block) - 1))] = draw(any_token)
    return catch_up, block


@law(120)
@given(st.data(), toys.seeds, toys.params(), st.just(ASKED) | other_prompts, st.integers(1, 9),
       st.sampled_from(["", "another base", "a failed forward", "the sequence of another text"]))  # fmt: skip
def test_a_verdict_is_its_definition_whatever_went_wrong_before(data, seed, params, prompt, max_rows, fault):
    """For any block and prompt, split into any passes; and nothing that was refused or failed changes anything."""
    target, prompt_ids, written = toys.toy(seed, kind=FlakyEngine), prompt.token_ids, []
    verifier, former = (toys.verifier_of(target, params, max_rows=max_rows, prompt=prompt) for _ in range(2))
    if fault == "the sequence of another text":  # with its prompt
        theirs, block = data.draw(rounds(toys.toy(seed), params, [], prompt_ids))
        former.verify(DraftBlock(len(theirs), tuple(block)), theirs)
        verifier.adopt(former.release())
    for _ in range(2):
        catch_up, block = data.draw(rounds(toys.toy(seed), params, written, prompt_ids))
        base = len(written) + len(catch_up)
        asked, num_failed = DraftBlock(base, tuple(block)), 0
        for wrong in {max(base + data.draw(st.integers(-3, 3)), 0), base + len(prompt_ids)} - {base}:
            if fault == "another base":  # it names what was committed on that side, without the catch-up
                with pytest.raises(BaseMismatch, match=f"the text has {len(written)}"):
                    verifier.verify(DraftBlock(wrong, asked.token_ids), catch_up)
        target.num_asked, target.fail_at = 0, data.draw(st.integers(1, 6)) if fault == "a failed forward" else -1
        try:
            verdict = verifier.verify(asked, catch_up)
        except EngineError:
            verdict, num_failed = verifier.verify(asked, catch_up), 1
        expected = expected_verdict(toys.toy(seed), params, [*written, *catch_up], asked.token_ids, prompt_ids)
        theirs = [
            choices(toys.toy(seed), params, [*written, *catch_up[:at]], 1, prompt_ids)[0] for at in range(len(catch_up))
        ]
        assert verdict == dataclasses.replace(expected, audit=tuple(map(int.__eq__, theirs, catch_up)))
        # Rows: the catch-up and one per judged position, in passes of max_rows; no pass after the last judged row.
        needed, cost = len(catch_up) + verdict.num_tokens, verdict.cost
        assert num_failed or cost.num_passes == -(-needed // max_rows)
        assert num_failed or needed <= cost.num_rows <= min(needed + max_rows - 1, len(catch_up) + len(block) + 1)
        written += [*catch_up, *verdict.commits(asked)]
        with pytest.raises(LimitExceeded if verdict.finish else BaseMismatch):  # it was committed
            verifier.verify(DraftBlock(len(written), ()) if verdict.finish else asked, ())
        if verdict.finish:
            break


@law(30)
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
    if full.finish_reason != "stop_string":  # what may have begun one is shown when it is known that no more comes
        assert full.text.startswith(broken.text)
    assert len(broken.records) == min(num_rounds, len(full.records))
    is_whole = num_rounds >= len(full.records)
    assert broken.finish_reason == (full.finish_reason if is_whole else "interrupted")


@pytest.mark.parametrize("how", ["draft", "read", "verify"])
def test_a_long_text_that_others_wrote_is_read_in_parts_between_which_others_compute(monkeypatch, how):
    params = DecodingParams(max_new_tokens=500, min_new_tokens=500)
    engine, context = toys.toy(1), Context(ASKED)
    drafter, verifier = Drafter(engine, ASKED, params, 500), toys.verifier_of(engine, params, max_rows=32)
    drafter.draft(context.token_ids, 3)
    for number in range(300):
        context.commit_verdict(DraftBlock(context.base, ()), Verdict(context.base, 0, 3 + number % 5))
    held = []  # rows that were fed each time somebody had the floor
    enter, forward = FairLock.__enter__, engine.forward
    monkeypatch.setattr(FairLock, "__enter__", lambda lock: (held.append(0), enter(lock)))

    def counted(feeds, **options):
        held[-1] += sum(len(feed) for _, feed in feeds)
        return forward(feeds, **options)

    monkeypatch.setattr(engine, "forward", counted)
    if how == "draft":
        assert drafter.draft(context.token_ids, 4).cost.num_rows == sum(held)
    elif how == "read":
        while not drafter.read(context.token_ids).read:
            pass
    else:
        verifier.verify(DraftBlock(300, ()), context.generated)
    assert sum(held) >= 297 and max(held) <= max(engine.invariant_rows, 32) + 4 and len(held) >= 4


def seated(target, params):
    """A session with a sequence of its own, its prompt in the cache."""
    session = TargetSession(target, ASKED, params)
    session.adopt(target.begin(ASKED.token_ids))
    while session.needs_prefill:
        session.prefill()
    return session


def test_a_verification_that_was_overtaken_commits_nothing():
    target, params = toys.toy(3), DecodingParams(max_new_tokens=50, min_new_tokens=50)
    session = seated(target, params)
    late, first = (session.begin(DraftBlock(0, ()), ()) for _ in range(2))
    for work in (late, first):
        while (token_ids := work.next_feed(4)) is not None:
            work.absorb(work.sequence.extend(token_ids))
            work.sequence.align(toys.array(PROMPT_IDS))
    verdict = session.commit(first, Cost())
    before = session.token_ids.tolist()
    with pytest.raises(BaseMismatch):
        session.commit(late, Cost())
    assert session.token_ids.tolist() == before == [*PROMPT_IDS, verdict.token_id]


def test_a_row_that_is_no_number_ends_those_that_need_it_and_no_others():
    """The first token is wrong, so what follows it is never needed, whatever its row holds."""
    target, params = toys.toy(3), DecodingParams(max_new_tokens=50, min_new_tokens=50)
    right = choices(target, params, [], 4)
    blocks = [DraftBlock(0, (*wrong, *right[1:])) for wrong in ((right[0],), ((right[0] + 1) % 20,))]
    broken, fine = [seated(target, params).begin(block, ()) for block in blocks]
    rows = [work.sequence.extend(work.next_feed(9)).copy() for work in (broken, fine)]
    for each in rows:
        each[1:] = np.nan
    with pytest.raises(EngineError, match="not numbers"):
        broken.absorb(rows[0])
    fine.absorb(rows[1])
    assert fine.next_feed(9) is None
