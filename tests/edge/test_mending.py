"""What is slow, far, busy, limited or broken for a moment is not gone, and nothing is left behind."""

import time
from pathlib import Path
from typing import Any

import trustme

import skydraft
from bench.emulated_link import EmulatedLink, LinkShape
from skydraft import DecodingParams
from skydraft.engines.toy import open_toy

from ..serving import serving
from .texts import begin, by_plan, undisturbed


@by_plan
def test_a_far_cloud_behind_tls_is_not_gone(tmp_path: Path, plan: Any, unhurried: None) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    lines: list[str] = []
    short = DecodingParams(max_new_tokens=12, min_new_tokens=12)
    far = LinkShape(delay_ms=80)
    with (
        serving(open_toy("toy"), tls_cert=cert, tls_key=key) as server,
        EmulatedLink(("127.0.0.1", server.port), far) as link,
    ):
        cloud = skydraft.connect(link.address, tls_ca=authority.cert_pem.bytes(), notify=lines.append)
        generation = begin(cloud, plan, short).run()
        assert "edge-fallback" not in generation.origins
        assert generation.token_ids == undisturbed(plan, short)
        assert lines == []
        cloud.close()


@by_plan
def test_a_token_that_is_slowed_down_waits_and_gets_the_same(plan: Any, unhurried: None) -> None:
    lines: list[str] = []
    with serving(open_toy("toy"), rows_per_s=45.0) as server:
        cloud = skydraft.connect(server.address, notify=lines.append)
        began = time.monotonic()
        texts = [begin(cloud, plan).run().token_ids for _ in range(2)]
        assert texts == [undisturbed(plan)] * 2
        assert time.monotonic() - began > 0.5  # some 160 rows, of which 90 are free
        assert lines == []
        cloud.close()
