"""What doctor says of a pair and a link."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from bench.emulated_link import EmulatedLink, LinkShape
from skydraft.config import DEFAULT_K, DecodingParams
from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.plan import make_plan
from skydraft.engines.toy import open_toy
from skydraft.evaluation.diagnosis import NUM_PINGS, PROMPTS, costs_now, drafts_after, examine_link, ping_times
from skydraft.types import Cost, StepRecord

from ..serving import serving
from ..toys import law

times = st.floats(0.5, 100)
profiles = st.lists(times, min_size=1, max_size=9).map(lambda times: tuple(sorted(times)))


def waits(after: int | None) -> float:
    return math.inf if after is None else after


@law(50)
@given(times, profiles, st.integers(1, 9), st.floats(0, 300), st.booleans(), st.floats(1, 10))
def test_dearer_drafts_and_links_make_lossless_wait_for_a_longer_run(
    draft_ms: float, forward_ms: tuple[float, ...], max_rows: int, wire_ms: float, streams: bool, times_as_dear: float
) -> None:
    costs = CostModel(draft_ms, forward_ms, max_rows, wire_ms=wire_ms, streams=streams)
    after = waits(drafts_after(costs))
    assert after <= waits(drafts_after(replace(costs, draft_ms=times_as_dear * draft_ms)))
    if streams:  # else the target alone waits for the link, too
        assert after <= waits(drafts_after(replace(costs, wire_ms=times_as_dear * wire_ms)))


def test_a_link_to_a_toy_is_examined() -> None:
    edge, toy = open_toy("toy:drift=0.2"), open_toy("toy")
    with serving(open_toy("toy")) as server, EmulatedLink(("127.0.0.1", server.port), LinkShape(delay_ms=4)) as link:
        cloud = skydraft.connect(link.address, require=True)
        info = cloud.info()
        median_ms, late_ms = ping_times(cloud)
        found = examine_link(edge, cloud, info, median_ms)
        cloud.close()
    assert 8 <= median_ms <= late_ms and NUM_PINGS >= 20
    params, plan = DecodingParams(max_new_tokens=32), make_plan("lossless")
    near = [skydraft.generate(prompt, edge=edge, cloud=toy, plan=plan, params=params).run() for prompt in PROMPTS]
    records = [record for generation in near for record in generation.records]
    judged = sum(min(record.num_accepted + 1, record.num_draft) for record in records)
    assert found.alpha == pytest.approx(sum(record.num_accepted for record in records) / judged)
    assert 0.3 < found.alpha < 1
    assert (found.k, found.num_rounds) == (DEFAULT_K, len(records))
    assert found.num_tokens == sum(len(generation.token_ids) for generation in near)
    assert found.tokens_per_round == found.num_tokens / len(records)
    assert found.wire_ms >= 8  # a round trip, at least
    assert 1 < found.bytes_per_token < 100
    stored = CostModel(
        edge.profile.forward_ms[0], toy.profile.forward_ms, info.max_rows, wire_ms=median_ms, streams=True
    )
    assert replace(found.costs, draft_ms=stored.draft_ms, slowdown=1.0) == stored
    assert found.gain < 1  # toys take no time, so a round trip is never worth it


@pytest.mark.parametrize("times_as_slow", [0.5, 1.0, 3.0])
def test_stored_times_of_another_hour_are_replaced_by_those_of_the_texts(times_as_slow: float) -> None:
    stored = CostModel(20.0, (50.0, 60.0, 70.0), 3, wire_ms=5.0)

    def of_round(num_draft: int, prefill_ms: float = 0.0) -> StepRecord:
        steps_ms, rows_ms = 20.0 * num_draft, stored.forward_ms[num_draft]
        return StepRecord(
            0, 0, num_draft, 0, 1, "verified", "always", 0.0, 0.0,
            draft=Cost(num_draft, num_draft, forward_ms=times_as_slow * steps_ms + prefill_ms, prefill_ms=prefill_ms),
            target=Cost(1, num_draft + 1, forward_ms=times_as_slow * rows_ms + prefill_ms, prefill_ms=prefill_ms),
        )  # fmt: skip

    found = costs_now([of_round(2, 400.0), of_round(1), of_round(2)], stored)
    assert found == replace(stored, draft_ms=pytest.approx(20 * times_as_slow), slowdown=pytest.approx(times_as_slow))
    assert costs_now([], stored) == stored


def test_a_server_that_takes_shorter_blocks_is_asked_for_those() -> None:
    edge = open_toy("toy:drift=0.2")
    with serving(open_toy("toy"), max_block=2) as server:
        cloud = skydraft.connect(server.address, require=True)
        found = examine_link(edge, cloud, cloud.info(), 1.0)
        cloud.close()
    assert found.k == 2 and 1 < found.tokens_per_round <= 3
