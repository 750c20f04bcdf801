"""Clients that hang up, and a gateway that is told to stop: both take effect at once, whatever is under way."""

import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import AsyncMock

import pytest

import skydraft
from skydraft.edge.session import OwnText
from skydraft.errors import RateLimited, SessionNotFound
from skydraft.gateway import app

from ..serving import Process, ran_s
from .apart import TOYS, Apart
from .running import gateway, over

FREE_S = 1.5  # half a second is meant, on a machine that is busy
STOPPED_S = 4.0  # two are meant


def client(port: int, body: bytes, length: int = 0, path: str = "/v1/chat/completions") -> socket.socket:
    """One that has sent a request, or the beginning of one with this `length`."""
    made = socket.create_connection(("127.0.0.1", port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length or len(body)}\r\n\r\n"
    made.sendall(head.encode() + body)
    return made


def chat(mode: str, **more: Any) -> bytes:
    asked = {"model": f"skydraft-{mode}", "messages": [{"role": "user", "content": "语速"}], "max_tokens": 4000}
    return json.dumps(asked | {"skydraft": {"min_new_tokens": 3900}} | more).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    running = Process()
    yield running
    running.stop()


LIMITED, LOST = RateLimited("slow down", retry_after_s=25), SessionNotFound("no such session")
STATES: dict[str, tuple[str, Exception | None, bool, bool]] = {
    # mode, what each verification raises, whether the server is stopped, whether the cloud is required
    "running": ("lossless", None, False, False),
    "rate limit": ("lossless", LIMITED, False, False),
    "opened again and again": ("cloud", LOST, False, False),
    "stopped before the first word": ("cloud", None, True, False),
    "stopped before the calibration": ("auto", None, True, True),
}


@pytest.mark.parametrize("state", STATES)
def test_who_hangs_up_leaves_the_place_at_once(server: Process, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    mode, error, stops, requires = STATES[state]
    if error is not None:
        monkeypatch.setattr(OwnText, "verify", AsyncMock(side_effect=error))
    with over(skydraft.connect(server.address, require=requires), max_running=1) as running:
        if stops:
            server.signal(signal.SIGSTOP)
        try:
            desk = running.gateway.desk
            clients = [client(running.port, chat(mode)) for _ in range(2)]
            running.wait_until(lambda: desk.num_running == 1 and desk.num_waiting == 1)
            time.sleep(0.3)
            began = ran_s()
            for each in clients:
                each.close()
            running.wait_until_idle()
            assert ran_s() - began < FREE_S
        finally:
            server.signal(signal.SIGCONT)


def beginning(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port))
    made.sendall(b"POST /v1/chat")
    return made


CLIENTS: dict[str, Callable[[int], socket.socket]] = {
    "idle": lambda port: socket.create_connection(("127.0.0.1", port)),
    "beginning": beginning,
    "withholding": lambda port: client(port, b"{", length=1000),
    "reading": lambda port: client(port, chat("lossless", stream=True)),
    "waiting": lambda port: client(port, chat("lossless")),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_it_stops_whatever_its_clients_do(name: str) -> None:
    running = Apart(*TOYS)
    connected = [CLIENTS[name](running.port) for _ in range(8)]
    time.sleep(0.3)
    status, took_s = running.stop()
    for each in connected:
        with each, suppress(ConnectionResetError):
            got = b"".join(iter(partial(each.recv, 65536), b""))
            assert name not in ("reading", "waiting") or b"The gateway is shutting down." in got
    assert status == 0 and took_s < STOPPED_S and "Traceback" not in running.printed, running.printed


def test_it_stops_while_a_body_is_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    begun, end = threading.Event(), threading.Event()

    def read(*_: object) -> None:
        begun.set()
        end.wait(20)

    monkeypatch.setattr(app, "read_ask", read)
    with gateway() as running, caplog.at_level(logging.ERROR):
        clients = [client(running.port, b" " * 100_000) for _ in range(2)]
        assert begun.wait(10)
        began = ran_s()
        running.server.should_exit = True
        for each in clients:
            each.settimeout(STOPPED_S)
            with each, suppress(ConnectionResetError):
                while each.recv(1000):
                    pass
        assert ran_s() - began < STOPPED_S
        end.set()
    assert "Traceback" not in caplog.text
