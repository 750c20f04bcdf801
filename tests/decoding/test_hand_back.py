"""After a correction the target writes on: every token is still the choice of the model that it is said to be."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft import DecodingParams, make_plan
from skydraft.choosing.chooser import Chooser
from skydraft.decoding.turns import run_of
from skydraft.gating.hand_back import parse_hand_back
from skydraft.types import WRITE_ALL

from .. import reference, toys
from ..grammars import HAS_LIBRARY
from ..toys import PROMPT_IDS, law
from .test_laws import assert_consistent, assert_whose, decode, executions, gates, ks

hand_backs = st.sampled_from(["0", "1", "2", "7", "agree:1", "agree:2", "agree:4", "text"])
ruled = st.sampled_from(["margin:0.2+digits", "entropy:9+start+values"])


def turns_of(done):
    """The bases of what the target wrote after each correction, by the records.

    After a broken stream the edge asks it to write on, by an empty block.
    """
    turns, is_writing = [], False
    for record in done.records:
        if record.outcome == "written" or (record.outcome == "verified" and not record.num_draft):
            assert is_writing or record.outcome == "verified"
            turns[-1] += range(record.base, record.base + record.num_committed)
        is_writing = record.outcome in ("verified", "written")
        if record.outcome == "verified" and record.num_accepted < record.num_draft:
            turns.append([])
    return turns


@law(140)
@given(toys.pairs(), toys.params(), gates | st.just("always") | ruled, ks, st.booleans(), hand_backs, executions)
def test_whoever_wrote_a_token_chose_it(pair, params, gate, k, ends_early, hand_back, execution):
    edge, cloud = pair
    plan = replace(make_plan(gate=gate, k=k, hand_back=hand_back), ends_early=ends_early and gate != "always")
    done = decode(plan, params, edge, cloud, execution=execution)
    assert_whose(done, edge, cloud, params)
    assert_consistent(done, params)
    if gate == "always":
        assert (done.token_ids, done.finish_reason) == reference.plain(cloud, PROMPT_IDS, params)
    # What is written after a correction needs no other call.
    assert all(record.num_draft for record in done.records if record.outcome == "verified")
    written = [len(turn) for turn in turns_of(done)]
    back = parse_hand_back(hand_back)
    assert all(num <= back.num_tokens for num in written)
    if back.num_tokens < WRITE_ALL:  # only the end of the text cuts a turn
        assert all(num == back.num_tokens for num in written[:-1])
    assert done.stats.target_written_per_token == pytest.approx(
        sum(origin in ("cloud", "recovered", "bonus") for origin in done.origins) / len(done.origins), abs=1e-4
    )


@law(80)
@given(toys.pairs(), toys.params(), gates, st.integers(1, 8), st.integers(1, 5))
def test_with_agree_the_draft_model_gets_its_turn_where_it_agrees_with_the_last_tokens(pair, params, gate, k, wanted):
    edge, cloud = pair
    done = decode(make_plan(gate=gate, k=k, hand_back=f"agree:{wanted}"), params, edge, cloud)
    token_ids = [*PROMPT_IDS, *done.token_ids]
    for turn in turns_of(done):
        run = 0
        for base in turn:
            assert run < wanted  # nothing is written after the run
            length = len(PROMPT_IDS) + base
            if Chooser(params, edge.vocab, len(PROMPT_IDS)).forced(toys.array(token_ids[:length])) is not None:
                continue  # no agreement, and no difference either
            own = reference.next_token(edge, token_ids[:length], len(PROMPT_IDS), params)
            run = run + 1 if own == token_ids[length] else 0
        if turn and turn[-1] + 1 < len(done.token_ids):
            assert run == wanted


@pytest.mark.skipif(not HAS_LIBRARY, reason="needs llguidance")
def test_what_a_grammar_forces_neither_extends_nor_breaks_a_run():
    """Models that never agree: all that both write is forced, so the target keeps its turn."""
    params = DecodingParams(max_new_tokens=40, grammar="regex:(ab35(我|你|他)){9}")
    plan = make_plan(gate="entropy:0", k=4, hand_back="agree:2")
    done = decode(plan, params, toys.toy(1, sign=-1), toys.toy(1))
    assert [record.outcome for record in done.records].count("verified") == 1
    assert run_of([True, None, None, True], 3) == 5 and run_of([False, None], 3) == 0


def test_no_token_is_fed_twice_and_no_draft_is_made_twice():
    """Reading along leaves the last token to the next block, whose first step feeds it."""
    edge, cloud = toys.toy(3, 0.7), toys.toy(3)
    params = DecodingParams(max_new_tokens=80, min_new_tokens=80)
    done = decode(make_plan(gate="entropy:1", k=4, hand_back="agree:2"), params, edge, cloud)
    drafted = sum(record.num_draft for record in done.records)
    rejected = sum(record.num_draft - record.num_accepted for record in done.records if record.outcome == "verified")
    written = sum(record.num_written for record in done.records)
    rows = sum(record.draft.num_rows for record in done.records)
    assert any(record.outcome == "written" for record in done.records)
    assert rows <= drafted + written + 1
    assert drafted - rejected + written == 80


@law(30)
@given(toys.pairs(), toys.params(), st.sampled_from(["0", "3", "agree:2", "text"]), st.integers(20, 32))
def test_the_target_goes_on_where_the_context_of_the_draft_model_ends(pair, params, hand_back, room):
    _, cloud = pair
    edge = toys.toy(1, context_len=room)
    done = decode(make_plan(gate="entropy:1", k=4, hand_back=hand_back), params, edge, cloud)
    assert_whose(done, toys.toy(1), cloud, params)  # whose context has room after the last token
    assert_consistent(done, params)
