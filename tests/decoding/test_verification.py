"""Laws of the two sides: any block, any catch-up, any failure, and the verdict is still the target's own."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft import DecodingParams, generate, make_plan
from skydraft.decoding.context import Context
from skydraft.decoding.drafting import Drafter
from skydraft.engines.model import FairLock
from skydraft.errors import BaseMismatch, EngineError, LimitExceeded
from skydraft.types import DraftBlock, Prompt, Verdict

from .. import toys
from ..toys import ASKED, PROMPT, PROMPT_IDS, FlakyEngine, law
from .judging import any_token, choices, endless, expected_verdict

other_prompts = st.lists(any_token, min_size=1, max_size=12).map(lambda token_ids: Prompt(tuple(token_ids)))


@st.composite
def requests(draw):
    """A target, its parameters, catch-up tokens and a block that may be right, wrong later, or go on past a stop."""
    target, params = toys.toy(draw(toys.seeds)), draw(toys.params())
    # Catch-up tokens past the length limit cannot be: the generation would have ended there.
    catch_up = draw(st.lists(any_token, max_size=min(10, params.max_new_tokens - 1)))
    if draw(st.booleans()):
        catch_up = choices(target, params, [], len(catch_up))
    block = choices(target, params, catch_up, draw(st.integers(0, 8)))
    if block and draw(st.booleans()):
        block[draw(st.integers(0, len(block) - 1))] = draw(any_token)
    return target, params, tuple(catch_up), tuple(block)


@law(62)
@given(requests(), st.integers(1, 9), st.just(ASKED) | other_prompts)
def test_a_verdict_is_the_definition_for_any_block_prompt_and_split_into_passes(request_, max_rows, prompt):
    target, params, catch_up, block = request_
    verifier = toys.verifier_of(target, params, max_rows=max_rows, prompt=prompt)
    verdict = verifier.verify(DraftBlock(len(catch_up), block), catch_up)
    expected = expected_verdict(target, params, catch_up, block, prompt.token_ids)
    written = [choices(target, params, catch_up[:at], 1, prompt.token_ids)[0] for at in range(len(catch_up))]
    assert verdict == dataclasses.replace(expected, audit=tuple(map(int.__eq__, written, catch_up)))
    assert verdict.num_tokens == expected.num_accepted + (expected.token_id is not None)
    # Rows: the catch-up and one per judged position, in passes of max_rows; no pass after the last judged row.
    needed = len(catch_up) + verdict.num_tokens
    assert verdict.cost.num_passes == -(-needed // max_rows)
    assert needed <= verdict.cost.num_rows <= min(needed + max_rows - 1, len(catch_up) + len(block) + 1)


@law(30)
@given(requests(), st.integers(-3, 3).filter(bool), requests())
def test_a_wrong_base_raises_and_changes_nothing(first, shift, second):
    target, params, catch_up, block = first
    verifier, untouched = (toys.verifier_of(target, params) for _ in range(2))
    base = len(catch_up)
    for wrong in {max(base + shift, 0), base + len(PROMPT_IDS)} - {base}:
        with pytest.raises(BaseMismatch, match="the text has 0"):  # committed on that side, without the catch-up
            verifier.verify(DraftBlock(wrong, block), catch_up)
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


@law(60)
@given(st.data(), toys.seeds, endless(), st.integers(1, 6), st.integers(1, 5))
def test_a_failed_forward_can_be_repeated_as_if_it_had_not_been(data, seed, params, fail_at, max_rows):
    target = toys.toy(seed, kind=FlakyEngine)
    verifier, sound = toys.verifier_of(target, params, max_rows=max_rows), toys.verifier_of(toys.toy(seed), params)
    generated = []
    for _ in range(2):
        catch_up = tuple(data.draw(st.lists(any_token, max_size=6)))
        block = choices(toys.toy(seed), params, [*generated, *catch_up], 4)
        if data.draw(st.booleans()):
            block[data.draw(st.integers(0, 3))] = data.draw(any_token)
        asked = DraftBlock(len(generated) + len(catch_up), tuple(block))
        target.fail_at, target.num_asked = fail_at, 0
        try:
            verdict = verifier.verify(asked, catch_up)
        except EngineError:
            verdict = verifier.verify(asked, catch_up)
        assert verdict == sound.verify(asked, catch_up)
        generated += [*catch_up, *verdict.commits(asked)]
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


def test_a_long_text_that_others_wrote_is_read_in_parts_between_which_others_draft(monkeypatch):
    params = DecodingParams(max_new_tokens=500, min_new_tokens=500)
    engine, context = toys.toy(1), Context(ASKED)
    drafter = Drafter(engine, ASKED, params, 500)
    drafter.draft(context.token_ids, 3)
    for number in range(300):
        token_id = 3 + number % 5
        context.commit_verdict(DraftBlock(context.base, ()), Verdict(context.base, 0, token_id))
    held = []  # rows that were fed each time somebody had the floor
    enter, forward = FairLock.__enter__, engine.forward
    monkeypatch.setattr(FairLock, "__enter__", lambda lock: (held.append(0), enter(lock)))

    def counted(feeds, **options):
        held[-1] += sum(len(feed) for _, feed in feeds)
        return forward(feeds, **options)

    monkeypatch.setattr(engine, "forward", counted)
    block = drafter.draft(context.token_ids, 4)
    assert sum(held) == block.cost.num_rows >= 300
    assert max(held) <= engine.invariant_rows + 16 + 4 and len(held) >= 4
    held.clear()
    late = Drafter(engine, ASKED, params, 500)
    while not late.read(context.token_ids).read:
        pass
    assert max(held) <= max(engine.invariant_rows, 2) and sum(held) >= 300
