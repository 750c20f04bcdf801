"""A server listens before its model is loaded: who connects is never cut off."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from skydraft.access.limits import Limits
from skydraft.cloud.options import ServeOptions
from skydraft.cloud.server import serve
from skydraft.cloud.worker import Worker
from skydraft.engines.toy import open_toy
from skydraft.errors import EngineError, OptionError
from skydraft.protocol.values import GET_INFO, HEALTH, SESSION

from ..serving import PATIENCE_S, free_port


def ends_with(channel: grpc.Channel, path: str = HEALTH) -> tuple[grpc.StatusCode, str]:
    """Status and details of a call."""
    call = channel.stream_stream(path)(iter([b""]), timeout=PATIENCE_S)
    with suppress(grpc.RpcError):
        list(call)
    return call.code(), str(call.details())


@contextmanager
def signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def toy() -> Worker:
    return Worker(open_toy("toy"), Limits())


def test_calls_wait_for_the_model_on_connections_that_stay() -> None:
    options = ServeOptions(port=free_port(), grace_s=0.0)
    told: list[Any] = []
    with signals_as_before(), grpc.insecure_channel(f"127.0.0.1:{options.port}") as channel:
        states: list[grpc.ChannelConnectivity] = []

        def load() -> Worker:
            for path in (HEALTH, GET_INFO, SESSION):
                code, details = ends_with(channel, path)
                assert code is grpc.StatusCode.UNAVAILABLE and "its model loads" in details
            channel.subscribe(states.append)
            return toy()

        def asked() -> None:
            try:
                told.append(ends_with(channel)[0])
            finally:
                os.kill(os.getpid(), signal.SIGTERM)  # to the server, which runs in the main thread

        serve(load, options, lambda worker, port: threading.Thread(target=asked).start())
    assert told == [grpc.StatusCode.OK]
    assert grpc.ChannelConnectivity.CONNECTING not in states  # it never had to connect again


def loads_nothing() -> Any:
    pytest.fail("it was loaded")


def test_what_is_wrong_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    for name in ("tokens", "cert.pem"):
        (tmp_path / name).write_text("nothing\n")
    cert, missing = tmp_path / "cert.pem", tmp_path / "no"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused: list[tuple[dict[str, Any], str]] = [
            ({"port": taken.getsockname()[1]}, r"Cannot listen on 127.0.0.1:\d+: Address already in use\."),
            ({"port": 0, "token_file": tmp_path / "tokens"}, "LABEL TOKEN"),
            ({"port": 0, "tls_cert": cert, "tls_key": cert}, "cannot be used"),
            ({"port": 0, "tls_cert": missing, "tls_key": missing}, "cannot be used"),
        ]
        for options, says in refused:
            with signals_as_before(), pytest.raises(OptionError, match=says):
                serve(loads_nothing, ServeOptions(**options), print)


def test_a_port_that_is_taken_at_one_address_of_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC would listen at the other address alone, and clients would reach somebody else."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name in ("127.0.0.2", "10.255.255.1"):  # another of this machine, and one that is not of this machine
            both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in (name, "127.0.0.1")]
            monkeypatch.setattr("skydraft.cloud.listening.socket.getaddrinfo", lambda *_, found=both, **__: found)
            with pytest.raises(OptionError, match="Address already in use"):
                serve(loads_nothing, ServeOptions(host="localhost", port=port), print)


def no_model() -> Any:
    raise EngineError("no such model")


def ended_by_a_signal() -> Any:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("load", "error"), [
    (no_model, EngineError), (ended_by_a_signal, KeyboardInterrupt), (toy, OptionError)  # its port of metrics is taken
])  # fmt: skip
def test_whatever_keeps_a_server_from_starting_frees_the_port(load: Any, error: type[BaseException]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ServeOptions(port=free_port(), metrics_port=taken.getsockname()[1])
        with signals_as_before(), pytest.raises(error, match="Metrics cannot be served" if load is toy else None):
            serve(load, options, print)
    socket.create_server(("127.0.0.1", options.port)).close()


def test_a_server_whose_worker_dies_ends_at_once_and_says_so() -> None:
    def on_ready(worker: Worker, port: int) -> None:
        worker.post(lambda: worker.step(1))  # type: ignore[call-arg]

    with signals_as_before(), pytest.raises(EngineError, match="worker thread failed"):
        serve(toy, ServeOptions(port=0, grace_s=PATIENCE_S), on_ready)
