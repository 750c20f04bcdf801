"""AutoTurns ends a block where one more draft is not worth its time, and follows what rounds really took and gave."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lengths import Times, fixed, over
from skydraft.decoding import block_length
from skydraft.decoding.block_length import MAX_AUTO_K, AutoTurns
from skydraft.decoding.cost_model import CostModel
from skydraft.gating.calibration import NUM_BINS, BinShares
from skydraft.gating.fitting import LabelledText
from skydraft.types import Cost, DraftBlock, LinkCost, Round, Signals, StepRecord

from .. import reference
from ..gating.test_fitting import written
from ..toys import law

GAIN = 1.05  # stated in the module: what drafting must promise over plain decoding
SURE = Signals(0.5, 0.5, 0.7)


def policy_of(costs, alpha=0.75, **options):
    """A policy that takes every token for as likely as all others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_length, "PRIOR_BY_RUN", (alpha,) * 8)
        patch.setattr(block_length, "counted_risks", lambda memory: BinShares([1 - alpha] * NUM_BINS, 1e12))
        return AutoTurns(costs, **options)


def length(policy):
    """How long a block gets where all tokens are alike."""
    longest = policy.longest()
    return next((n for n in range(1, longest) if policy.is_enough([SURE] * n)), longest)


def done(num_draft, num_accepted, *, number=1, draft_ms=0.0, target=None, rtt_ms=0.0, outcome="verified", wall_ms=1.0):
    record = StepRecord(
        number, 10, num_draft, num_accepted, num_accepted + 1, outcome, "always", wall_ms, 1.0,
        draft=Cost(num_draft, num_draft, forward_ms=draft_ms), target=target or Cost(), link=LinkCost(rtt_ms),
    )  # fmt: skip
    return Round(record, DraftBlock(10, (1,) * num_draft, (SURE,) * num_draft), (), ())


profiles = st.lists(st.floats(0.1, 100), min_size=1, max_size=8).map(lambda times: tuple(sorted(times)))
links = st.tuples(st.sampled_from([0.0, 0.0, 5.0, 300.0]), st.booleans())


@law(150)
@given(
    st.floats(0.01, 100), profiles, st.integers(1, 9), st.floats(0.01, 1), st.booleans(), st.integers(1, 32), links
)  # fmt: skip
def test_where_tokens_are_alike_it_is_the_best_fixed_k(draft_ms, forward_ms, max_rows, alpha, may_stream, max_k, link):
    wire_ms, streams = link
    costs = CostModel(draft_ms, forward_ms, max_rows, wire_ms=wire_ms, streams=streams)
    policy = policy_of(costs, alpha, may_stream=may_stream, max_k=max_k)
    most = min(max_k, MAX_AUTO_K)
    wires_ms = [0.0 if streams else wire_ms] + [wire_ms] * most
    found = [reference.tokens_per_s(alpha, k, draft_ms, forward_ms, max_rows, wire) for k, wire in enumerate(wires_ms)]
    chosen, best = length(policy), max(found[1:])
    if chosen == 0:
        assert may_stream and best <= found[0] * GAIN * (1 + 1e-9)
    elif may_stream and best < GAIN * found[0] * (1 + 1e-9):
        return  # on the edge between both
    else:
        assert found[chosen] >= best * (1 - 1e-9)


def test_a_profile_of_no_time_at_all_is_no_error():
    for streams in (False, True):
        policy = policy_of(CostModel(0.0, (0.0,), 1, streams=streams))
        for number in range(3):
            policy.observe(done(2, 1, number=number, draft_ms=1.0, target=Cost(1, 3, forward_ms=5.0), rtt_ms=5.0))
            assert policy.reads in (False, True) and policy.is_enough([SURE]) in (False, True)


@law(25)
@given(
    st.floats(0.2, 20), st.floats(0.2, 20), profiles, st.integers(1, 9), st.floats(0.3, 4), st.integers(1, 8),
    st.data(), st.tuples(st.floats(0, 300), st.booleans(), st.floats(0, 300)),
)  # fmt: skip
def test_costs_follow_what_rounds_took(believed_ms, draft_ms, forward_ms, max_rows, slowdown, k, data, link):
    """After rounds of a draft model, a target and a link other than was thought, costs are these."""
    num_accepted = data.draw(st.integers(0, k))
    believed_wire_ms, streams, wire_ms = link
    policy = policy_of(CostModel(believed_ms, forward_ms, max_rows, wire_ms=believed_wire_ms, streams=streams))
    slowed = tuple(slowdown * ms for ms in forward_ms)
    # One pass of as many rows as it takes, so that what a round took says what rows take.
    num_rows = min(k + 1, len(forward_ms))
    target = Cost(1, num_rows, forward_ms=slowed[num_rows - 1])
    for _ in range(120):
        rtt_ms = target.forward_ms + wire_ms
        policy.observe(done(k, num_accepted, draft_ms=k * draft_ms, target=target, rtt_ms=rtt_ms))
    costs = policy.costs
    assert costs.draft_ms == pytest.approx(draft_ms, rel=1e-6)
    assert costs.pass_ms(1) == pytest.approx(slowed[0], rel=1e-6)
    assert costs.wire_ms == pytest.approx(wire_ms, rel=1e-6, abs=1e-6)


UNTOLD = {
    "prefill of both": {"number": 0, "draft_ms": 24.0, "target": Cost(1, 4, forward_ms=900.0), "rtt_ms": 905.0},
    "skipped": {"outcome": "skipped", "draft_ms": 16.0},
    "fallback": {"outcome": "fallback", "draft_ms": 16.0, "rtt_ms": 900.0},
    "opened again": {"draft_ms": 8.0, "target": Cost(1, 4, forward_ms=1991.5, prefill_ms=1980.0)},
}


@pytest.mark.parametrize("untold", UNTOLD.values(), ids=UNTOLD)
def test_prefill_skips_and_fallbacks_teach_no_costs(untold):
    policy = policy_of(CostModel(2.0, (10.0, 10.5, 11.0, 11.5), 4, wire_ms=5.0))
    before = policy.costs
    policy.observe(done(4, 0, **untold))
    assert policy.costs == before
    policy.observe(done(4, 0, draft_ms=12.0, target=Cost(1, 4, forward_ms=11.5), rtt_ms=16.5))
    assert policy.costs != before


def text_of(seed, size, chances):
    """A text whose tokens the target disagrees with by chances that the signals tell."""
    rng = np.random.default_rng(seed)
    return written(tops := rng.choice(chances, size), rng.random(size) > tops)


@pytest.mark.parametrize("target_ms", [15.0, 45.0, 150.0])
@pytest.mark.parametrize("rtt_ms", [0.0, 60.0, 150.0])
def test_it_is_never_much_slower_than_streaming_or_any_fixed_k(target_ms, rtt_ms):
    """Replayed over texts whose tokens are sure or not, as real ones are."""
    times = Times(12.0, target_ms, lambda base: rtt_ms)
    texts = [text_of(seed, 400, [0.98, 0.95, 0.5, 0.3]) for seed in range(4)]
    streams, *drafts = (over(texts, times, lambda k=k: fixed(k)).tokens_per_s for k in range(13))
    assert over(texts, times, lambda: AutoTurns(times.costs)).tokens_per_s >= 0.95 * max(streams, *drafts)
    never = over(texts, times, lambda: AutoTurns(times.costs, may_stream=False))
    assert never.tokens_per_s >= (1.02 if rtt_ms else 0.99) * max(drafts)


def test_it_goes_back_to_drafting_when_the_link_is_fast_again():
    """10 ms, then 120, then 10: no longer than it takes to try, what paid before is done again."""

    def rtt_ms(base):
        return 120.0 if 600 <= base < 1200 else 10.0

    times = Times(12.0, 45.0, rtt_ms)
    texts = [text_of(seed, 3000, [0.98, 0.95, 0.5]) for seed in range(2)]
    fast = Times(12.0, 45.0, lambda base: 10.0)
    whole = over(texts, times, lambda: AutoTurns(times.costs))
    plain, ideal = over(texts, times, lambda: fixed(0)), over(texts, fast, lambda: AutoTurns(times.costs))
    assert ideal.tokens_per_s > 1.2 * plain.tokens_per_s
    # Four of five parts as fast as there, one as fast as the target alone.
    assert whole.spent_ms <= 1.08 * (0.8 * ideal.spent_ms + 0.2 * plain.spent_ms)


@pytest.mark.parametrize("prompt_ms", [0.0, 200.0, 2000.0])
def test_a_stream_never_waits_long_for_what_was_not_read(prompt_ms):
    """The prompt is read once that may be lost; the tokens after it are read in the shadow of the target, in parts."""
    costs = CostModel(20.0, (30.0,) * 16, 16, wire_ms=80.0, streams=True)
    policy, num_unread = AutoTurns(costs, prompt_ms=prompt_ms), 0
    for number in range(1, 2500):
        if policy.reads:
            assert prompt_ms <= (4 + 0.03 * number) * 30.0 + 20.0
            policy.read([False] * num_unread)
            prompt_ms, num_unread = 0.0, 0
        policy.observe(done(0, 0, number=number, wall_ms=30.0, outcome="written"))
        num_unread += 1
    assert not prompt_ms


LATE = {
    "in the shadow of the target": Times(20.0, 45.0, lambda base: 80.0),
    "a slow draft model": Times(30.0, 45.0, lambda base: 20.0),
    "in one process, many rows as fast as one": Times(12.0, 45.0, lambda base: 0.0, streams=False),
}


@pytest.mark.parametrize("times", LATE.values(), ids=LATE)
@pytest.mark.parametrize("hard", [[0.05], [0.5], [0.97, 0.97, 0.97, 0.05]])
def test_a_text_that_gets_predictable_late_is_found(times, hard):
    """Its second half is wholly predictable: most of that is drafted. One that never gets so loses its share."""
    first, second = text_of(1, 600, hard), text_of(2, 600, [1.0])
    text = LabelledText("target", first.signals + second.signals, first.disagrees + second.disagrees)

    def policy():
        return AutoTurns(times.costs, read_ms=times.draft_ms / 16, prompt_ms=150.0)

    plain_ms, half = over([first], times, lambda: fixed(0)).spent_ms, over([first], times, policy)
    assert half.spent_ms <= 1.04 * plain_ms + 4 * 45.0 + MAX_AUTO_K * times.draft_ms + 3 * 80.0
    whole = over([text], times, policy)
    assert whole.num_draft - half.num_draft >= 300


@pytest.mark.parametrize(("queue_ms", "drafts"), [(0.0, False), (100.0, True)])
def test_where_each_token_of_a_stream_waits_for_its_turn_a_block_that_waits_once_pays(queue_ms, drafts):
    """The same text, target and link: a server with other clients is slower for a stream than for blocks."""
    policy = AutoTurns(CostModel(25.0, (30.0, 33.0, 36.0, 39.0), 4, wire_ms=80.0, streams=True))
    waited = Cost(1, 1, forward_ms=30.0, queue_ms=queue_ms)
    for number in range(1, 60):
        policy.observe(done(0, 0, number=number, target=waited, wall_ms=30.0 + queue_ms, outcome="written"))
        if policy.reads:
            policy.read([True])
    assert (policy.longest() > 0) == drafts
