"""Remote equals local: whatever a generation does over a link, it does in one process, and the other way round."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.engines.options import RowProfile
from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.types import LinkCost

from .. import reference, toys
from ..serving import serving
from ..toys import PROMPT, PROMPT_IDS, law
from .conftest import SEEDS

gates = st.one_of(
    st.just("always"), st.builds("entropy:{}".format, st.floats(0, 3.5)), st.builds("margin:{}".format, st.floats(0, 1))
)


def decode(plan: Any, params: DecodingParams, edge: Any, cloud: Any) -> Generation:
    with skydraft.generate(PROMPT, edge=edge, cloud=cloud, plan=plan, params=params, raw=True) as generation:
        return generation.run()


def assert_same(remote: Generation, local: Generation) -> None:
    assert remote.token_ids == local.token_ids
    assert remote.origins == local.origins
    assert (remote.finish_reason, remote.text) == (local.finish_reason, local.text)
    for far, near in zip(remote.records, local.records, strict=True):
        for name in ("base", "num_draft", "num_accepted", "reason", "num_audited", "num_agreed"):
            assert getattr(far, name) == getattr(near, name)
        for one, other in ((far.target, near.target), (far.draft, near.draft)):
            assert (one.num_passes, one.num_rows) == (other.num_passes, other.num_rows)
        is_verified = far.outcome == "verified"
        assert (far.link.bytes_up > 0) == (far.link.bytes_down > 0) == (far.link.rtt_ms > 0) == is_verified
        assert near.link == LinkCost() and far.link.shared_bytes == 0


plans = st.builds(
    lambda gate, k, eager, accept: make_plan(gate=gate, k=k, eager=eager and gate != "always", accept=accept),
    gates, st.integers(1, 12), st.booleans(), st.just("exact") | st.builds("top:{}".format, st.integers(1, 5)),
)  # fmt: skip


@law(250)
@given(st.sampled_from(SEEDS), st.sampled_from(toys.DRAFTERS), toys.params(), plans)
def test_remote_is_local(
    clouds: dict[int, Any], seed: int, drafter: tuple[float, int], params: DecodingParams, plan: Any
) -> None:
    edge = toys.toy(seed, drafter[0], sign=drafter[1])
    assert_same(decode(plan, params, edge, clouds[seed]), decode(plan, params, edge, toys.toy(seed)))


@pytest.mark.parametrize(
    ("draft_ms", "target_ms", "origin"),
    [pytest.param(1000.0, 1.0, "cloud", id="streams"), pytest.param(0.01, 50.0, "accepted", id="drafts")],
)
def test_an_adaptive_k_over_a_link_is_lossless_and_streams_where_drafting_does_not_pay(
    draft_ms: float, target_ms: float, origin: str
) -> None:
    class Drafter(ToyEngine):
        profile = RowProfile(1, (draft_ms,))

    class Target(ToyEngine):
        profile = RowProfile(64, (target_ms,) * 8)

    params = DecodingParams(max_new_tokens=40, min_new_tokens=40)
    edge, target = toys.toy(4, kind=Drafter), toys.toy(4, kind=Target)
    with serving(target) as server:
        cloud = skydraft.connect(server.address)
        generation = decode(make_plan(k="auto"), params, edge, cloud)
        assert (generation.token_ids, generation.finish_reason) == reference.plain(toys.toy(4), PROMPT_IDS, params)
        assert generation.origins[0] == origin
        cloud.close()


def test_the_servers_context_ends_the_text_where_it_would_in_one_process() -> None:
    params = DecodingParams(max_new_tokens=100, min_new_tokens=100)
    with serving(open_toy("toy", context_len=40)) as server:
        cloud = skydraft.connect(server.address)
        edge = open_toy("toy:drift=0.1")
        for plan in (make_plan(), make_plan("cloud"), make_plan(k=12)):
            remote = skydraft.generate("语速", edge=edge, cloud=cloud, plan=plan, params=params).run()
            assert remote.finish_reason == "length"
            assert remote.num_prompt_tokens + len(remote.token_ids) == 40
        cloud.close()


def test_a_sure_run_never_touches_the_cloud() -> None:
    edge = toys.toy(4)
    nobody = skydraft.connect("127.0.0.1:9", fallback="start")  # the discard port: nobody listens
    generation = decode(make_plan(gate="entropy:100"), DecodingParams(max_new_tokens=3), edge, nobody)
    assert set(generation.origins) == {"skipped"}
    assert generation.stats.bytes_up == 0
    nobody.close()
