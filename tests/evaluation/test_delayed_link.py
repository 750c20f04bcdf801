"""The emulated links: bytes arrive in order and unchanged, as late and as slowly as asked for, until they are cut."""

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from bench.emulated_link import EmulatedLink, LinkShape
from skydraft.lab.evaluation.delayed_link import DelayedLink


class Echo(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with suppress(OSError):
            while data := self.request.recv(65536):
                self.request.sendall(data)


@pytest.fixture
def echo() -> Iterator[Any]:
    """A server that sends back what it gets."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield server.server_address
        server.shutdown()


def connect(link: DelayedLink) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", link.port), timeout=30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def took_s(connection: socket.socket, data: bytes) -> float:
    """The shortest of three exchanges: whatever else the machine does only makes them longer."""
    found = []
    for _ in range(3):
        began = time.monotonic()
        connection.sendall(data)
        with connection.makefile("rb") as received:
            assert received.read(len(data)) == data
        found.append(time.monotonic() - began)
    return min(found)


@pytest.mark.parametrize(("make", "length", "least_s", "most_s"), [
    (lambda to: DelayedLink(to, 40), 1, 0.08, 0.2),
    (lambda to: EmulatedLink(to, LinkShape(delay_ms=5, jitter_ms=5, seed=1)), 128_000, 0.01, 0.2),
    (lambda to: EmulatedLink(to, LinkShape(bandwidth_kbps=800)), 30_000, 0.3, 1.0),  # both ways overlap
], ids=["a delay, each way", "jitter", "800 kbit/s"])  # fmt: skip
def test_bytes_arrive_unchanged_in_order_and_in_time(
    echo: tuple[str, int], make: Any, length: int, least_s: float, most_s: float
) -> None:
    with make(echo) as link, connect(link) as connection:
        assert least_s <= took_s(connection, (bytes(range(256)) * 500)[:length]) < most_s
        if isinstance(link, EmulatedLink):
            assert link.bytes_up == link.bytes_down == 3 * length and link.num_connections == 1


def test_a_target_that_is_not_there_or_ends_ends_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = listener.getsockname()
        with DelayedLink(target, 20) as link, connect(link) as connection:
            with listener.accept()[0] as served:
                served.sendall(b"last words")
            assert connection.recv(99) == b"last words" and connection.recv(99) == b""
    with DelayedLink(target) as link, connect(link) as connection:
        assert connection.recv(99) == b""
