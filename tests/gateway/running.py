"""Gateways for tests: in this process, on a free port of loopback, over a toy pair or over one that writes what a test
says, as a model with tools would; or in a process of its own, watched from outside: answers, times and memory."""

import http.client
import json
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import numpy as np
import uvicorn

from skydraft.config import DecodingParams
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.engines.vocab import Vocab
from skydraft.gateway.app import Gateway, GatewayOptions
from skydraft.gateway.doorkeeper import Authorize
from skydraft.gateway.pair import Pair
from skydraft.gateway.requests import Defaults
from skydraft.gateway.server import Entrance, ListenOptions, listen, server_of

from ..serving import PATIENCE_S as PATIENCE_S
from ..serving import Serving
from ..starting import Started

PATIENCE_APART_S = 60.0
TOYS = ("--edge-model", "toy:drift=0.2", "--cloud-model", "toy")


class Running:
    def __init__(self, gateway: Gateway, url: str, server: uvicorn.Server) -> None:
        self.gateway = gateway
        self.server = server
        self.url = url
        self.v1 = f"{url}/v1"
        self.port = int(url.rpartition(":")[2])
        # Certificates, which nobody asks for here, take longer to read than most answers to come.
        self.client = httpx.Client(
            timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0), verify=False, trust_env=False
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(f"{self.v1}/{path}", json=body)

    def chat(self, content: Any = "语速", *, timeout_s: float = PATIENCE_S, **body: Any) -> httpx.Response:
        """One request, not streamed unless it says so."""
        messages = content if isinstance(content, list) and "role" in content[0] else None
        messages = messages or [{"role": "user", "content": content}]
        given = {"model": "skydraft-lossless", "messages": messages, "max_tokens": 16} | body
        return self.client.post(f"{self.v1}/chat/completions", json=given, timeout=timeout_s)

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: not self.gateway.desk.num_running and not self.gateway.desk.num_waiting)

    wait_until = staticmethod(Serving.wait_until)


def toy_pair(max_sequences: int = 6) -> Pair:
    return Pair(open_toy("toy:drift=0.2", 4096, max_sequences), open_toy("toy", 4096, max_sequences))


@contextmanager
def written_by(template: str) -> Iterator[Running]:
    """A gateway over toys with another chat template."""
    pair = toy_pair(2)
    for engine in (pair.edge, pair.cloud):
        engine.vocab.chat_template = template  # type: ignore[union-attr]
    with gateway(pair) as running:
        yield running


@contextmanager
def over(cloud: Cloud, draft: Engine | None = None, **options: Any) -> Iterator[Running]:
    """A gateway over a connection, which ends with it; `options` are those of `gateway`."""
    pair = Pair(draft or open_toy("toy:drift=0.2", 4096, 6), cloud)
    with closing(cloud), gateway(pair, **options) as running:
        yield running


@contextmanager
def gateway(
    pair: Pair | None = None, *, authorize: Authorize | None = None, defaults: Defaults | None = None, **options: Any
) -> Iterator[Running]:
    """Serve a pair; `options` are those of GatewayOptions."""
    made = Gateway(pair or toy_pair(), defaults or Defaults(DecodingParams()), GatewayOptions(**options), authorize)
    listening = listen(ListenOptions())
    server = server_of(Entrance(made), ListenOptions())
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    Running.wait_until(lambda: server.started or not thread.is_alive())
    running = Running(made, f"http://127.0.0.1:{listening.getsockname()[1]}", server)
    try:
        yield running
    finally:
        running.client.close()
        made.desk.stop()
        server.should_exit = True
        thread.join(PATIENCE_S)
        made.close()


def client(port: int, body: bytes, length: int = 0, path: str = "/v1/chat/completions") -> socket.socket:
    """One that has sent a request, or the beginning of one with this `length`."""
    made = socket.create_connection(("127.0.0.1", port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length or len(body)}\r\n\r\n"
    made.sendall(head.encode() + body)
    return made


def scripted_pair(steps: Seq[str], context_len: int = 4096, thought: str = "") -> Pair:
    """Models that write the step for the number of results there are, with tools, and the last one without.

    They stand for models that work with a coding agent: the agent's loop is real, and the words are written here.
    With a `thought` they think, and write that before each step.
    """
    return Pair(_scripted(steps, context_len, thought), _scripted(steps, context_len, thought))


def _scripted(steps: Seq[str], context_len: int, thought: str) -> ToyEngine:
    marks, num_bytes = [chr(0xE000 + number) for number in range(len(steps))], 256
    before = [f"<think>\n{thought}", "\n</think>\n\n"] if thought else []
    said = [part for step in steps for part in (*before, step)]
    pieces = [*(bytes([byte]) for byte in range(num_bytes)), *map(str.encode, [*marks, *said]), b"<eos>"]
    first, end, num_parts = num_bytes + len(steps), len(pieces) - 1, len(before) + 1
    template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% set ns = namespace(last=0) %}"
        "{% for m in messages if m['role'] == 'tool' %}{% set ns.last = ns.last + 1 %}{% endfor %}"
        f"{{% set last = [ns.last, {len(steps) - 1}] | min if tools else {len(steps) - 1} %}}"
        f"{{{{ {json.dumps(marks)}[last] }}}}{{# <tool_call> {'</think>' if thought else ''} #}}"
    )

    def encode(text: str) -> list[int]:
        ids = list[int]()
        for part in re.split(f"([{''.join(marks)}])", text):
            ids += [num_bytes + marks.index(part)] if part in marks else part.encode()
        return ids

    vocab = Vocab(pieces, encode, special_ids=[end], end_ids=[end], chat_template=template, eos_text="<eos>")
    by_last = np.zeros((vocab.size, vocab.size), np.float32)
    for number in range(len(said)):
        is_last = (number + 1) % num_parts == 0
        by_last[first + number, end if is_last else first + number + 1] = 100
    for number in range(len(steps)):
        by_last[num_bytes + number, first + number * num_parts] = 100
    engine = ToyEngine(vocab, by_last, context_len=context_len, name="scripted")
    engine.max_sequences = 6
    return engine


class Apart:
    """`skydraft gateway` with these options, that may have `limit_mib` of address space."""

    def __init__(self, *options: str, limit_mib: int = 3072) -> None:
        self._process = Started("gateway", *(options or TOYS), "--port", "0", stderr=subprocess.PIPE)
        self.printed = ""
        assert self._process.stderr is not None
        while "Ctrl-C stops." not in self.printed:
            line = self._process.stderr.readline()
            assert line, self.printed
            self.printed += line
        found = re.search(r"https?://localhost:(\d+)", self.printed)
        assert found
        self.port = int(found[1])
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.pid = self._process.child()
        resource.prlimit(self.pid, resource.RLIMIT_AS, (limit_mib << 20, limit_mib << 20))

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.printed += line

    def post(self, content: bytes | None, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, bytes]:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_APART_S)
        try:
            client.request("GET" if content is None else "POST", path, content, headers)
            reply = client.getresponse()
            return reply.status, reply.read()
        finally:
            client.close()

    def health(self) -> int:
        return self.post(None, "/health")[0]

    @contextmanager
    def watched(self) -> Iterator[SimpleNamespace]:
        """Ask for /health every 10 ms. In the end it says the longest wait, in seconds, anything but 200, and how much
        more memory was resident at some time, in MiB."""
        seen, over = SimpleNamespace(worst_s=0.0, wrong=list[int]()), threading.Event()

        def watch() -> None:
            while not over.wait(0.01):
                began = time.monotonic()
                status = self.health()
                seen.wrong += [] if status == 200 else [status]
                seen.worst_s = max(seen.worst_s, time.monotonic() - began)

        before = self._mib("VmRSS")
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            try:
                yield seen
            finally:
                over.set()
        watching.result()
        seen.grew_mib = self._mib("VmHWM") - before

    wait_until = staticmethod(Running.wait_until)

    def _mib(self, name: str) -> float:
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"{name}:\s+(\d+) kB", text)
        assert found
        return int(found[1]) / 1024

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Its status and the seconds that it took to end; `printed` is complete then."""
        began = time.monotonic()
        self._process.send_signal(number)
        status = self._process.wait(PATIENCE_APART_S)
        took_s = time.monotonic() - began
        self._reading.join(PATIENCE_APART_S)
        assert self._process.stderr is not None
        self._process.stderr.close()
        return status, took_s


@contextmanager
def apart(*options: str, **limits: Any) -> Iterator[Apart]:
    """A gateway apart; its end is asserted to be clean and without a traceback."""
    running = Apart(*options, **limits)
    try:
        yield running
    finally:
        status, _ = running.stop()
    assert status == 0 and "Traceback" not in running.printed, running.printed[-2000:]
