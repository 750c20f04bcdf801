"""What is slow, far, busy, limited or broken for a moment is not gone, and nothing is left behind."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import trustme

import skydraft
from bench.emulated_link import EmulatedLink, LinkShape
from skydraft import DecodingParams, Generation, make_plan
from skydraft.engines.options import RowProfile
from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.errors import CloudLost

from .. import toys
from ..serving import serving

PARAMS = DecodingParams(max_new_tokens=40, min_new_tokens=40, temperature=0.8, seed=5)
GATED = make_plan(gate="entropy:0.3", k=4)


def run(cloud: Any, plan: Any, params: DecodingParams = PARAMS) -> Generation:
    return skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, plan=plan, params=params).run()


def expected(plan: Any, params: DecodingParams = PARAMS) -> tuple[int, ...]:
    return run(open_toy("toy"), plan, params).token_ids


@pytest.mark.parametrize("rtt_ms", [100, 160])
@pytest.mark.parametrize("plan", [make_plan(k=8), make_plan("cloud"), GATED], ids=["lossless", "cloud", "gated"])
def test_a_far_cloud_behind_tls_is_not_gone(tmp_path: Path, plan: Any, rtt_ms: int, unhurried: None) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    lines: list[str] = []
    short = DecodingParams(max_new_tokens=12, min_new_tokens=12)
    far = LinkShape(delay_ms=rtt_ms / 2)
    with (
        serving(open_toy("toy"), tls_cert=cert, tls_key=key) as server,
        EmulatedLink(("127.0.0.1", server.port), far) as link,
    ):
        cloud = skydraft.connect(link.address, tls_ca=authority.cert_pem.bytes(), notify=lines.append)
        generation = run(cloud, plan, short)
        assert "edge-fallback" not in generation.origins
        assert generation.token_ids == expected(plan, short)
        assert lines == []
        cloud.close()


@pytest.mark.parametrize("plan", [make_plan(k=4), make_plan("cloud"), GATED], ids=["lossless", "cloud", "gated"])
def test_a_token_that_is_slowed_down_waits_and_gets_the_same(plan: Any, unhurried: None) -> None:
    lines: list[str] = []
    with serving(open_toy("toy"), rows_per_s=45.0) as server:
        cloud = skydraft.connect(server.address, notify=lines.append)
        began = time.monotonic()
        texts = [run(cloud, plan).token_ids for _ in range(4)]
        assert texts == [expected(plan)] * 4
        assert time.monotonic() - began > 0.5  # some 160 rows, of which 90 are free
        assert lines == []
        cloud.close()


def test_an_adaptive_k_with_a_gate_does_not_need_the_cloud_to_begin() -> None:
    lines: list[str] = []
    cloud = skydraft.connect("127.0.0.1:9", timeout_s=0.5, notify=lines.append)
    generation = run(cloud, make_plan(gate="entropy:0.3", k="auto"))
    assert len(generation.token_ids) == 40 and len(lines) == 1
    with pytest.raises(CloudLost):
        run(cloud, make_plan(k="auto"))
    cloud.close()


def test_an_adaptive_k_keeps_to_the_servers_block() -> None:
    class Slow(ToyEngine):
        profile = RowProfile(64, (50.0,) * 8)

    with serving(toys.toy(4, kind=Slow), max_block=3) as server:
        cloud = skydraft.connect(server.address)
        plan = make_plan(k="auto")
        generation = skydraft.generate(toys.PROMPT, edge=toys.toy(4), cloud=cloud, plan=plan, params=PARAMS, raw=True)
        generation.run()
        assert max(record.num_draft for record in generation.records) == 3
        cloud.close()


@pytest.mark.parametrize("token", ["with a space", "line\n", "", "ü"])
def test_a_token_that_cannot_be_sent_is_refused_at_once(token: str) -> None:
    with pytest.raises(skydraft.errors.OptionError, match="token"):
        skydraft.connect("localhost:1", token=token)
