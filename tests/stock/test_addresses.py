"""Addresses of servers without skydraft: what is one, and that a connection is as safe as its address says."""

import pytest

import skydraft
from skydraft.edge.stock.connection import StockOptions
from skydraft.errors import OptionError


@pytest.mark.parametrize("given", [
    "http://[::1", "http://h:99999/v1", "http://a:1,http://b:2", "http://a:1,b:2", "http://", "http://u:p@h/v1",
    "http://h/v1?x=1", "http://h/v1#x", "ftp://h",
])  # fmt: skip
def test_what_is_no_address_is_refused_in_one_line(given: str) -> None:
    with pytest.raises(OptionError, match="not the address of a server") as refused:
        StockOptions(given)
    assert "\n" not in refused.value.line


@pytest.mark.parametrize(("given", "api", "root", "base"), [
    ("https://h:1", "auto", "https://h:1", "https://h:1/v1"),
    ("HTTPS://Host:1/v1/", "vllm", "https://Host:1", "https://Host:1/v1"),
    ("https://h:1/box", "vllm", "https://h:1/box", "https://h:1/box/v1"),
    ("https://h:1/box/v1", "auto", "https://h:1/box", "https://h:1/box/v1"),
    *((f"https://h/api/v3{end}", api, "https://h/api", "https://h/api/v3")
      for end, api in (("", "chat"), ("/", "auto"))),
    ("https://h/beta", "chat", "https://h/beta", "https://h/beta"),
    ("https://h/v1beta/openai/", "auto", "https://h/v1beta", "https://h/v1beta/openai"),
])  # fmt: skip
def test_an_address_with_a_path_is_taken_as_it_stands(given: str, api: str, root: str, base: str) -> None:
    options = StockOptions(given, api=api, key="secret")
    assert options.uses_tls and options.roots == (root, base)


@pytest.mark.parametrize(("given", "key"), [
    *((given, None) for given in (
        "http://user:SECRET@host/v1", "http://user:SE/CRET@host:80/v1", "http://SECRET@host", "user:SECRET@host:7373",
        "SECRET@host:7373", "a:1,user:SECRET@b:2", "user:SECRET@:7373", "https://u:SEC@RET@h/v1?x=1", "h:SECRET@x",
    )),
    *(("http://127.0.0.1:9/v1", key) for key in ("SECRET\r\nX: y", "SECRET密钥", "SECRET ", "SEC\0RET", "")),
])  # fmt: skip
def test_no_password_and_no_key_that_no_header_can_carry_is_told(given: str, key: str | None) -> None:
    with pytest.raises(OptionError) as refused:
        skydraft.connect(given, token=key)
    assert "SE" not in refused.value.line and "RET" not in refused.value.line


@pytest.mark.parametrize("key", [None, "secret"])
def test_texts_and_keys_cross_the_network_only_encrypted_or_if_allowed(key: str | None) -> None:
    with pytest.raises(OptionError, match="unencrypted"):
        StockOptions("http://gpu-box:8000", key=key)
    assert StockOptions("http://gpu-box:8000", key=key, insecure=True).address == "http://gpu-box:8000"
    assert StockOptions("http://127.0.0.1:8000", key=key).address == "http://127.0.0.1:8000"
