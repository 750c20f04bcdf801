"""What doctor says of a pair and a link: by the published formulae, and as the adaptive k and the report have it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from bench.emulated_link import EmulatedLink, LinkShape
from skydraft.config import DEFAULT_K, DecodingParams
from skydraft.decoding.block_length import MAX_AUTO_K, AutoK
from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.plan import make_plan
from skydraft.engines.toy import open_toy
from skydraft.evaluation.diagnosis import NUM_PINGS, PROMPTS, LinkReport, drafts_after, examine_link, ping_times

from .. import reference
from ..serving import serving
from ..toys import law


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's is read or changed."""
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path_factory.mktemp("home")))


alphas, times = st.floats(0.05, 0.99), st.floats(0.5, 100)
profiles = st.lists(times, min_size=1, max_size=9).map(lambda times: tuple(sorted(times)))
max_rows = st.integers(1, 9)


def tokens_per_s(costs: CostModel, alpha: float, k: int, wire_ms: float = 0.0) -> float:
    return reference.tokens_per_s(alpha, k, costs.draft_ms, costs.forward_ms, costs.max_rows, wire_ms)


def a_report(costs: CostModel, alpha: float) -> LinkReport:
    return LinkReport(k=5, alpha=alpha, num_tokens=30, num_rounds=10, bytes_per_token=9.0, wire_ms=1.0, costs=costs)


# --- by the formulae: E(k) = (1 - a^(k+1)) / (1 - a), rate = E / (k t_d + R + t_v(k+1))


@law(100)
@given(alphas, times, profiles, max_rows, st.floats(0, 300))
def test_the_link_is_weighed_against_streaming(
    alpha: float, draft_ms: float, forward_ms: tuple[float, ...], max_rows: int, wire_ms: float
) -> None:
    found = a_report(CostModel(draft_ms, forward_ms, max_rows, wire_ms=wire_ms, streams=True), alpha)
    speeds = [tokens_per_s(found.costs, alpha, k, wire_ms) for k in range(1, MAX_AUTO_K + 1)]
    assert speeds[found.best_k - 1] == pytest.approx(max(speeds))
    assert found.gain == pytest.approx(max(speeds) / (1e3 / forward_ms[0]))
    even_ms = found.break_even_ms
    if abs(wire_ms - even_ms) > 1e-6 * (1 + abs(even_ms)):
        assert (found.gain > 1) == (wire_ms < even_ms)
    if even_ms > 0:  # there a round takes as long per token as streaming does
        assert tokens_per_s(found.costs, alpha, found.best_k, even_ms) == pytest.approx(1e3 / forward_ms[0])


# --- one model of costs: the adaptive k and doctor


GAIN = 1.05  # what drafting must promise before the adaptive k drafts at all


@law(50)
@given(alphas, times, profiles, max_rows)
def test_the_adaptive_k_drafts_where_the_formulae_promise_a_gain(
    alpha: float, draft_ms: float, forward_ms: tuple[float, ...], max_rows: int
) -> None:
    """If acceptance is the same after every run of agreements."""
    costs = CostModel(draft_ms, forward_ms, max_rows)
    gain = max(tokens_per_s(costs, alpha, k) for k in range(MAX_AUTO_K + 1)) / tokens_per_s(costs, alpha, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skydraft.decoding.block_length.PRIOR_BY_RUN", (alpha,) * 8)
        policy = AutoK(costs)
    if abs(gain - GAIN) > 1e-9:
        assert (policy.longest() > 0) == (gain > GAIN)


def waits(after: int | None) -> float:
    return math.inf if after is None else after


@law(50)
@given(times, profiles, max_rows, st.floats(0, 300), st.booleans(), st.floats(1, 10))
def test_dearer_drafts_and_links_make_lossless_wait_for_a_longer_run(
    draft_ms: float, forward_ms: tuple[float, ...], max_rows: int, wire_ms: float, streams: bool, times_as_dear: float
) -> None:
    costs = CostModel(draft_ms, forward_ms, max_rows, wire_ms=wire_ms, streams=streams)
    after = waits(drafts_after(costs))
    assert after <= waits(drafts_after(replace(costs, draft_ms=times_as_dear * draft_ms)))
    if streams:  # else the target alone waits for the link, too
        assert after <= waits(drafts_after(replace(costs, wire_ms=times_as_dear * wire_ms)))


def test_lossless_drafts_after_the_run_that_doctor_names() -> None:
    """A text whose first tokens the draft model reads along: the first block comes when the run is that long."""
    costs = CostModel(12.0, (40.0,) * 17, 17, wire_ms=60.0, streams=True)
    policy, drafted = AutoK(costs), []
    for _ in range(20):
        drafted.append(policy.longest() > 0)
        if not drafted[-1]:
            policy.read([True])
    after = drafts_after(costs)
    assert after is not None and drafted == [False] * after + [True] * (20 - after)


# --- measured over a link


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
    assert found.costs == CostModel(
        edge.profile.forward_ms[0], toy.profile.forward_ms, info.max_rows, wire_ms=median_ms, streams=True
    )
    assert found.gain < 1  # toys take no time, so a round trip is never worth it


def test_a_server_that_takes_shorter_blocks_is_asked_for_those() -> None:
    edge = open_toy("toy:drift=0.2")
    with serving(open_toy("toy"), max_block=2) as server:
        cloud = skydraft.connect(server.address, require=True)
        found = examine_link(edge, cloud, cloud.info(), 1.0)
        cloud.close()
    assert found.k == 2 and 1 < found.tokens_per_round <= 3
