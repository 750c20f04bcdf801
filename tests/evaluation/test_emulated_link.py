"""The emulated link: bytes arrive in order and unchanged, as late and as slowly as asked for; and its server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skydraft.engines.options import EngineOptions
from skydraft.errors import CloudFailure
from bench.emulated_link import EmulatedLink, LinkShape
from skydraft.evaluation.served_target import ServedTarget

from ..engines.tiny_checkpoint import save_model


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def connect(link: EmulatedLink) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", link.port), timeout=30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def exchange(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    received = b""
    while len(received) < len(data):
        if not (part := connection.recv(65536)):
            break
        received += part
    return received


@pytest.mark.parametrize("shape", [LinkShape(), LinkShape(delay_ms=5, jitter_ms=5, seed=1)])
def test_bytes_arrive_unchanged_and_in_order(echo: tuple[str, int], shape: LinkShape) -> None:
    data = bytes(range(256)) * 500
    with EmulatedLink(echo, shape) as link, connect(link) as connection:
        assert exchange(connection, data) == data
        assert link.bytes_up == link.bytes_down == len(data)
        assert link.num_connections == 1


def test_a_delay_is_paid_each_way(echo: tuple[str, int]) -> None:
    with EmulatedLink(echo, LinkShape(delay_ms=40)) as link, connect(link) as connection:
        times = []
        for _ in range(5):
            began = time.monotonic()
            exchange(connection, b"x")
            times.append(time.monotonic() - began)
        assert 0.08 <= min(times) < 0.12


def test_jitter_adds_up_to_its_size_and_the_same_seed_gives_the_same_cuts(echo: tuple[str, int]) -> None:
    def cuts(seed: int) -> list[int]:
        """At which exchange each of ten connections was cut."""
        found = []
        with EmulatedLink(echo, LinkShape(cut_rate=0.2, seed=seed)) as link:
            for _ in range(10):
                with connect(link) as connection:
                    number = 0
                    try:
                        while exchange(connection, b"x") == b"x":
                            number += 1
                    except OSError:
                        pass
                found.append(number)
        return found

    assert cuts(3) == cuts(3) != cuts(4)


def test_bandwidth_bounds_the_bytes_a_second(echo: tuple[str, int]) -> None:
    with EmulatedLink(echo, LinkShape(bandwidth_kbps=800)) as link, connect(link) as connection:
        times = []
        for _ in range(3):
            began = time.monotonic()
            exchange(connection, bytes(30_000))  # 0.3 s up, the way back overlaps
            times.append(time.monotonic() - began)
        assert 0.3 <= min(times) < 0.8


def test_a_stall_holds_everything_back_and_loses_nothing(echo: tuple[str, int]) -> None:
    with EmulatedLink(echo) as link, connect(link) as connection:
        exchange(connection, b"warm")
        times = []
        for _ in range(3):
            began = time.monotonic()
            link.stall(0.3)
            assert exchange(connection, b"late") == b"late"
            times.append(time.monotonic() - began)
        assert 0.3 <= min(times) < 0.8


def test_cut_down_and_up(echo: tuple[str, int]) -> None:
    with EmulatedLink(echo) as link:
        with connect(link) as connection:
            exchange(connection, b"x")
            link.cut()
            with pytest.raises(ConnectionResetError):
                exchange(connection, b"x")
        link.down()
        with pytest.raises(ConnectionResetError), connect(link) as connection:
            exchange(connection, b"x")
        link.up()
        with connect(link) as connection:
            assert exchange(connection, b"x") == b"x"


def test_a_target_that_is_not_there_looks_like_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with EmulatedLink(("127.0.0.1", port)) as link, pytest.raises(ConnectionResetError), connect(link) as connection:
        exchange(connection, b"x")


@pytest.mark.parametrize("wrong", [{"delay_ms": -1}, {"cut_rate": 1.5}])
def test_an_impossible_shape_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"link has no|rate lies"):
        LinkShape(**wrong)  # type: ignore[arg-type]


def test_a_link_becomes_slower_while_it_is_used(echo: tuple[str, int]) -> None:
    with EmulatedLink(echo) as link, connect(link) as connection:
        took = []
        for delay_ms in (0, 0, 0, 60, 0, 0, 0):
            link.reshape(LinkShape(delay_ms=delay_ms))
            began = time.perf_counter()
            assert exchange(connection, b"x") == b"x"
            took.append(time.perf_counter() - began)
    assert took[3] >= 0.12 > max(min(took[:3]), min(took[4:]))


OPTIONS = EngineOptions(context_len=640, num_threads=1)


def test_a_model_in_a_folder_with_a_bracket_in_its_name_is_served(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = save_model(tmp_path / "model (1): copy", "Qwen2Config", seed=1)
    with ServedTarget(str(model), OPTIONS, "exact", offline=True) as served, served.behind(10.0) as cloud:
        assert "model (1): copy" in cloud.info().model


def test_a_server_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(CloudFailure, match=r"did not start: skydraft: .*no-such-model.*[^.][.]$"),
        ServedTarget("no-such-model", OPTIONS, "exact", offline=True),
    ):
        pass
