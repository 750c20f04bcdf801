"""Strangers who connect and ask nothing: others are served, files and memory are bounded, and little is logged."""

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from skydraft.gateway import connections
from skydraft.gateway.connections import MAX_CONNECTIONS

from .apart import apart
from .running import gateway


@contextmanager
def strangers(port: int, num: int, says: bytes = b"") -> Iterator[list[socket.socket]]:
    found = []
    try:
        for _ in range(num):
            found.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            with suppress(OSError):
                found[-1].sendall(says)
        yield found
    finally:
        for each in found:
            each.close()


@pytest.fixture(autouse=True)
def many_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))


@pytest.mark.parametrize("says", [b"", b"GET /hea", b"GET /page/main.js HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_idle_connections_make_room_for_those_that_ask(says: bytes) -> None:
    with apart() as running, strangers(running.port, MAX_CONNECTIONS + 100, says):
        assert [running.health() for _ in range(3)] == [200] * 3
        end = time.monotonic() + 20
        while running.num_files > MAX_CONNECTIONS + 50:  # until what they asked for is answered
            assert running.health() == 200 and time.monotonic() < end


def test_the_oldest_idle_one_goes_first_and_none_that_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    body = b'{"model": "skydraft", "messages": [{"role": "user", "content": "a"}], "stream": true, "max_tokens": 4000}'
    asks = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with gateway() as running:
        port = running.port
        with strangers(port, 1) as first, strangers(port, 1, asks) as asking, strangers(port, 2) as more:
            assert asking[0].recv(12) == b"HTTP/1.1 200"
            with strangers(port, 1):
                assert not first[0].recv(1)
                for each in more:
                    each.settimeout(0.1)
                    with pytest.raises(TimeoutError):
                        each.recv(1)
                while b"[DONE]" not in asking[0].recv(1 << 20):
                    pass


def test_without_more_files_it_serves_fewer_and_says_so_once() -> None:
    """asyncio itself logs each try: eighty megabytes in half a minute."""
    with apart() as running:
        resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (80, 80))
        with strangers(running.port, 200):
            began = time.monotonic()
            while time.monotonic() - began < 1:
                assert running.health() == 200
        assert running.health() == 200
    assert running.printed.count("Too many open files") == 1 and len(running.printed) < 2000
