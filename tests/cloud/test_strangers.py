"""What somebody without a token may do to a server: nothing that lasts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.engines.toy import open_toy
from skydraft.protocol.values import SERVICE

from ..serving import PATIENCE_S, Serving, free_port, serving
from .messages import TOKENS

CALLS = ["grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch", f"{SERVICE}/GetInfo", f"{SERVICE}/Session",
         "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]  # fmt: skip


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever says nothing has half a second."""
    for module in ("questions", "server"):
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
    monkeypatch.setattr("skydraft.cloud.server._MAX_CONNECTIONS", 20)
    with serving(open_toy("toy")) as server, ExitStack() as silent:
        for _ in range(40):
            silent.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        server.wait_until(lambda: _answers(server))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="nothing tells of connections here")
def test_idle_connections_make_way_and_running_texts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They speak HTTP/2, begin no call, and come again when they are closed."""
    monkeypatch.setattr("skydraft.cloud.server._MAX_CONNECTIONS", 32)
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
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
                other.sendall(hello)
        for _ in range(3):
            server.wait_until(lambda: _answers(server), 10)
        assert session in server.server._service._streams._open  # the same stream, of the first connection
        assert len(list(rounds)) and len(running.token_ids) == 40
        cloud.close()


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
