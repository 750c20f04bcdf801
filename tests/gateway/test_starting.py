"""The gateway listens before its models are loaded, and says so."""

from __future__ import annotations

import socket
import threading

import httpx2
import pytest

from skydraft.errors import OptionError
from skydraft.gateway.server import ListenOptions, listen
from skydraft.gateway.starting import starting

from ..serving import ran_s


@pytest.fixture
def listening() -> socket.socket:
    return listen(ListenOptions())


def url(listening: socket.socket) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_everything_is_answered_at_once_and_says_why(listening: socket.socket) -> None:
    with listening, starting(listening, encrypted=False):
        health = httpx2.get(f"{url(listening)}/health")
        assert (health.status_code, health.json()) == (503, {"status": "starting"})
        for answer in (
            httpx2.post(f"{url(listening)}/v1/chat/completions", json={"messages": []}),
            httpx2.get(f"{url(listening)}/"),
            httpx2.options(f"{url(listening)}/v1/models"),
        ):
            assert answer.status_code == 503 and answer.headers["Retry-After"] == "2"
            assert answer.json()["error"]["message"] == "The gateway is starting: its models load."


def test_the_port_is_refused_before_a_model_is_loaded(listening: socket.socket) -> None:
    with listening, pytest.raises(OptionError, match="cannot be used"):
        listen(ListenOptions(port=listening.getsockname()[1]))


def test_who_comes_late_is_kept_for_the_gateway(listening: socket.socket) -> None:
    """After the block nobody answers, and the socket still listens: connections wait for the next owner."""
    with listening:
        with starting(listening, encrypted=False):
            pass
        with socket.create_connection(listening.getsockname()) as late:
            accepted, _ = listening.accept()
            with accepted:
                accepted.sendall(b"hello")
                assert late.recv(5) == b"hello"


def test_silent_and_broken_clients_hold_nobody_up_for_long(listening: socket.socket) -> None:
    with listening, starting(listening, encrypted=False):
        silent = [socket.create_connection(listening.getsockname()) for _ in range(2)]
        with socket.create_connection(listening.getsockname()) as broken:
            broken.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        began = ran_s()
        assert httpx2.get(f"{url(listening)}/health", timeout=30).status_code == 503
        assert ran_s() - began < 5
        for client in silent:
            client.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "starting"]


def test_clients_of_an_encrypted_port_wait(listening: socket.socket) -> None:
    with (
        listening,
        starting(listening, encrypted=True),
        socket.create_connection(listening.getsockname()) as waiting,
        pytest.raises(TimeoutError),
    ):
        waiting.settimeout(0.2)
        waiting.recv(1)
