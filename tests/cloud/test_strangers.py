"""What somebody without a token may do to a server: nothing that lasts."""

from __future__ import annotations

import select
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.cloud.connections import _drop
from skydraft.engines.toy import open_toy
from skydraft.protocol import codec
from skydraft.protocol.values import SERVICE, OpenCall, Opening
from skydraft.types import Prompt

from ..serving import PATIENCE_S, Process, RawSession, Serving, free_port, serving
from .messages import TOKENS

linux = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="nothing tells of connections here")
CALLS = ["grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch", f"{SERVICE}/GetInfo", f"{SERVICE}/Session",
         "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]  # fmt: skip

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever says nothing has half a second."""
    for module in ("questions", "listening"):
        monkeypatch.setattr(f"skydraft.cloud.{module}.QUESTION_S", 0.5)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Serving]:
    (tmp_path / "tokens").write_text(TOKENS)
    (tmp_path / "tokens").chmod(0o600)
    with serving(open_toy("toy"), token_file=tmp_path / "tokens") as running:
        yield running


@contextmanager
def calls(address: str, num: int, *messages: bytes) -> Iterator[list[Any]]:
    """So many calls of every method that begin, send these messages, and do not end."""
    over = threading.Event()

    def endless() -> Iterator[bytes]:
        yield from messages
        over.wait(2 * PATIENCE_S)

    with grpc.insecure_channel(address) as channel:
        yield [channel.stream_stream(f"/{name}")(endless()) for name in CALLS for _ in range(num)]
        over.set()


@pytest.mark.parametrize("messages", [(), (b"",)], ids=["silent", "one message"])
def test_calls_that_do_not_end_do_not_delay_a_restart(guarded: Serving, messages: tuple[bytes, ...]) -> None:
    with calls(guarded.address, 3, *messages):
        time.sleep(0.5)  # they have come
        began = time.monotonic()
        guarded.stop(grace_s=25)
        assert time.monotonic() - began < 5


def test_a_question_that_does_not_come_ends(soon: None, guarded: Serving) -> None:
    with calls(guarded.address, 20) as begun:
        codes = {call.code() for call in begun}  # waits for each
    assert codes == {
        grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED,
    }  # fmt: skip


def test_connections_that_say_nothing_make_way(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.cloud.listening._MAX_CONNECTIONS", 20)
    with serving(open_toy("toy")) as server, ExitStack() as silent:
        for _ in range(40):
            silent.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        server.wait_until(lambda: _answers(server))


@linux
def test_idle_connections_make_way_and_running_texts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They speak HTTP/2, begin no call, and come again when they are closed."""
    monkeypatch.setattr("skydraft.cloud.listening._MAX_CONNECTIONS", 32)
    plan, params = make_plan("cloud"), DecodingParams(max_new_tokens=40, min_new_tokens=40)
    with serving(open_toy("toy")) as server, ExitStack() as idle:
        cloud = skydraft.connect(server.address, timeout_s=20)
        running = skydraft.generate("语速", edge=open_toy("toy"), cloud=cloud, plan=plan, params=params)
        rounds = running.rounds()
        next(rounds)
        session = next(iter(server.server._service._streams._open))
        for _ in range(64):
            other = idle.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            with suppress(OSError):
                other.sendall(HELLO)
        for _ in range(3):
            server.wait_until(lambda: _answers(server), 10)
        assert session in server.server._service._streams._open  # the same stream, of the first connection
        assert len(list(rounds)) and len(running.token_ids) == 40
        cloud.close()


def begun_and_cancelled(number: int, path: str) -> bytes:
    """A call of HTTP/2 without a message, and its end."""
    fields = [(":path", path), (":authority", "x"), ("te", "trailers"), ("content-type", "application/grpc")]
    head = b"\x83\x86" + b"".join(
        b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode() for name, value in fields
    )
    stream = number.to_bytes(4, "big")
    return len(head).to_bytes(3, "big") + b"\x01\x04" + stream + head + b"\0\0\x04\x03\0" + stream + b"\0\0\0\x08"


def flood(port: int, over: threading.Event, path: str) -> None:
    """Thousands of cancelled calls a second of another address, and a new connection for each that is lost."""
    while not over.is_set():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5, ("127.0.0.2", 0)) as connection:
            connection.sendall(HELLO + b"\0\0\0\x04\x01\0\0\0\0")
            for number in range(1, 2**31, 400):
                connection.sendall(b"".join(begun_and_cancelled(number + each, path) for each in range(0, 400, 2)))
                if over.wait(0.01) or (select.select([connection], [], [], 0)[0] and not connection.recv(2**16)):
                    break


def seconds(address: str) -> float:
    """How long a health check on a connection of its own takes; a minute if it fails."""
    began = time.monotonic()
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            return time.monotonic() - began if channel.unary_unary(f"/{CALLS[0]}")(b"", timeout=30) else 60
        except grpc.RpcError:
            return 60


@linux
@pytest.mark.parametrize("path", [f"/{CALLS[0]}", "/no.such/Method"])
def test_a_flood_of_cancelled_calls_delays_no_health_check(path: str) -> None:
    server, over = Process(), threading.Event()
    flooding = threading.Thread(target=flood, args=(server.port, over, path))
    try:
        alone = statistics.median(seconds(server.address) for _ in range(10))
        flooding.start()
        until, taken = time.monotonic() + 2, []
        while time.monotonic() < until:
            taken.append(seconds(server.address))
            time.sleep(0.02)  # it floods nobody itself
        assert len(taken) >= 8 and statistics.quantiles(taken, n=8)[-1] < max(0.25, 25 * alone), sorted(taken)
    finally:
        over.set()
        flooding.join()
        assert server.end(signal.SIGTERM) == 0


@linux
def test_whoever_floods_is_shut_out_for_a_while_and_sessions_stay(
    guarded: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skydraft.cloud.access._OUT_S", 1.0)
    monkeypatch.setattr("skydraft.cloud.access._CALLS_PER_S", 30)
    with grpc.insecure_channel(guarded.address) as channel:
        session = RawSession(channel, TOKENS.split()[1])
        session.ask(codec.encode_open(OpenCall(7, 0, Opening(guarded.server.info().fingerprint, Prompt((1,))))))
        others = [channel.stream_stream(f"/{SERVICE}/Session")(iter(())) for _ in range(200)]  # on that connection
        assert any("Too many calls" in str(call.details()) for call in others)
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", guarded.port), 0.3)
        socket.create_connection(("127.0.0.1", guarded.port), 0.3, ("127.0.0.3", 0)).close()
        session.send(codec.encode_close(0))
        assert list(session.call) == []
    guarded.wait_until(lambda: _answers(guarded))


@linux
@pytest.mark.parametrize("out", ["127.0.0.2", "::1"])
def test_packets_are_dropped_by_address(out: str) -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
        port = listening.getsockname()[1]
        _drop(listening.fileno(), port, ["10.0.0.1", "fe80::1", out])
        for source, address in (("127.0.0.2", "127.0.0.1"), ("127.0.0.3", "127.0.0.1"), ("::1", "::1")):
            with pytest.raises(TimeoutError) if source == out else nullcontext():
                socket.create_connection((address, port), 0.2, (source, 0)).close()
        _drop(listening.fileno(), port, [])
        socket.create_connection(("127.0.0.1", port), 1, ("127.0.0.2", 0)).close()
        socket.create_connection(("::1", port), 1).close()


def test_whoever_holds_the_port_of_metrics_costs_few_threads(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("skydraft.cloud.metrics._Silent.timeout", 60.0)
    with serving(open_toy("toy"), metrics_port=(port := free_port())) as server:
        before = threading.active_count()
        with ExitStack() as idle:
            for _ in range(30):
                idle.enter_context(socket.create_connection(("127.0.0.1", port)))
            server.wait_until(lambda: threading.active_count() - before >= 16)
            time.sleep(0.2)
            assert threading.active_count() - before <= 20
        monkeypatch.setattr("skydraft.cloud.metrics._Silent.timeout", 0.2)
        with socket.create_connection(("127.0.0.1", port)):
            time.sleep(0.5)
        server.wait_until(lambda: _is_scraped(server), 10)
    assert "Traceback" not in capfd.readouterr().err


def _is_scraped(server: Serving) -> bool:
    try:
        return bool(server.metrics("sessions"))
    except OSError:
        return False


def _answers(server: Serving) -> bool:
    with grpc.insecure_channel(server.address) as channel:
        try:
            return bool(channel.unary_unary(f"/{CALLS[0]}")(b"", timeout=5))
        except grpc.RpcError:
            return False
