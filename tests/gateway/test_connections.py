"""Strangers who connect and ask nothing cost no other client an answer, as long as there are files for them."""

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .apart import TOYS, Apart, apart


@contextmanager
def strangers(port: int, num: int, says: bytes = b"") -> Iterator[None]:
    found = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(num)]
    for each in found:
        each.sendall(says)
    yield
    for each in found:
        each.close()


@pytest.fixture(autouse=True)
def many_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))


@pytest.mark.parametrize("says", [b"", b"GET /page/main.js HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_idle_connections_keep_nobody_waiting(says: bytes) -> None:
    with apart() as running, strangers(running.port, 700, says):
        assert [running.health() for _ in range(3)] == [200] * 3


def test_without_more_files_it_accepts_nobody_and_goes_on_once_there_are_some() -> None:
    running = Apart(*TOYS)
    resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (80, 80))
    with strangers(running.port, 120):
        running.wait_until(lambda: "Too many open files" in running.printed)
    assert running.health() == 200
    assert running.stop()[0] == 0
