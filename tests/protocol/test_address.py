"""Addresses of a server: what is one, and which of them never leave this machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.errors import OptionError
from skydraft.protocol.address import DEFAULT_PORT, as_origin, is_loopback, parse_address
from tests.toys import law

ADDRESSES = {
    "localhost": ("localhost", DEFAULT_PORT), "cloud.example:65535": ("cloud.example", 65535),
    "云.example:99": ("云.example", 99), "[::1]": ("[::1]", DEFAULT_PORT), "[fe80::1%eth0]:5": ("[fe80::1%eth0]", 5),
}  # fmt: skip
NO_HOSTS = [
    "", ":7373", "[]:7373", "http://cloud.example:80", "cloud.example/path", "cloud example:80", "cloud\n:80",
    "http://x", "::1", "2001:db8::7:80",  # where would the port begin?
]  # fmt: skip
PORTS = ["", "0", "65536", "-1", "80x", " 80", "8_0", "²", "1" * 5000]
NO_PORTS = ["unix:/run/x", "[::1]:http", *(f"cloud.example:{port}" for port in PORTS)]
ODD = ["[::1", "[::1:80", "::1]:80", "a]:80", "[::1]x:80", "[[::1]]:80", "]a[:80", "[::1]]"]


def test_an_address_is_a_host_and_a_port_and_all_else_is_refused_with_an_example() -> None:
    assert {text: parse_address(text) for text in ADDRESSES} == ADDRESSES
    for texts, says in ((NO_HOSTS, "not the address"), (NO_PORTS, "not a port"), (ODD, "not")):
        for text in texts:
            with pytest.raises(OptionError, match=says) as raised:
                parse_address(text)
            assert "HOST:PORT, for example cloud.example:7373" in raised.value.hint, text
            assert "http://HOST:PORT/v1" in raised.value.hint, text


@law(150)
@given(st.text("[]:.%/ aé1٣²7\n", max_size=12))
def test_any_text_is_an_address_or_an_option_error(text: str) -> None:
    try:
        host, port = parse_address(text)
    except OptionError:
        return
    assert 0 < port < 65536 and host and text.startswith(host)
    assert parse_address(f"{host}:{port}") == (host, port)


ORIGINS = {
    "http://localhost:3000/": "http://localhost:3000", "HTTPS://App.Example:443": "https://app.example",
    "http://a:80": "http://a", "http://[::1]:80": "http://[::1]", "https://a:80": "https://a:80",
    "app://obsidian.md": "app://obsidian.md", "chrome-extension://abc": "chrome-extension://abc",
}  # fmt: skip
HOSTS = ("a:*", "*.a", "a,http://b", "a/b", "云")
NO_ORIGINS = ["", "*", "null", "localhost:3000", *(f"http://{host}" for host in HOSTS)]


def test_an_origin_is_written_as_browsers_send_it_and_all_else_is_refused() -> None:
    assert {text: as_origin(text) for text in ORIGINS} == ORIGINS
    for text in NO_ORIGINS:
        with pytest.raises(OptionError, match="not the origin of a web page"):
            as_origin(text)


def test_what_never_leaves_this_machine() -> None:
    here = ["localhost", "127.0.0.1", "127.255.0.9", "::1", "[::1]", "0:0:0:0:0:0:0:1"]
    numbers = ["", "0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "::2", "[fe80::1%eth0]", "127.0.0.1:7373", "2130706433"]
    names = ["cloud.example", "localhost.evil.example", "127.0.0.1.evil.example", "127.evil.example", "mylocalhost"]
    assert [host for host in (*here, *numbers, *names) if is_loopback(host)] == here
