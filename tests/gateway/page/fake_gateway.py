"""A gateway without models: it serves the page, and answers as it was told.

A reply is a list of steps: a dict is an event, a number a pause in seconds, a threading.Event something to wait for,
CUT a connection that breaks. `Refusal` is an answer without a stream.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from skydraft.gateway.app import PageFiles

from ...serving import free_port
from ..running import Running

MODES = ("edge", "cloud", "lossless", "fluency", "quality", "answers", "auto")
CUT = object()
wait_for = Running.wait_until

Event = dict[str, Any]
Step = Event | float | threading.Event | object


@dataclass(frozen=True)
class Refusal:
    status: int
    message: str


Reply = Sequence[Step] | Refusal


def record(number: int, outcome: str = "verified", **values: Any) -> Event:
    plain = {"num_draft": 6, "num_accepted": 4, "num_committed": 5, "num_audited": 0, "num_agreed": 0}
    spent = {"wall_ms": 120.5, "rtt_ms": 20.0}
    return {"round": number, "outcome": outcome, "reason": "uncertain", **plain, **spent, **values}


def run(text: str, origin: str, number: int, *, reason: str = "", tokens: int = 1, **news: Any) -> Event:
    part = {"origin": origin, "round": number, "reason": reason, "num_tokens": tokens, **news}
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "skydraft": part}


def finish(how: str = "stop", **stats: float) -> Event:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": how}], "skydraft": {"stats": stats}}


def mistake(message: str, code: str | None = None) -> Event:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


def plain_reply(text: str, origin: str = "edge") -> list[Step]:
    return [run(text, origin, 0, tokens=3, record=record(0, "skipped", num_committed=3)), finish()]


def mixed_reply() -> list[Step]:
    """One run of each origin that a gated mode has, with the cloud there."""
    return [
        run("The sea ", "skipped", 0, tokens=2, record=record(0, "skipped", num_committed=2, num_draft=2)),
        run("turns to ", "accepted", 1, reason="uncertain", tokens=3),
        run("copper ", "recovered", 1, reason="uncertain",
            record=record(1, num_committed=4, num_accepted=3, num_audited=10, num_agreed=9)),
        run("as the sun ", "accepted", 2, reason="content", tokens=3),
        run("sinks.", "bonus", 2, reason="content", record=record(2, num_committed=4, num_audited=0)),
        finish(num_tokens=10, num_rounds=3, cloud_calls_per_token=0.2, target_written_per_token=0.2, tokens_per_s=18.4,
               ttft_ms=210.0),
    ]  # fmt: skip


class FakeGateway:
    """The server in its thread; `replies` are used up in their order, then every question is answered alike."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.reset()

    def reset(self) -> None:
        self.replies: list[Reply] = []
        self.by_model: dict[str, Reply] = {}  # for two questions at once, whose order nobody knows
        self.bodies: list[Event] = []
        self.deserted: list[int] = []  # numbers of the requests whose client went away
        self.cloud = "up"
        self.key = ""
        self.takes_audio = False

    def start(self) -> None:
        config = uvicorn.Config(self._app(), port=self.port, log_level="critical", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_for(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    def _app(self) -> Starlette:
        files = PageFiles()
        asked = [
            Route("/health", self._health), Route("/v1/models", self._checked(self._models)),
            Route("/v1/chat/completions", self._checked(self._chat), methods=["POST"]),
        ]  # fmt: skip
        return Starlette(routes=[Route("/", files.index), Mount("/page", files), *asked])

    def _checked(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
                return JSONResponse(mistake("There is no valid key.", "invalid_api_key"), 401)
            return await answer(request)

        return endpoint

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "cloud": self.cloud})

    async def _models(self, request: Request) -> Response:
        ids = ["skydraft", *(f"skydraft-{mode}" for mode in MODES)]
        known = {"edge": "tiny-edge", "cloud": "tiny-cloud", "default_mode": "quality", "modes": list(MODES),
                 "takes_audio": self.takes_audio, "context": 4096}  # fmt: skip
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "skydraft"} for name in ids]
        return JSONResponse({"object": "list", "data": data, "skydraft": known})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        reply = self.by_model.get(body["model"]) or (self.replies.pop(0) if self.replies else mixed_reply())
        if isinstance(reply, Refusal):
            return JSONResponse(mistake(reply.message), reply.status)
        return StreamingResponse(self._stream(number, body["model"], reply), media_type="text/event-stream")

    async def _stream(self, number: int, model: str, reply: Sequence[Step]) -> AsyncIterator[str]:
        head = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": 0, "model": model}
        begin = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}}
        ended = False
        try:
            yield ": ping\n\n"
            for step in [begin, *reply, usage]:
                if step is CUT:
                    ended = True
                    return
                if isinstance(step, threading.Event):
                    while not step.is_set():
                        await asyncio.sleep(0.01)
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    event: Any = step
                    yield f"data: {json.dumps({**head, **event}, ensure_ascii=False)}\n\n"
                    if "error" in event:
                        break
            yield "data: [DONE]\n\n"
            ended = True
        finally:
            if not ended:
                self.deserted.append(number)
