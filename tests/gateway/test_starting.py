"""The gateway listens before its models are loaded, and says so; who connects meanwhile stays connected."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from skydraft.config import DecodingParams
from skydraft.errors import EngineError, OptionError
from skydraft.gateway.app import Gateway, GatewayOptions
from skydraft.gateway.requests import Defaults
from skydraft.gateway.server import ListenOptions, listen, serve

from ..serving import PATIENCE_S
from .running import toy_pair

ASKS = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with listen(ListenOptions()) as listening:
        yield listening


def url(listening: socket.socket) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def starting(listening: socket.socket, first: Callable[[], object], then: Callable[[], object] = lambda: None) -> None:
    """Start a gateway: one thing is done while its models load, one when it is ready; then it is stopped."""
    ended = list[Future[None]]()

    def load() -> Gateway:
        first()
        return Gateway(toy_pair(), Defaults(DecodingParams()), GatewayOptions())

    def last() -> None:
        try:
            then()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        serve(load, ListenOptions(), listening, lambda gateway, port: ended.append(pool.submit(last)))
    ended[0].result()


def test_everything_is_answered_at_once_and_says_why(listening: socket.socket) -> None:
    def asked() -> None:
        health = httpx2.get(f"{url(listening)}/health")
        assert (health.status_code, health.json()) == (503, {"status": "starting"})
        for answer in (
            httpx2.post(f"{url(listening)}/v1/chat/completions", json={"messages": ["a" * 100_000]}),
            httpx2.get(f"{url(listening)}/v1/models"),
            httpx2.options(f"{url(listening)}/v1/models"),
        ):
            assert answer.status_code == 503 and answer.headers["Retry-After"] == "2"
            assert answer.json()["error"]["message"] == "The gateway is starting: its models load."

    starting(listening, asked)


def test_the_port_is_refused_before_a_model_is_loaded(listening: socket.socket) -> None:
    with pytest.raises(OptionError, match=r"Cannot listen on .*: Address already in use"):
        listen(ListenOptions(port=listening.getsockname()[1]))


def test_who_connects_while_the_models_load_is_served_on_that_connection(listening: socket.socket) -> None:
    def said(connection: socket.socket) -> bytes:
        connection.settimeout(PATIENCE_S)
        connection.sendall(ASKS)
        answer = b""
        while b"}" not in answer:
            answer += connection.recv(65536)
        return answer

    with socket.socket() as silent, socket.socket() as asking:

        def connect() -> None:
            for connection in (silent, asking):
                connection.connect(listening.getsockname())
            assert b"503" in said(asking).splitlines()[0]

        def ask_again() -> None:
            assert b"200" in said(asking).splitlines()[0]
            assert b"200" in said(silent).splitlines()[0]

        starting(listening, connect, ask_again)


@pytest.mark.parametrize("error", [EngineError("no such model"), KeyboardInterrupt(), None])
def test_models_that_do_not_load_and_signals_end_it(listening: socket.socket, error: BaseException | None) -> None:
    def fail() -> Any:
        if error is not None:
            raise error
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(type(error) if error else KeyboardInterrupt):
        serve(fail, ListenOptions(), listening, lambda gateway, port: None)
    assert not [thread for thread in threading.enumerate() if thread.name == "serving"]
