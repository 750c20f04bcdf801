"""Clients that hang up, send dear bodies, connect without a question or would have all places: no other one waits."""

import asyncio
import json
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx2 as httpx
import pytest

import skydraft
from skydraft import DecodingParams, api, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.edge.session import OwnText
from skydraft.engines.toy import open_toy
from skydraft.errors import RateLimited, SessionNotFound, TargetChanged
from skydraft.gateway import app
from skydraft.gateway.desk import Desk, Ended
from skydraft.gateway.refusals import Refusal
from skydraft.prompts.messages import asked

from ..serving import PATIENCE_S, Process, ran_s, waiting
from .interfaces import plain, tool_of
from .running import TOYS, Apart, apart, client, gateway, over, toy_pair

MIB = 1 << 20
MOST = 32 * MIB - 1000
LATE_S, MUCH_MIB = 1.0, 200.0  # a quarter of a second, on a machine that is busy


@pytest.fixture(scope="module")
def gateway_apart() -> Iterator[Apart]:
    with apart() as running:
        yield running


def chat(content: bytes = b'"a"', more: bytes = b"") -> bytes:
    return b'{"model":"skydraft-edge","max_tokens":2,"messages":[{"role":"user","content":%s}]%s}' % (content, more)


def dumped(**body: Any) -> bytes:
    return json.dumps(plain("chat/completions", limit=2) | body, separators=(",", ":")).encode()


SMILE = "😀".encode()  # makes each character of its text take four bytes
FUNCTIONS = [{"type": "function", "name": f"f{number}"} for number in range(500)]
CALL = {"type": "function_call", "namespace": "a", "name": "f499"}
BODIES = {
    "parts without a type in each message": dumped(messages=[{"role": "user", "content": [0] * 256}] * 4096),
    "objects that are not read, and speech": chat(more=b',"data":[%s{}]' % (b"{}," * (MOST // 3))),
    "brackets": b"[" * MOST,
    "a text": chat(b'"%s%s"' % (SMILE, b"a" * MOST)),
    "a recording": chat(b'[{"type":"input_audio","input_audio":{"data":"%s"}}]' % (b"AAAA" * (MOST // 4 - 100))),
    "escapes": chat(b'"%s"' % (b"\\u4f60" * (2 * MIB // 6 - 100))),
    "keys": dumped(skydraft={f"k{number}": 0 for number in range(60_000)}),
    "digits": chat(more=b',"seed":%s' % (b"9" * 2_000_000)),
    "parameters": dumped(tools=[tool_of("chat/completions", "a", {"a": [[]] * 95_000})]),
    "calls": dumped(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}] * 250}] * 120),
    "turns": dumped(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 12}] * 4096),
    "choices": chat(b'"%s"' % (b"a b" * (2 * MIB // 3 - 100)), b',"n":8'),
    "calls of a namespace": dumped(
        input=[CALL, {"role": "user", "content": ""}] * 2048,
        tools=[{"type": "namespace", "name": "a", "tools": FUNCTIONS}],
    ),
    "blocks": dumped(
        messages=[{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a"}] * 7}] * 4096
    ),
}
PATHS = {"calls of a namespace": "/v1/responses", "blocks": "/v1/messages"}


@pytest.mark.parametrize("name", BODIES)
def test_no_body_stops_the_others_or_fills_the_memory(gateway_apart: Apart, name: str) -> None:
    gateway_apart.health()
    with gateway_apart.watched() as seen:
        status, reply = gateway_apart.post(BODIES[name], PATHS.get(name, "/v1/chat/completions"))
    assert status in (400, 413) and len(reply) < 4000
    assert not seen.wrong and seen.worst_s < LATE_S and seen.grew_mib < MUCH_MIB


def test_all_bodies_together_and_those_of_a_key_have_a_budget(tmp_path: Path) -> None:
    """Two dozen that were withheld took 655 MB."""
    keys = tmp_path / "keys"
    keys.write_text("eve key-of-eve-is-long-enough\nann key-of-ann-is-long-enough\n")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 33000000\r\nx-api-key: "
    with apart(*TOYS, "--api-key-file", str(keys)) as running, ExitStack() as stack:

        def asked(name: str) -> int:
            return running.post(chat(more=b" " * MIB), **{"x-api-key": f"key-of-{name}-is-long-enough"})[0]

        replies = list[bytes]()
        with running.watched() as seen:
            for _ in range(12):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=30))
                with suppress(OSError):
                    client.sendall(head + b"key-of-eve-is-long-enough\r\n\r\n" + b" " * (31 * MIB))
                client.setblocking(False)
                with suppress(BlockingIOError, ConnectionError):
                    replies.append(client.recv(12))
        assert replies and set(replies) == {b"HTTP/1.1 503"} and seen.grew_mib < MUCH_MIB
        assert asked("ann") == 200
        stack.close()
        running.wait_until(lambda: asked("eve") == 200)


@contextmanager
def strangers(port: int, num: int, says: bytes = b"") -> Iterator[None]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    with ExitStack() as stack:
        for _ in range(num):
            each = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            each.sendall(says)
        yield


@pytest.mark.parametrize("says", [b"", b"GET /page/main.js HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_idle_connections_keep_nobody_waiting(says: bytes) -> None:
    with apart() as running, strangers(running.port, 700, says):
        assert [running.health() for _ in range(3)] == [200] * 3


def test_without_more_files_it_accepts_nobody_and_goes_on_once_there_are_some() -> None:
    running = Apart(*TOYS)  # it logs what it could not accept, as errors
    resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (80, 80))
    with strangers(running.port, 120):
        running.wait_until(lambda: "Too many open files" in running.printed)
    assert running.health() == 200
    assert running.stop()[0] == 0


def test_one_key_leaves_places_and_turns_to_the_others() -> None:
    pair, go = toy_pair(), threading.Event()
    waiting(pair.edge, lambda: go.wait(PATIENCE_S))
    request = GenerateRequest(asked("a"), make_plan("edge"), DecodingParams(max_new_tokens=1))

    async def hogged() -> None:
        desk = Desk(pair, 3, 29, has_keys=True)
        with pytest.raises(Refusal):
            for _ in range(9):
                desk.submit([request] * 4, "eve")
        assert desk.num_running == 2 and desk.num_waiting <= 18  # whose answers may never end
        _, events = desk.submit([request] * 8, "ann")
        assert desk.num_running == 3
        go.set()
        ended = 0
        while ended < 8:
            ended += isinstance((await asyncio.wait_for(events.get(), PATIENCE_S))[1], Ended)
        desk.close()

    asyncio.run(hogged())


@pytest.mark.parametrize("depth", [100, 990, 50_000])
@pytest.mark.parametrize("inner", [b'"\\u0041"', b"1"])
def test_depth_is_no_failure_of_the_gateway(gateway_apart: Apart, depth: int, inner: bytes) -> None:
    deep = chat(more=b',"tools":[%s]' % (b'{"a":' * depth + inner + b"}" * depth))
    assert gateway_apart.post(deep)[0] in (200, 400) and gateway_apart.post(chat())[0] == 200


def test_servers_that_differ_are_an_error_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = TargetChanged("One of the servers runs another model.")
    monkeypatch.setattr(api, "is_calibrated", Mock(side_effect=changed))
    with gateway() as running:
        reply = httpx.get(f"{running.v1}/models")
        assert reply.status_code == 503 and "another model" in reply.json()["error"]["message"]
        assert httpx.get(f"{running.url}/health").status_code == running.chat().status_code == 200


FREE_S = 1.5  # half a second is meant, on a machine that is busy
STOPPED_S = 4.0  # two are meant


def long_chat(mode: str, text: str = "语速", **more: Any) -> bytes:
    """As much as the context holds."""
    length = 4050 - len(text)
    ours = {"min_new_tokens": length - 1}
    return json.dumps(plain("chat/completions", text, length, model=f"skydraft-{mode}", skydraft=ours) | more).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    running = Process()
    yield running
    running.stop()


LIMITED, LOST = RateLimited("slow down", retry_after_s=25), SessionNotFound("no such session")
STATES: dict[str, tuple[str, str, Exception | None, bool, bool]] = {
    # text, mode, what each verification raises, whether the server is stopped, whether the cloud is required
    "reading a long prompt": ("语" * 4000, "edge", None, False, False),
    "running": ("语", "lossless", None, False, False),
    "rate limit": ("语", "lossless", LIMITED, False, False),
    "opened again and again": ("语", "cloud", LOST, False, False),
    "stopped before the first word": ("语", "cloud", None, True, False),
    "stopped before the calibration": ("语", "auto", None, True, True),
}


@pytest.mark.parametrize("state", STATES)
def test_who_hangs_up_leaves_the_place_at_once(server: Process, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    text, mode, error, stops, requires = STATES[state]
    if error is not None:
        monkeypatch.setattr(OwnText, "verify", AsyncMock(side_effect=error))
    slow = waiting(open_toy("toy:drift=0.2", 4096, 6), lambda: time.sleep(0.05))
    slow.max_batch_rows = 16  # it would read the long prompt in 250 parts: 12 s
    with over(skydraft.connect(server.address, require=requires), slow, max_running=1) as running:
        if stops:
            server.signal(signal.SIGSTOP)
        try:
            desk = running.gateway.desk
            clients = [client(running.port, long_chat(mode, text)) for _ in range(2)]
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
    "reading": lambda port: client(port, long_chat("lossless", stream=True)),
    "waiting": lambda port: client(port, long_chat("lossless")),
}


def test_it_stops_whatever_its_clients_do() -> None:
    running = Apart(*TOYS)
    connected = [(name, connect(running.port)) for _ in range(4) for name, connect in CLIENTS.items()]
    time.sleep(0.3)
    status, took_s = running.stop()
    for name, each in connected:
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
