"""AutoK ends a block where one more draft is not worth its time, and follows what rounds really took and gave."""

from __future__ import annotations

from itertools import count, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lengths import Times, over
from skydraft.decoding.block_length import MAX_AUTO_K, PRIOR_ALPHA, AutoK
from skydraft.decoding.cost_model import CostModel
from skydraft.gating.calibration import CalibratedRisk, LearnedRisk
from skydraft.gating.fitting import LabelledText
from skydraft.types import Cost, DraftBlock, LinkCost, Round, Signals, StepRecord

from .. import reference
from ..toys import law

GAIN = 1.05  # stated in the module: what drafting must promise over plain decoding
SURE = Signals(0.5, 0.5, 0.7)


class KnownRisk:
    """A chance that is known, and the same for all tokens."""

    def __init__(self, chance):
        self._chance = chance

    def of(self, signals):
        return self._chance

    def observe(self, judged, num_accepted):
        pass


def policy_of(costs, alpha=PRIOR_ALPHA, **options):
    return AutoK(costs, KnownRisk(1 - alpha), alpha=alpha, **options)


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


def speeds(alpha, draft_ms, forward_ms, max_rows, wire_ms=0.0, *, streams=False, max_k=MAX_AUTO_K):
    """Tokens per second of every k, by brute force."""
    return [
        reference.tokens_per_s(alpha, k, draft_ms, forward_ms, max_rows, 0.0 if streams and k == 0 else wire_ms)
        for k in range(max_k + 1)
    ]


def assert_best(chosen, found, *, may_stream=True, rel=1e-9):
    """That no k is faster; none at all needs less than the gain that drafting must promise."""
    best = max(found[1:])
    if chosen == 0:
        assert may_stream and best <= found[0] * GAIN * (1 + rel)
    else:
        assert found[chosen] >= best * (1 - rel)
        assert not may_stream or found[chosen] >= found[0] * GAIN * (1 - rel)


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
    assert policy.alpha == pytest.approx(alpha)
    most = min(max_k, MAX_AUTO_K)
    found = speeds(policy.alpha, draft_ms, forward_ms, max_rows, wire_ms, streams=streams, max_k=most)
    chosen = length(policy)
    if chosen and may_stream and max(found[1:]) < GAIN * found[0] * (1 + 1e-9):
        return  # on the edge between both
    if may_stream and chosen and found[chosen] < max(found[1:]) * (1 - 1e-9):
        assert found[0] > max(found[1:])  # a price that no block is worth: the shortest is the cheapest try
        return
    assert_best(chosen, found, may_stream=may_stream)


@law(50)
@given(profiles, st.integers(1, 9), st.floats(0.01, 1), st.floats(1, 10))
def test_a_drafter_as_slow_as_the_target_never_drafts(forward_ms, max_rows, alpha, slower):
    """k drafts cost k target steps and more, and give at most k + 1 tokens for k + 1 steps."""
    assert length(policy_of(CostModel(forward_ms[0] * slower, forward_ms, max_rows), alpha)) == 0


def test_what_never_agrees_is_never_drafted_and_free_drafts_of_a_twin_always():
    flat, steep = (10.0,) * 8, tuple(10.0 * n for n in range(1, 9))
    assert length(policy_of(CostModel(0.1, flat, 8), 1e-9)) == 0
    assert length(policy_of(CostModel(0.001, flat, 9), 1.0)) >= 7
    assert length(policy_of(CostModel(1.0, steep, 8), 0.9)) == 0
    assert length(policy_of(CostModel(1e6, flat, 8), 1e-9, may_stream=False)) == 1


def test_a_block_ends_after_an_unsure_token_and_goes_on_while_all_are_sure():
    policy = AutoK(CostModel(12.0, (45.0,) * 16, 16, wire_ms=20.0, streams=True), LearnedRisk())
    sure, unsure = Signals(0.1, 0.9, 0.97), Signals(2.0, 0.1, 0.15)
    assert policy.is_enough([sure, unsure]) and not policy.is_enough([sure] * 4)


@law(25)
@given(st.floats(0.05, 1), st.integers(1, 8), st.integers(0, 1000))
def test_alpha_learns_the_acceptance_whatever_k_hides(true_alpha, k, seed):
    """Drafts after the first difference were never judged, and must not count as refused."""
    policy, rng = policy_of(CostModel(1.0, (10.0,), 8)), np.random.default_rng(seed)
    found = []
    for _ in range(1500):
        accepted = int(np.argmin(np.append(rng.random(k) < true_alpha, False)))
        policy.observe(done(k, accepted, draft_ms=1.0 * k))
        found.append(policy.alpha)
    assert np.mean(found[500:]) == pytest.approx(true_alpha, abs=0.04)


@law(50)
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
    for _ in range(200):
        rtt_ms = target.forward_ms + wire_ms
        policy.observe(done(k, num_accepted, draft_ms=k * draft_ms, target=target, rtt_ms=rtt_ms))
    costs = policy._costs
    assert costs.draft_ms == pytest.approx(draft_ms, rel=1e-6)
    assert costs.pass_ms(1) == pytest.approx(slowed[0], rel=1e-6)
    assert costs.wire_ms == pytest.approx(wire_ms, rel=1e-6, abs=1e-6)


UNTOLD = {
    "prefill of both": {"number": 0, "slower": 3.0, "forward_ms": 900.0, "num_accepted": 0},
    "skipped": {"outcome": "skipped", "slower": 2.0, "forward_ms": 0.0, "num_accepted": 0},
    "fallback": {"outcome": "fallback", "slower": 2.0, "forward_ms": 0.0, "wire_ms": 900.0, "num_accepted": 0},
}


def told(step_ms, *, num_accepted=3, slower=1.0, forward_ms=11.5, wire_ms=5.0, prefill_ms=0.0, **more):
    target = Cost(1, 4, forward_ms=forward_ms, prefill_ms=prefill_ms)
    rtt_ms = forward_ms + wire_ms
    return done(4, num_accepted, draft_ms=4 * step_ms * slower, target=target, rtt_ms=rtt_ms, **more)


@pytest.mark.parametrize("untold", UNTOLD)
def test_prefill_skips_and_fallbacks_teach_nothing(untold):
    policy = policy_of(CostModel(2.0, (10.0, 10.5, 11.0, 11.5), 4, wire_ms=5.0))
    before = policy._costs, policy.alpha
    for _ in range(20):
        policy.observe(told(2.0, **UNTOLD[untold]))
    assert (policy._costs, policy.alpha) == before
    policy.observe(told(3.0, num_accepted=0))
    assert (policy._costs, policy.alpha) != before


def test_the_prefill_of_a_session_opened_again_is_no_step_of_the_target():
    policy = policy_of(CostModel(2.0, (10.0, 10.5, 11.0, 11.5), 4, wire_ms=5.0))
    policy.observe(told(2.0, forward_ms=1991.5, prefill_ms=1980.0))
    assert policy._costs.slowdown == pytest.approx(1.0)


def text_of(seed, size, chances):
    """A text whose tokens the target disagrees with by chances that the signals tell."""
    rng = np.random.default_rng(seed)
    tops = rng.choice(chances, size)
    signals = tuple(Signals(1.0, 0.5, float(top)) for top in tops)
    return LabelledText("target", signals, tuple(bool(x) for x in rng.random(size) > tops))


@pytest.mark.parametrize("target_ms", [15.0, 45.0, 150.0])
@pytest.mark.parametrize("rtt_ms", [0.0, 20.0, 60.0, 150.0])
def test_it_is_never_much_slower_than_streaming_or_any_fixed_k(target_ms, rtt_ms):
    """Replayed over texts whose tokens are sure or not, as real ones are."""
    times = Times(12.0, target_ms, lambda base: rtt_ms)
    texts = [text_of(seed, 400, [0.98, 0.95, 0.5, 0.3]) for seed in range(8)]
    best = max(over(texts, times, lambda k=k: k).tokens_per_s for k in range(13))
    for make in (LearnedRisk, lambda: CalibratedRisk(lambda signals: 1 - signals.top_prob)):
        found = over(texts, times, lambda make=make: AutoK(times.costs, make()))
        assert found.tokens_per_s >= 0.95 * best
        never = over(texts, times, lambda make=make: AutoK(times.costs, make(), may_stream=False))
        fixed = max(over(texts, times, lambda k=k: k).tokens_per_s for k in range(1, 13))
        assert never.tokens_per_s >= (1.02 if rtt_ms else 0.99) * fixed


def test_it_goes_back_to_drafting_when_the_link_is_fast_again():
    """10 ms, then 120, then 10: no longer than it takes to try, what paid before is done again."""

    def rtt_ms(base):
        return 120.0 if 600 <= base < 1200 else 10.0

    times = Times(12.0, 45.0, rtt_ms)
    texts = [text_of(seed, 3000, [0.98, 0.95, 0.5]) for seed in range(4)]
    fast = Times(12.0, 45.0, lambda base: 10.0)
    whole = over(texts, times, lambda: AutoK(times.costs, LearnedRisk()))
    plain, ideal = over(texts, times, lambda: 0), over(texts, fast, lambda: AutoK(times.costs, LearnedRisk()))
    assert ideal.tokens_per_s > 1.2 * plain.tokens_per_s
    # Four of five parts as fast as there, one as fast as the target alone.
    assert whole.spent_ms <= 1.05 * (0.8 * ideal.spent_ms + 0.2 * plain.spent_ms)


def test_trying_costs_a_small_share_where_drafting_never_pays():
    times = Times(12.0, 15.0, lambda base: 150.0)
    texts = [text_of(seed, 4000, [0.9, 0.3]) for seed in range(2)]
    plain = over(texts, times, lambda: 0)
    found = over(texts, times, lambda: AutoK(times.costs, LearnedRisk()))
    assert found.num_draft > 0 and found.tokens_per_s >= 0.95 * plain.tokens_per_s


@pytest.mark.parametrize(("read_ms", "prompt_ms"), [(0.0, 200.0), (0.5, 0.0), (0.5, 200.0), (1.2, 50.0)])
def test_a_try_waits_until_reading_what_was_written_without_a_draft_is_a_small_share(read_ms, prompt_ms):
    costs = CostModel(12.0, (45.0,) * 16, 16, wire_ms=150.0, streams=True)
    policy = policy_of(costs, read_ms=read_ms, prompt_ms=prompt_ms)
    tried_at = []
    for number in range(1, 20_000):
        if policy.longest() > 0:
            since = number - (tried_at[-1] if tried_at else 0)
            reading_ms = since * read_ms + (0 if tried_at else prompt_ms)
            assert reading_ms <= 0.03 * since * 45.0
            tried_at.append(number)
            drafting_ms = 12.0 + reading_ms  # as a record has it: what a block took, reading included
            policy.observe(done(1, 0, number=number, draft_ms=drafting_ms, rtt_ms=195.0, wall_ms=drafting_ms + 195.0))
        else:
            policy.observe(done(0, 0, number=number, wall_ms=45.0))
    gaps = [later - before for before, later in pairwise(tried_at)]
    assert len(tried_at) > 3 and max(gaps) < 2 * min(gaps) + 100, "a try makes the next one no rarer"


def test_drafting_begins_again_where_a_try_held_reading():
    """What was read says nothing of a step: once the link is fast, drafting goes on."""
    costs = CostModel(12.0, (45.0,) * 16, 16, wire_ms=400.0, streams=True)
    policy = policy_of(costs, alpha=0.8, read_ms=0.3)
    streamed = drafted = 0
    for number in range(1, 6000):
        wire_ms = 400.0 if number < 800 else 5.0
        if policy.longest() > 0:
            drafting_ms = 4 * 12.0 + streamed * 0.3
            policy.observe(
                done(
                    4, 3, number=number, draft_ms=drafting_ms, rtt_ms=45.0 + wire_ms,
                    wall_ms=drafting_ms + 45.0 + wire_ms, target=Cost(1, 5, forward_ms=45.0),
                )
            )  # fmt: skip
            streamed, drafted = 0, drafted + (number >= 3000)
        else:
            policy.observe(done(0, 0, number=number, wall_ms=45.0, target=Cost(1, 1, forward_ms=45.0)))
            streamed += 1
    assert drafted > 2500


def test_where_reading_is_slow_no_text_is_spoiled_by_a_try():
    """Two models on one processor: 45 tokens of a prompt took the time of ten of the target's."""
    policy = policy_of(CostModel(18.0, (75.0, 130.0, 160.0), 3), read_ms=11.0, prompt_ms=500.0)
    for number in range(1, 2000):
        assert policy.longest() == 0
        policy.observe(done(0, 0, number=number, wall_ms=75.0))


def test_what_is_learned_of_sure_and_unsure_tokens_is_how_often_they_were_wrong():
    risk, rng = LearnedRisk(), np.random.default_rng(3)
    sure, unsure = Signals(0.1, 0.9, 0.97), Signals(2.0, 0.1, 0.3)
    for _ in range(2000):
        block = [sure, unsure, sure]
        stands = [rng.random() < 0.9, rng.random() < 0.6, rng.random() < 0.9]
        risk.observe(block, stands.index(False) if False in stands else 3)
    assert risk.of(sure) == pytest.approx(0.1, abs=0.04) and risk.of(unsure) == pytest.approx(0.4, abs=0.06)
    for _ in range(1200):  # another kind of text
        risk.observe([unsure], 1)
    assert risk.of(unsure) < 0.1


def test_a_calibrated_risk_is_corrected_by_verdicts():
    risk = CalibratedRisk(lambda signals: 0.1)
    assert risk.of(SURE) == pytest.approx(0.1)
    for number in count():
        risk.observe([SURE, SURE], 1)  # every second token wrong, not every tenth
        if number == 100:
            break
    assert 0.35 < risk.of(SURE) < 0.55
