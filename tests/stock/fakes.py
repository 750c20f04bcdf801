"""A fake stock server in this process: a toy behind the HTTP of a program that many people run.

with fake("vllm") as server:
    server.url, server.model.asked
    server.faults.append(cut(3))      # what the next request gets; or server.fault_of, a function of the path
    server.kill(); server.start()     # on the same port

`drafting_vllm` is one that takes drafts: its steps, rows and requests are told to `skydraft_vllm.Drafts` as vLLM tells
them.
"""

import asyncio
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn
from skydraft_vllm import Drafts
from starlette.applications import Starlette
from starlette.requests import Request

from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from tests.serving import PATIENCE_S, Serving, free_port
from tests.stock.answering import Answering, Asked, Model, Run, Token
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
MAX_LEN = 512  # of the vLLM that takes drafts


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


def config(num_drafts: int = 7, vocab_size: int = 64, **parallel: int) -> Any:
    """What vLLM tells the class of itself."""
    ranks = {"rank": 0, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_index": 0} | parallel
    model = SimpleNamespace(get_vocab_size=lambda: vocab_size, max_model_len=MAX_LEN)
    speculative = SimpleNamespace(num_speculative_tokens=num_drafts, rejection_sample_method="standard")
    return SimpleNamespace(speculative_config=speculative, model_config=model, parallel_config=SimpleNamespace(**ranks))


class FakeModelRunner:
    """The rows of vLLM's batch. Its class is called as vLLM calls it, from a method of the runner."""

    def __init__(self, num_drafts: int = 7, vocab_size: int = 64) -> None:
        self.token_ids = np.zeros((128, MAX_LEN), np.int32)
        self.lengths = np.zeros(128, np.int32)
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=list[str](), num_prompt_tokens=np.zeros(128, np.int32))
        self.drafts: Any = Drafts(config(num_drafts, vocab_size))

    def step(self, rows: list[tuple[str, int, list[int]]], num_new: int = 1) -> list[list[int]]:
        """The drafts after a step of texts: (name, length of the prompt, all tokens). They may stand in any order."""
        for row, (name, prompt_len, token_ids) in enumerate(rows):
            self.token_ids[row, : len(token_ids)] = token_ids
            self.token_ids[row, len(token_ids) :] = 7  # of somebody else
            self.lengths[row] = len(token_ids)
            extra = {"skydraft": name} if name else None
            self.requests[f"r{name}"] = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))
            self.input_batch.num_prompt_tokens[row] = prompt_len
        self.input_batch.req_ids = [f"r{name}" for name, _, _ in rows]
        sampled = [[0] * num_new if len(token_ids) > prompt_len else [] for _, prompt_len, token_ids in rows]
        found = self.drafts.propose(sampled, self.lengths, self.token_ids, slot_mappings=None)
        assert isinstance(found, list) and len(found) == len(rows)
        return found


class DraftingVllm(Vllm):
    """Each request is a step of one row. `forwards` counts them; a step takes `token_s`. The tokens of `interval` steps
    come together."""

    def __init__(self, model: Model, *, token_s: float = 0.0, interval: int = 1) -> None:
        super().__init__(model, token_s=token_s)
        self.interval = interval
        self.runner = FakeModelRunner(7, model.engine.vocab.size)
        self.forwards = 0

    async def steps(self, run: Run) -> AsyncIterator[list[Token]]:
        name = (run.body.get("vllm_xargs") or {}).get("skydraft", "")
        tokens, text, drafts = self.model.write(run.asked, run.prompt, run.num, run.how), [*run.prompt], list[int]()
        step, held = list[Token](), list[Token]()
        while not step or not step[-1].ends:
            await asyncio.sleep(self.token_s)
            self.forwards += 1
            step = []
            for token in tokens:
                step.append(token)
                if token.ends or not drafts or drafts.pop(0) != token.id:
                    break
            text += [token.id for token in step]
            drafts = self.runner.step([(name, len(run.prompt), text)], len(step))[0]
            held += step
            if step[-1].ends or self.forwards % self.interval == 0:
                yield held
                held = []


@contextmanager
def drafting_vllm(engine: Engine, **how: Any) -> Iterator[tuple[Fake, DraftingVllm, str]]:
    """The server, its dialect, and where its port for drafts is."""
    dialect = DraftingVllm(Model(engine, "toy", block_len=16), **how)
    server = Fake(dialect)
    try:
        yield server, dialect, dialect.runner.drafts.port.address
    finally:
        server.kill()
        dialect.runner.drafts.port.close()
