"""A server without skydraft gives what its model gives in this process, whatever the gate, the draft and the seed."""

import time
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.engines.toy import open_toy

from .. import toys
from ..decoding.test_laws import decode as decoded
from ..edge.test_remote import gates
from ..toys import PROMPT, law
from .conftest import SEED
from .fakes import GENERATING, IDS, fake
from .faults import cut

plans = st.builds(
    lambda gate, k, back: make_plan(gate=gate, k=k, hand_back=back),
    gates, st.integers(1, 12), st.sampled_from(["0", "1", "4", "text"]),
)  # fmt: skip


decode = partial(decoded, execution="throughput")


@law(100)
@given(st.sampled_from(IDS), st.sampled_from(toys.DRAFTERS), st.integers(1, 24), plans)
def test_a_stock_server_is_local(clouds: dict[str, Any], dialect: str, drafter: Any, length: int, plan: Any) -> None:
    """At temperature 0; above it the server draws: tests/stock/test_drawing.py."""
    edge, params = toys.toy(SEED, drafter[0], sign=drafter[1]), DecodingParams(max_new_tokens=length)
    far = decode(plan, params, edge, clouds[dialect])
    near = decode(plan, params, edge, toys.toy(SEED))
    assert far.token_ids == near.token_ids
    assert (far.origins, far.finish_reason, far.text) == (near.origins, near.finish_reason, near.text)
    said = [[(r.base, r.num_draft, r.num_accepted, r.outcome) for r in each.records] for each in (far, near)]
    assert said[0] == said[1]


@pytest.mark.parametrize("dialect", IDS)
@pytest.mark.parametrize("drift", [0.0, 0.1, 0.7])
def test_lossless_asks_a_stock_server_what_cloud_asks(clouds: dict[str, Any], dialect: str, drift: float) -> None:
    params, edge = DecodingParams(max_new_tokens=40), toys.toy(SEED, drift)
    done = decoded(make_plan("lossless"), params, edge, clouds[dialect])
    alone = decoded(make_plan("cloud"), params, edge, clouds[dialect])
    assert done.token_ids == alone.token_ids and set(done.origins) == {"cloud"}
    assert done.stats.num_requests == alone.stats.num_requests and not any(each.num_draft for each in done.records)


def test_lossless_at_a_stock_server_goes_on_alone_and_then_streams_again() -> None:
    params, edge = DecodingParams(max_new_tokens=120, min_new_tokens=120), toys.toy(SEED, 0.1)
    with fake("vllm", engine=toys.toy(SEED)) as server, closing(skydraft.connect(server.url, timeout_s=5)) as cloud:
        server.faults.append(cut(20))
        server.fault_of = lambda path: cut(0) if path in GENERATING else None
        done = skydraft.generate(PROMPT, edge=edge, cloud=cloud, plan=make_plan("lossless"), params=params, raw=True)
        for _ in done.rounds():
            if done.origins[-1] == "edge-fallback":
                server.fault_of = lambda path: None
                time.sleep(0.1)  # it is tried again after a while
    alone = done.origins.index("edge-fallback")
    assert len(done.token_ids) == 120 and 0 < alone <= 20 and set(done.origins[:alone]) == {"cloud"}
    assert done.origins[-1] == "cloud" and done.origins.count("cloud") > 40


def test_a_gated_text_that_outgrew_the_servers_context_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is first asked when skipped tokens are beyond its context."""
    monkeypatch.setattr(
        "skydraft.gating.gates.Gate.reason",
        lambda gate, generated, num_seen, block, vocab, place: "uncertain" if len(generated) > 70 else "",
    )
    with fake("vllm", engine=open_toy("toy", 64, 8)) as server, closing(skydraft.connect(server.url)) as cloud:
        plan, params = make_plan(gate="entropy:2", k=6, hand_back="0"), DecodingParams(max_new_tokens=120)
        done = skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, plan=plan, params=params).run()
    assert (done.finish_reason, len(done.token_ids)) == ("length", 120)
    assert set(done.origins[78:]) == {"edge-fallback"}


def test_a_text_ends_where_the_servers_context_does() -> None:
    with fake("vllm", engine=open_toy("toy", 64, 8)) as server, closing(skydraft.connect(server.url)) as cloud:
        params = DecodingParams(max_new_tokens=120)
        plan = make_plan("cloud")
        done = skydraft.generate("语速", edge=open_toy("toy"), cloud=cloud, plan=plan, params=params).run()
    assert (done.finish_reason, len(done.token_ids)) == ("length", 64 - done.num_prompt_tokens)
