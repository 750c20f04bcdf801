"""AutoK picks the block length that the costs make fastest, and follows what rounds really took and gave."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.decoding.block_length import MAX_AUTO_K, PRIOR_ALPHA, AutoK
from skydraft.decoding.cost_model import CostModel
from skydraft.types import Cost, LinkCost, StepRecord

from .. import reference
from ..toys import law

GAIN = 1.05  # stated in the module: what drafting must promise over plain decoding


def record(num_draft, num_accepted, *, number=1, draft_ms=0.0, target=None, rtt_ms=0.0, outcome="verified"):
    return StepRecord(
        number, 10, num_draft, num_accepted, num_accepted + 1, outcome, "always", 1.0, 1.0,
        draft=Cost(num_draft, num_draft, forward_ms=draft_ms), target=target or Cost(), link=LinkCost(rtt_ms),
    )  # fmt: skip


def speeds(alpha, draft_ms, forward_ms, max_rows, wire_ms=0.0, *, streams=False):
    """Tokens per second of every k, by brute force."""
    return [
        reference.tokens_per_s(alpha, k, draft_ms, forward_ms, max_rows, 0.0 if streams and k == 0 else wire_ms)
        for k in range(MAX_AUTO_K + 1)
    ]


def assert_best(chosen, found, min_k=0, max_k=MAX_AUTO_K, rel=1e-9):
    """That no k from `min_k` to `max_k` is faster; k = 0 needs less than the gain that drafting must promise."""
    best = max(found[min_k : max_k + 1])
    if min_k == 0 and chosen == 0:
        assert best <= found[0] * GAIN * (1 + rel)
    else:
        assert min_k <= chosen <= max_k and found[chosen] >= best * (1 - rel)
        assert min_k or found[chosen] >= found[0] * GAIN * (1 - rel)


profiles = st.lists(st.floats(0.1, 100), min_size=1, max_size=8).map(lambda times: tuple(sorted(times)))
links = st.tuples(st.sampled_from([0.0, 0.0, 5.0, 300.0]), st.booleans())


@law(300)
@given(
    st.floats(0.01, 100), profiles, st.integers(1, 9), st.floats(0, 1), st.sampled_from([0, 1]), st.integers(1, 32),
    links,
)  # fmt: skip
def test_the_k_is_the_best_by_brute_force(draft_ms, forward_ms, max_rows, alpha, min_k, max_k, link):
    wire_ms, streams = link
    costs = CostModel(draft_ms, forward_ms, max_rows, wire_ms=wire_ms, streams=streams)
    policy = AutoK(costs, min_k=min_k, max_k=max_k, alpha=alpha)
    assert policy.alpha == pytest.approx(alpha)
    found = speeds(policy.alpha, draft_ms, forward_ms, max_rows, wire_ms, streams=streams)
    assert_best(policy.next_k(), found, min_k, min(max_k, MAX_AUTO_K))


@law(100)
@given(profiles, st.integers(1, 9), st.floats(0, 1), st.floats(1, 10))
def test_a_drafter_as_slow_as_the_target_never_drafts(forward_ms, max_rows, alpha, slower):
    """k drafts cost k target steps and more, and give at most k + 1 tokens for k + 1 steps."""
    assert AutoK(CostModel(forward_ms[0] * slower, forward_ms, max_rows), alpha=alpha).next_k() == 0


def test_what_never_agrees_is_never_drafted_and_free_drafts_of_a_twin_always():
    flat, steep = (10.0,) * 8, tuple(10.0 * n for n in range(1, 9))
    assert AutoK(CostModel(0.1, flat, 8), alpha=0.0).next_k() == 0
    assert AutoK(CostModel(0.001, flat, 9), alpha=1.0).next_k() >= 7
    assert AutoK(CostModel(1.0, steep, 8), alpha=0.9).next_k() == 0
    assert AutoK(CostModel(1e6, flat, 8), min_k=1, alpha=0.0).next_k() == 1


@law(50)
@given(st.floats(0.05, 1), st.integers(1, 8), st.integers(0, 1000))
def test_alpha_learns_the_acceptance_whatever_k_hides(true_alpha, k, seed):
    """Drafts after the first difference were never judged, and must not count as refused."""
    policy, rng = AutoK(CostModel(1.0, (10.0,), 8)), np.random.default_rng(seed)
    for _ in range(1500):
        accepted = int(np.argmin(np.append(rng.random(k) < true_alpha, False)))
        policy.observe(record(k, accepted, draft_ms=1.0 * k))
    assert policy.alpha == pytest.approx(true_alpha, abs=0.06)


def test_k_falls_with_bad_luck_and_rises_with_good():
    def policy_after(num_accepted):
        policy = AutoK(CostModel(1.0, (10.0,) * 9, 9))
        for _ in range(60):
            policy.observe(record(8, num_accepted, draft_ms=8.0))
        return policy.next_k()

    assert policy_after(0) == 0
    assert 0 < policy_after(2) < policy_after(8) == MAX_AUTO_K


@law(150)
@given(
    st.floats(0.2, 20), st.floats(0.2, 20), profiles, st.integers(1, 9), st.floats(0.3, 4), st.integers(1, 8),
    st.data(), st.tuples(st.floats(0, 300), st.booleans(), st.floats(0, 300)),
)  # fmt: skip
def test_costs_follow_what_rounds_took(believed_ms, draft_ms, forward_ms, max_rows, slowdown, k, data, link):
    """After rounds of a draft model, a target and a link other than was thought, the k is the best for these."""
    num_accepted = data.draw(st.integers(0, k))
    believed_wire_ms, streams, wire_ms = link
    policy = AutoK(CostModel(believed_ms, forward_ms, max_rows, wire_ms=believed_wire_ms, streams=streams))
    slowed = tuple(slowdown * ms for ms in forward_ms)
    # One pass of as many rows as it takes, so that what a round took says what rows take.
    num_rows = min(k + 1, len(forward_ms))
    target = Cost(1, num_rows, forward_ms=slowed[num_rows - 1])
    for _ in range(120):
        rtt_ms = target.forward_ms + wire_ms
        policy.observe(record(k, num_accepted, draft_ms=k * draft_ms, target=target, rtt_ms=rtt_ms))
    found = speeds(policy.alpha, draft_ms, slowed, max_rows, wire_ms, streams=streams)
    assert_best(policy.next_k(), found, rel=1e-6)


# Policies that differ in their draft step, so that some of them choose another k as soon as any cost moves a little.
STEPS_MS = np.linspace(0.4, 9.0, 200).tolist()
FORWARD_MS = (10.0, 10.5, 11.0, 11.5)


def choices_after(*rounds, min_k=0):
    """(k, acceptance) of each policy after 20 times these rounds, given as functions of its draft step."""
    policies = [AutoK(CostModel(step_ms, FORWARD_MS, 4, wire_ms=5.0), min_k=min_k) for step_ms in STEPS_MS]
    for policy, step_ms in zip(policies, STEPS_MS, strict=True):
        for done in rounds * 20:
            policy.observe(done(step_ms))
    return [(policy.next_k(), policy.alpha) for policy in policies]


def as_expected(step_ms, *, num_accepted=3, slower=1.0, forward_ms=11.5, wire_ms=5.0, **more):
    """A round that took, and gave, just what was thought; or not quite."""
    target = Cost(1, 4, forward_ms=forward_ms, prefill_ms=more.pop("prefill_ms", 0.0))
    rtt_ms = forward_ms + wire_ms
    return record(4, num_accepted, draft_ms=4 * step_ms * slower, target=target, rtt_ms=rtt_ms, **more)


UNTOLD = {
    "prefill of both": {"number": 0, "slower": 3.0, "forward_ms": 900.0, "num_accepted": 0},
    "skipped": {"outcome": "skipped", "slower": 2.0, "forward_ms": 0.0, "num_accepted": 0},
    "fallback": {"outcome": "fallback", "slower": 2.0, "forward_ms": 0.0, "wire_ms": 900.0, "num_accepted": 0},
    "prefill of the target after skips": {"forward_ms": 1991.5, "prefill_ms": 1980.0},
    "what was expected": {},
}


@pytest.mark.parametrize("min_k", [0, 1])
@pytest.mark.parametrize("untold", UNTOLD)
def test_prefill_skips_and_fallbacks_teach_nothing(untold, min_k):
    before = [k for k, _ in choices_after(min_k=min_k)]
    after = choices_after(lambda step_ms: as_expected(step_ms, **UNTOLD[untold]), min_k=min_k)
    assert [k for k, _ in after] == before
    assert {alpha for _, alpha in after} == {PRIOR_ALPHA}


@pytest.mark.parametrize("min_k", [0, 1])
@pytest.mark.parametrize(
    "told",
    [{"num_accepted": 2}, {"slower": 1.2}, {"forward_ms": 15.0}, {"wire_ms": 9.0}, {"forward_ms": 15.0, "number": 9}],
    ids=str,
)
def test_the_same_rounds_teach_something_where_one_thing_is_not_as_it_was_thought(told, min_k):
    """So that the test above can fail."""
    before = [k for k, _ in choices_after(min_k=min_k)]
    assert [k for k, _ in choices_after(lambda step_ms: as_expected(step_ms, **told), min_k=min_k)] != before
