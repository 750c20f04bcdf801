"""Addresses of a server: what is one, and which of them never leave this machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.errors import OptionError
from skydraft.protocol.address import DEFAULT_PORT, is_loopback, parse_address
from tests.toys import law


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost", "localhost", DEFAULT_PORT),
        ("cloud.example:80", "cloud.example", 80),
        ("cloud.example:1", "cloud.example", 1),
        ("cloud.example:65535", "cloud.example", 65535),
        ("127.0.0.1", "127.0.0.1", DEFAULT_PORT),
        ("10.0.0.7:7373", "10.0.0.7", 7373),
        ("my_host-2:7", "my_host-2", 7),
        ("云.example:99", "云.example", 99),
        ("[::1]", "[::1]", DEFAULT_PORT),
        ("[::1]:80", "[::1]", 80),
        ("[2001:db8::7]:7373", "[2001:db8::7]", 7373),
        ("[fe80::1%eth0]:5", "[fe80::1%eth0]", 5),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not the address"),
        (":7373", "not the address"),
        ("[]:7373", "not the address"),
        ("::1", "not the address"),  # where would the port begin?
        ("2001:db8::7:80", "not the address"),
        ("http://cloud.example:80", "not the address"),
        ("cloud.example/path", "not the address"),
        ("unix:/run/x", "not a port"),
        ("cloud example:80", "not the address"),
        ("cloud\n:80", "not the address"),
        ("cloud.example:", "not a port"),
        ("cloud.example:0", "not a port"),
        ("cloud.example:65536", "not a port"),
        ("cloud.example:-1", "not a port"),
        ("cloud.example:80x", "not a port"),
        ("cloud.example: 80", "not a port"),
        ("cloud.example:8_0", "not a port"),
        ("cloud.example:²", "not a port"),
        ("[::1]:http", "not a port"),
    ],
)
def test_all_else_is_refused_with_an_example_of_what_is_one(text: str, says: str) -> None:
    with pytest.raises(OptionError, match=says) as raised:
        parse_address(text)
    assert raised.value.hint == "Write HOST:PORT, for example cloud.example:7373."


@pytest.mark.parametrize("text", ["[::1", "[::1:80", "::1]:80", "a]:80", "[::1]x:80", "[[::1]]:80", "]a[:80", "[::1]]"])
def test_brackets_stand_around_an_ipv6_address_or_nowhere(text: str) -> None:
    with pytest.raises(OptionError):
        parse_address(text)


def test_a_port_of_any_length_is_refused_like_any_other() -> None:
    with pytest.raises(OptionError, match="not a port"):
        parse_address("cloud.example:" + "1" * 5000)


@law(150)
@given(st.text("[]:.%/ aé1٣²7\n", max_size=12))
def test_any_text_is_an_address_or_an_option_error(text: str) -> None:
    try:
        host, port = parse_address(text)
    except OptionError:
        return
    assert 0 < port < 65536 and host and text.startswith(host)
    assert parse_address(f"{host}:{port}") == (host, port)


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.0.0.2", "127.255.0.9", "::1", "[::1]", "0:0:0:0:0:0:0:1"]
)
def test_these_never_leave_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        "", "0.0.0.0", "::", "[::]", "10.0.0.1", "192.168.1.1", "128.0.0.1", "::2", "[fe80::1%eth0]", "2001:db8::1",
        "cloud.example", "localhost.evil.example", "127.0.0.1.evil.example", "127.evil.example", "127.0.0.1:7373",
        "mylocalhost", "2130706433",
    ],
)  # fmt: skip
def test_these_do_or_may(host: str) -> None:
    assert not is_loopback(host)
