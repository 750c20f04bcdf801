"""Addresses of servers without skydraft: what is one, and that a connection is as safe as its address says."""

from __future__ import annotations

import pytest

from skydraft.edge.stock.server import StockServer
from skydraft.errors import OptionError


@pytest.mark.parametrize("given", ["HTTPS://Host:8000/v1/", "https://Host:8000/v1", "Https://Host:8000"])
def test_an_encrypted_address_is_one_however_it_is_written(given: str) -> None:
    server = StockServer(given, key="secret")
    assert server.uses_tls and server.wire.base == "https://Host:8000/v1"


@pytest.mark.parametrize(
    "given",
    ["http://[::1", "http://h:99999/v1", "http://a:1,http://b:2", "http://a:1,b:2", "http://", "http://u:p@h/v1",
     "http://h/v1?x=1", "http://h/v1#x", "ftp://h"],
)  # fmt: skip
def test_what_is_no_address_is_refused_in_one_line(given: str) -> None:
    with pytest.raises(OptionError, match="not the address of a server") as refused:
        StockServer(given)
    assert "\n" not in refused.value.line


def test_a_key_crosses_the_network_only_encrypted_or_if_allowed() -> None:
    with pytest.raises(OptionError, match="unencrypted"):
        StockServer("http://gpu-box:8000", key="secret")
    assert StockServer("http://gpu-box:8000", key="secret", insecure=True).target == "http://gpu-box:8000"
    assert StockServer("http://127.0.0.1:8000", key="secret").target == "http://127.0.0.1:8000"
