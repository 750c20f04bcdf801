"""Remote equals local: whatever a generation does over a link, it does in one process, and the other way round."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.engines.row_costs import RowProfile
from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.types import LinkCost

from .. import reference, toys
from ..decoding.test_laws import decode
from ..decoding.test_laws import gates as some_gates
from ..serving import serving
from ..toys import PROMPT_IDS, law
from .conftest import SEEDS

gates = st.just("always") | some_gates


def assert_same(remote: Generation, local: Generation) -> None:
    """Round by round; the rows of what the target writes on only in all."""
    assert (remote.token_ids, remote.origins, remote.text) == (local.token_ids, local.origins, local.text)
    assert remote.finish_reason == local.finish_reason
    names = (
        "base", "outcome", "reason", "num_draft", "num_accepted", "num_committed", "num_forced", "num_audited",
        "num_agreed",
    )  # fmt: skip
    for far, near in zip(remote.rounds_so_far, local.rounds_so_far, strict=True):
        assert far.block == near.block and far.audit == near.audit
        for name in names:
            assert getattr(far.record, name) == getattr(near.record, name)
        assert far.record.draft.num_rows == near.record.draft.num_rows
        link, is_verified = far.record.link, far.record.outcome == "verified"
        assert (link.bytes_up > 0) == is_verified <= (link.bytes_down > 0)  # no stop is sent
        assert near.record.link == LinkCost() and link.shared_bytes == 0
    far_rows, near_rows = (sum(record.target.num_rows for record in done.records) for done in (remote, local))
    assert far_rows == near_rows


plans = st.builds(
    lambda gate, k, ends_early, hand_back: replace(
        make_plan(gate=gate, k=k, hand_back=hand_back), ends_early=ends_early and gate != "always"
    ),
    gates, st.integers(1, 12), st.booleans(), st.sampled_from(["0", "0", "1", "2", "7", "text"]),
)  # fmt: skip


@law(125)
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
    with serving(target) as server, closing(skydraft.connect(server.address)) as cloud:
        generation = decode(make_plan(k="auto"), params, edge, cloud)
        assert (generation.token_ids, generation.finish_reason) == reference.plain(toys.toy(4), PROMPT_IDS, params)
        assert generation.origins[0] == origin


def test_the_servers_context_ends_the_text_where_it_would_in_one_process() -> None:
    params = DecodingParams(max_new_tokens=100, min_new_tokens=100)
    with serving(open_toy("toy", context_len=40)) as server, closing(skydraft.connect(server.address)) as cloud:
        edge = open_toy("toy:drift=0.1")
        for plan in (make_plan(), make_plan("cloud"), make_plan(k=12)):
            remote = skydraft.generate("语速", edge=edge, cloud=cloud, plan=plan, params=params).run()
            assert remote.finish_reason == "length"
            assert remote.num_prompt_tokens + len(remote.token_ids) == 40
