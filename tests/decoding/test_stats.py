"""Figures of a generation, from records written out by hand."""

from dataclasses import asdict, replace

import pytest

from skydraft.decoding.accounts.prices import Prices
from skydraft.decoding.accounts.stats import stats_of
from skydraft.types import Cost, LinkCost, StepRecord


def record(number, base, drafted, accepted, committed, outcome, ended_ms, *, audited=0, agreed=0, **spent):
    reason = "" if outcome == "skipped" else "uncertain"
    return StepRecord(
        number, base, drafted, accepted, committed, outcome, reason, 100.0, ended_ms,
        num_audited=audited, num_agreed=agreed, **spent,
    )  # fmt: skip


ROUNDS = [
    record(0, 0, 4, 0, 4, "skipped", 30.0, draft=Cost(3, 9, 25.0, 20.0, 5.0, num_cached=256)),
    record(
        1, 4, 4, 3, 4, "verified", 130.0, audited=4, agreed=3,
        draft=Cost(4, 4, 4.0), target=Cost(2, 9, 60.0, 40.0, 10.0, 1.5, 128), link=LinkCost(70.0, 300, 40, 96),
    ),
    record(
        2, 8, 4, 4, 5, "verified", 180.0,
        draft=Cost(4, 5, 4.0), target=Cost(1, 5, 10.0), link=LinkCost(20.0, 50, 20),
    ),
    record(3, 13, 4, 0, 4, "fallback", 190.0, draft=Cost(4, 5, 4.0), link=LinkCost(0.0, 50)),
    record(4, 17, 2, 2, 2, "verified", 200.0, audited=4, agreed=2, target=Cost(1, 7, 8.0), link=LinkCost(9.0, 60, 20)),
]  # fmt: skip


def test_figures_are_those_of_the_records():
    expected = {
        "num_tokens": 19, "num_rounds": 5, "num_escalated": 3, "num_fallback_tokens": 4,
        "num_draft_tokens": 10, "num_accepted_tokens": 9, "acceptance_rate": 0.9,  # of escalated blocks alone
        "mean_acceptance_length": round(11 / 3, 4), "cloud_calls_per_token": round(3 / 19, 4),
        "target_written_per_token": round(2 / 19, 4), "target_passes_per_token": round(4 / 19, 4),
        "target_rows_per_token": round(21 / 19, 4), "ttft_ms": 30.0, "tokens_per_s": 95.0,
        # gaps of 25 four times, 10 five times, 2.5 four times, 5 twice
        "itl_ms_p50": 10.0, "itl_ms_p95": 25.0,
        "draft_ms": 37.0, "target_ms": 78.0, "overhead_ms": 500.0 - 37.0 - 99.0,
        "bytes_up": 460, "bytes_down": 80, "shared_bytes": 96, "audited_agreement": 5 / 8,
        "draft_prefill_ms": 20.0, "target_prefill_ms": 40.0,
        "cached_tokens": {"edge": 256, "cloud": 128},
    }  # fmt: skip
    assert expected.items() <= asdict(stats_of(ROUNDS)).items()


def test_where_there_is_nothing_to_divide_by_there_is_no_rate():
    nothing, alone = stats_of([]), stats_of(ROUNDS[:1])
    rates = ("acceptance_rate", "mean_acceptance_length", "audited_agreement")
    assert [getattr(alone, name) for name in rates] == [None] * 3
    assert (alone.cloud_calls_per_token, alone.itl_ms_p50, alone.num_escalated) == (0, None, 0)
    values = asdict(nothing)
    assert values.pop("cached_tokens") == {"edge": 0, "cloud": 0} and values.pop("exact")
    assert {value for value in values.values() if value is not None} == {0}
    assert nothing.ttft_ms is nothing.tokens_per_s is nothing.cloud_calls_per_token is None


def test_a_price_is_that_of_the_tokens():
    link = LinkCost(num_requests=2, tokens_in=3000, tokens_hit=1000, tokens_out=500)
    records = [replace(ROUNDS[0], link=link)]
    found = stats_of(records, is_exact=False, prices=Prices(1.0, 10.0, 100.0))
    assert found.cost == pytest.approx((1000 * 1 + 2000 * 10 + 500 * 100) / 1e6)
    assert not found.exact and stats_of(records).cost is None
