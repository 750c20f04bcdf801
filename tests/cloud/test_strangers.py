"""What somebody without a token may do to a server: nothing that lasts."""

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from skydraft.engines.toy import open_toy
from skydraft.protocol.values import GET_INFO, HEALTH, SESSION

from ..serving import PATIENCE_S, Process, RawSession, Serving, serving
from .driver import verdict_of, verify_message

CALLS = [HEALTH, "/grpc.health.v1.Health/Watch", GET_INFO, SESSION, "/no.such/Method"]
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever says nothing has half a second."""
    monkeypatch.setattr("skydraft.cloud.calls.QUESTION_S", 0.5)
    monkeypatch.setattr("skydraft.cloud.listening._HANDSHAKE_MS", 500)


@pytest.fixture
def guarded(token_file: Path) -> Iterator[Serving]:
    with serving(open_toy("toy"), token_file=token_file) as running:
        yield running


@contextmanager
def calls(address: str, num: int, *messages: bytes) -> Iterator[list[Any]]:
    """So many calls of every method that begin, send these messages, and do not end."""
    over = threading.Event()

    def endless() -> Iterator[bytes]:
        yield from messages
        over.wait(2 * PATIENCE_S)

    with grpc.insecure_channel(address) as channel:
        yield [channel.stream_stream(name)(endless()) for name in CALLS for _ in range(num)]
        over.set()


def health(address: str) -> bool:
    """Whether a health check on a connection of its own is answered."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            return bool(channel.unary_unary(HEALTH)(b"", timeout=5))
        except grpc.RpcError:
            return False


@pytest.mark.parametrize("messages", [(), (b"",)], ids=["silent", "one message"])
def test_calls_that_do_not_end_do_not_delay_a_restart(guarded: Serving, messages: tuple[bytes, ...]) -> None:
    with calls(guarded.address, 3, *messages):
        assert health(guarded.address)  # they have come
        began = time.monotonic()
        guarded.stop(grace_s=25)
        assert time.monotonic() - began < 5


def test_a_question_that_does_not_come_ends(soon: None, guarded: Serving) -> None:
    with calls(guarded.address, 20) as begun:
        codes = {call.code() for call in begun}  # waits for each
    assert {code.name for code in codes} == {"DEADLINE_EXCEEDED", "UNIMPLEMENTED", "UNAUTHENTICATED"}


def test_connections_that_say_nothing_make_way(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.cloud.listening._MAX_CONNECTIONS", 20)
    with serving(open_toy("toy")) as server, ExitStack() as silent:
        for _ in range(40):
            silent.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        server.wait_until(lambda: health(server.address))


def begun_and_cancelled(number: int, path: str) -> bytes:
    """A call of HTTP/2 without a message, and its end."""
    fields = [(":path", path), (":authority", "x"), ("te", "trailers"), ("content-type", "application/grpc")]
    head = b"\x83\x86" + b"".join(
        b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode() for name, value in fields
    )
    stream = number.to_bytes(4, "big")
    return len(head).to_bytes(3, "big") + b"\x01\x04" + stream + head + b"\0\0\x04\x03\0" + stream + b"\0\0\0\x08"


def flood(port: int, over: threading.Event, path: str) -> None:
    """Thousands of cancelled calls a second on one connection, and a new one for each that is lost."""
    while not over.is_set():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5) as connection:
            connection.sendall(HELLO + b"\0\0\0\x04\x01\0\0\0\0")
            for number in range(1, 2**31, 400):
                connection.sendall(b"".join(begun_and_cancelled(number + each, path) for each in range(0, 400, 2)))
                if over.wait(0.01) or (select.select([connection], [], [], 0)[0] and not connection.recv(2**16)):
                    break


@pytest.mark.parametrize(("path", "num"), [(HEALTH, 1), (SESSION, 3), ("/no.such/Method", 3)])
def test_a_session_and_health_checks_are_answered_while_a_stranger_floods(path: str, num: int) -> None:
    """Over several connections too, unless the flood is of health checks."""
    server, over = Process(), threading.Event()
    flooding = [threading.Thread(target=flood, args=(server.port, over, path)) for _ in range(num)]
    with grpc.insecure_channel(server.address) as channel:
        session, message = RawSession(channel), verify_message()

        def longest(what: Callable[[], Any]) -> float:
            began = time.monotonic()
            assert what()
            return time.monotonic() - began

        try:
            session.ask(message)
            for each in flooding:
                each.start()
            time.sleep(0.5)  # long enough for the calls to pile up
            asked = [longest(lambda: verdict_of(session.ask(message))) for _ in range(12)]
            checked = [longest(lambda: health(server.address)) for _ in range(12)]
            # Alone both take some milliseconds; without the limit of calls of one connection, checks fail or take 2 s.
            assert sorted(asked)[6] < 0.25 and sorted(checked)[6] < 1, (asked, checked)
        finally:
            over.set()
            for each in flooding:
                each.join()
            session.end()
            assert server.stop() == 0
