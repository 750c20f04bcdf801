"""AutoK picks the block length that a simulation of its own model of costs would pick, and follows what it sees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from skydraft.decoding.adaptive import MAX_AUTO_K, AutoK, FixedK, expected_tokens
from skydraft.engines.base import RowProfile
from skydraft.types import StepRecord, VerifyCost

from .toys import law

GAIN = 1.05  # stated in the module: what drafting must promise over plain decoding


def record(num_draft, num_accepted, *, number=1, draft_ms=0.0, cost=None, outcome="verified"):
    cost = cost or VerifyCost()
    return StepRecord(
        number, 10, num_draft, num_accepted, num_accepted + 1, outcome, "always", draft_ms, 1.0, 1.0, cost
    )


def speed(alpha, k, draft_ms, forward_ms, max_rows, wire_ms=0.0):
    """Tokens per ms, summed over every number of accepted drafts."""
    tokens = spent = 0.0
    for accepted in range(k + 1):
        chance = alpha**accepted * ((1 - alpha) if accepted < k else 1)
        passes = accepted // max_rows + 1  # the pass that holds the row of the first difference is the last
        rows = [min(max_rows, k + 1 - start * max_rows) for start in range(passes)]
        cost = sum(
            forward_ms[num - 1] if num <= len(forward_ms) else num * forward_ms[-1] / len(forward_ms) for num in rows
        )
        tokens += chance * (accepted + 1)
        spent += chance * (k * draft_ms + wire_ms + cost)
    return tokens / spent


profiles = st.lists(st.floats(0.1, 100), min_size=1, max_size=8).map(lambda times: RowProfile(8, tuple(sorted(times))))


@law(300)
@given(st.floats(0.01, 100), profiles, st.integers(1, 9), st.floats(0, 1), st.sampled_from([0, 1]))
def test_the_k_is_the_best_by_brute_force(draft_ms, target, max_rows, alpha, min_k):
    policy = AutoK(RowProfile(1, (draft_ms,)), target, max_rows, min_k=min_k, alpha=alpha)
    speeds = [speed(alpha, k, draft_ms, target.forward_ms, max_rows) for k in range(MAX_AUTO_K + 1)]
    assert [policy.tokens_per_ms(k) for k in range(MAX_AUTO_K + 1)] == pytest.approx(speeds)
    best = max(speeds[min_k:])
    chosen = policy.next_k()
    if min_k == 0 and chosen == 0:
        assert best <= speeds[0] * GAIN * (1 + 1e-9)
    else:
        assert chosen >= min_k and speeds[chosen] == pytest.approx(best)
        assert min_k or speeds[chosen] >= speeds[0] * GAIN * (1 - 1e-9)


@law(100)
@given(profiles, st.integers(1, 9), st.floats(0, 1), st.floats(1, 10))
def test_a_drafter_as_slow_as_the_target_never_drafts(target, max_rows, alpha, slower):
    """k drafts cost k target steps and more, and give at most k + 1 tokens for k + 1 steps."""
    draft_ms = target.forward_ms[0] * slower
    assert AutoK(RowProfile(1, (draft_ms,)), target, max_rows, alpha=alpha).next_k() == 0


def test_what_never_agrees_is_never_drafted_and_free_drafts_of_a_twin_always():
    flat = RowProfile(8, (10.0,) * 8)
    steep = RowProfile(8, tuple(10.0 * n for n in range(1, 9)))
    assert AutoK(RowProfile(1, (0.1,)), flat, 8, alpha=0.0).next_k() == 0
    assert AutoK(RowProfile(1, (0.001,)), flat, 9, alpha=1.0).next_k() >= 7
    assert AutoK(RowProfile(1, (1.0,)), steep, 8, alpha=0.9).next_k() == 0
    assert AutoK(RowProfile(1, (1e6,)), flat, 8, min_k=1, alpha=0.0).next_k() == 1


@law(50)
@given(st.floats(0.05, 1), st.integers(1, 8), st.integers(0, 1000))
def test_alpha_learns_the_acceptance_whatever_k_hides(true_alpha, k, seed):
    """Drafts after the first difference were never judged, and must not count as refused."""
    policy, rng = AutoK(RowProfile(1, (1.0,)), RowProfile(8, (10.0,)), 8), np.random.default_rng(seed)
    for _ in range(1500):
        accepted = int(np.argmin(np.append(rng.random(k) < true_alpha, False)))
        policy.observe(record(k, accepted, draft_ms=1.0 * k))
    assert policy.alpha == pytest.approx(true_alpha, abs=0.06)


def test_k_falls_with_bad_luck_and_rises_with_good():
    def policy_after(num_accepted):
        policy = AutoK(RowProfile(1, (1.0,)), RowProfile(9, (10.0,) * 9), 9)
        for _ in range(60):
            policy.observe(record(8, num_accepted, draft_ms=8.0))
        return policy.next_k()

    assert policy_after(0) == 0
    assert 0 < policy_after(2) < policy_after(8) == MAX_AUTO_K


def test_costs_follow_what_rounds_took():
    policy = AutoK(RowProfile(1, (1.0,)), RowProfile(4, (10.0, 11.0, 12.0, 13.0)), 4)
    before = [policy.tokens_per_ms(k) for k in (0, 3)]
    for _ in range(80):
        policy.observe(record(3, 3, draft_ms=6.0, cost=VerifyCost(1, 4, forward_ms=26.0, rtt_ms=126.0)))
    alpha = policy.alpha
    # draft steps of 2 ms, passes twice as long as in the profile, a wire of 100 ms
    assert policy.tokens_per_ms(3) == pytest.approx(speed(alpha, 3, 2.0, (20, 22, 24, 26), 4, 100.0), rel=1e-3)
    assert policy.tokens_per_ms(0) == pytest.approx(1 / 120, rel=1e-3)
    assert policy.tokens_per_ms(0) < before[0]


@pytest.mark.parametrize(
    "untold",
    [
        record(4, 0, number=0, draft_ms=900.0, cost=VerifyCost(1, 5, 900.0)),
        record(4, 0, outcome="skipped", draft_ms=1.0),
    ],
)
def test_prefill_and_skips_teach_nothing(untold):
    policy = AutoK(RowProfile(1, (1.0,)), RowProfile(4, (10.0,) * 4), 4)
    before = (policy.alpha, [policy.tokens_per_ms(k) for k in range(9)])
    for _ in range(20):
        policy.observe(untold)
    assert (policy.alpha, [policy.tokens_per_ms(k) for k in range(9)]) == before


def test_the_prefill_of_the_target_after_skips_teaches_nothing():
    policy = AutoK(RowProfile(1, (1.0,)), RowProfile(4, (10.0,) * 4), 4, min_k=1)
    policy.observe(record(4, 0, number=0, outcome="skipped"))
    before = policy.tokens_per_ms(0)
    policy.observe(record(4, 2, number=1, draft_ms=4.0, cost=VerifyCost(2, 9, forward_ms=2000.0, prefill_ms=1980.0)))
    assert policy.tokens_per_ms(0) == pytest.approx(before, rel=0.2)


@law(100)
@given(st.floats(0, 1), st.integers(0, 20))
def test_expected_tokens(alpha, k):
    assume(alpha < 1 - 1e-6 or alpha == 1)
    assert expected_tokens(alpha, k) == pytest.approx(sum(alpha**n for n in range(k + 1)), rel=1e-6)


def test_a_fixed_k_learns_nothing():
    policy = FixedK(3)
    policy.observe(record(3, 0))
    assert policy.next_k() == 3
