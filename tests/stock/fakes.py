"""A fake stock server in this process: a toy behind the HTTP of a program that many people run.

with fake("vllm") as server:
    server.url, server.model.asked
    server.faults.append(cut(3))      # what the next request gets; or server.fault_of, a function of the path
    server.kill(); server.start()     # on the same port
"""

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request

from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from tests.serving import PATIENCE_S, Serving, free_port
from tests.stock.answering import Answering, Asked, Model
from tests.stock.dialects import LlamaServer, OpenAI, Sglang, Vllm
from tests.stock.faults import SOUND, Cut, Fault, HungUp, Message, Receive, Send, gone

DIALECTS: dict[str, Callable[..., Answering]] = {
    "vllm": Vllm, "llama-server": LlamaServer, "sglang": Sglang, "openai": OpenAI,
    "openai, new": partial(OpenAI, refused=("max_tokens", "temperature")),
    "mistral": partial(OpenAI, refused=("stream_options",)),
}  # fmt: skip
IDS = ("vllm", "llama-server", "sglang")  # that are sent ids
HOSTS = ("openai", "openai, new", "mistral")
# Faults are for what generates; a handshake is spoilt by a fault for its own path.
GENERATING = ("/v1/completions", "/v1/chat/completions", "/completion", "/generate")


class Fake:
    """A running server. `faults` are what its next generations get, one each; `fault_of` is asked for the others and
    for all other paths."""

    def __init__(self, dialect: Answering) -> None:
        self.dialect, self.model = dialect, dialect.model
        self.faults: deque[Fault] = deque()
        self.fault_of: Callable[[str], Fault | None] = lambda path: None
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        config = uvicorn.Config(
            self._app(), host="127.0.0.1", port=self.port, log_level="critical", lifespan="off",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.wait_until(lambda: self._server.started or not self._thread.is_alive())
        assert self._server.started, "the fake server did not start"

    def kill(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            if (transport := getattr(connection, "transport", None)) is not None:
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(transport.abort)
        self._thread.join(PATIENCE_S)

    def become(self, engine: Engine, name: str = "another") -> None:
        """Be another model from now on, with nothing in the cache; what was asked stays counted."""
        asked = self.model.asked
        self.model = self.dialect.model = Model(engine, name, block_len=self.model.block_len)
        self.model.asked = asked

    def storm(self, fault: Fault | None) -> None:
        """Answer all that is to generate so, from now on."""
        self.fault_of = lambda path: fault if path in GENERATING else None

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: not self._server.server_state.tasks)

    wait_until = staticmethod(Serving.wait_until)

    def _run(self) -> None:
        self._loop = asyncio.new_event_loop()
        with socket.create_server(("127.0.0.1", self.port)) as listening:
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # tokens leave when they are written
            try:
                self._loop.run_until_complete(self._server.serve([listening]))
            finally:
                for task in asyncio.all_tasks(self._loop):
                    task.cancel()
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
                self._loop.close()

    def _app(self) -> Any:
        inner = Starlette(routes=self.dialect.routes())

        async def outer(scope: Any, receive: Receive, send: Send) -> None:
            came = await Request(scope, receive).body()
            fault = self._next_fault(scope["path"])
            self.model.asked.append(asked := Asked(scope["path"], None, came, is_sound=fault is SOUND))
            scope |= {"asked": asked, "fault": fault}
            again: list[Message] = [{"type": "http.request", "body": came, "more_body": False}]

            async def told() -> Message:
                return again.pop() if again else await receive()

            try:
                await (fault.wire(inner, scope, told, send) if fault.wire else inner(scope, told, send))
            except Cut:
                await _break_off(send)
            except HungUp as hung_up:
                self._hang_up(scope["client"], *hung_up.args)
                await gone(receive)

        return outer

    @property
    def generating(self) -> list[Asked]:
        """What it was asked to write."""
        return [asked for asked in self.model.asked if asked.path in GENERATING]

    def _hang_up(self, client: Any, last: bytes = b"") -> None:
        for connection in list(self._server.server_state.connections):
            if getattr(connection, "client", None) == client:
                connection.transport.write(last)  # type: ignore[union-attr]
                connection.transport.abort()  # type: ignore[union-attr]

    def _next_fault(self, path: str) -> Fault:
        if path in GENERATING and self.faults:
            return self.faults.popleft()
        return self.fault_of(path) or SOUND


async def _break_off(send: Send) -> None:
    """Return without the end of the answer: uvicorn then closes the connection."""
    message: Message = {"type": "http.response.body", "body": b"", "more_body": True}
    with suppress(Exception):
        await send(message)


@contextmanager
def fake(
    dialect: str = "vllm", engine: Engine | None = None, *, name: str = "toy", block_len: int | None = None, **how: Any
) -> Iterator[Fake]:
    """Serve an engine, the toy unless another is given. `how` are the dialect's own options."""
    blocks = block_len or (16 if dialect == "vllm" else 1)
    server = Fake(DIALECTS[dialect](Model(engine or open_toy("toy", 4096, 64), name, block_len=blocks), **how))
    try:
        yield server
    finally:
        server.kill()
