"""The routes: from a request to a desk, and from its events to an answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from skydraft.decoding.request import GenerateRequest
from skydraft.errors import GrammarRefused
from skydraft.gateway import sse
from skydraft.gateway.answers import Answer, Shape
from skydraft.gateway.desk import Desk, Event, Ticket
from skydraft.gateway.doorkeeper import Authorize, Doorkeeper
from skydraft.gateway.metrics import GatewayMetrics
from skydraft.gateway.pair import Pair
from skydraft.gateway.refusals import Refusal, refusal_of
from skydraft.gateway.requests import Defaults, chat_requests, text_requests
from skydraft.gateway.schema import AudioPart, ChatRequest, TextRequest
from skydraft.tracing import HEADER as TRACE_HEADER
from skydraft.tracing import is_traceparent

log = logging.getLogger("skydraft.gateway")
R = TypeVar("R", ChatRequest, TextRequest)
_LONG_BODY = 256 * 1024  # bytes; a longer one is not parsed in the event loop
_MAX_CHARS = 2 * 1024 * 1024  # of text: each choice reads all of it before it is known not to fit
_PAGE = Path(__file__).parent / "page"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """How the gateway behaves. Times in seconds, sizes in bytes.

    `max_running` answers are written at a time, `max_waiting` more may wait. A stream begins with its first token or
    after `hold_s`, so that what fails before can still be an error of HTTP; from then on it pings every `ping_s`.
    `origins` may use it from pages of their own. A body must come within `body_s` and have no more than
    `max_body_bytes`. `logs_prompts` writes prompts into the log.
    """

    max_running: int = 4
    max_waiting: int = 64
    hold_s: float = 45.0
    ping_s: float = 10.0
    origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 1024 * 1024
    body_s: float = 30.0
    logs_prompts: bool = False


class Gateway:
    """OpenAI's interface over a pair. `app` is the ASGI application."""

    def __init__(
        self, pair: Pair, defaults: Defaults, options: GatewayOptions, authorize: Authorize | None = None
    ) -> None:
        self._pair, self._defaults, self._options = pair, defaults, options
        self.desk = Desk(pair, options.max_running, options.max_waiting, has_keys=authorize is not None)
        self.metrics = GatewayMetrics(self.desk)
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._text, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name}", self._model),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/", self._index),
                Mount("/page", _Page(directory=_PAGE)),
            ],
            middleware=[
                *self._cors(),
                Middleware(
                    Doorkeeper,
                    authorize=authorize,
                    origins=options.origins,
                    max_body_bytes=options.max_body_bytes,
                    body_s=options.body_s,
                ),
            ],
            exception_handlers={404: _not_found, 405: _not_found},
        )

    def _cors(self) -> list[Middleware]:
        if not self._options.origins:
            return []
        origins = list(self._options.origins)
        return [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])]

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest, chat_requests)

    async def _text(self, request: Request) -> Response:
        return await self._answer(request, TextRequest, text_requests)

    async def _answer(
        self, request: Request, kind: type[R], read: Callable[[R, Pair, Defaults, str], list[GenerateRequest]]
    ) -> Response:
        try:
            body = await _read(request, kind)
            given = body, self._pair, self._defaults, _scope_of(request.scope["label"])
            # Not in the event loop where it decodes a recording, or asks the cloud what it runs.
            is_quick = self._pair.was_looked_at and not _has_audio(body)
            requests = read(*given) if is_quick else await asyncio.to_thread(read, *given)
            if is_traceparent(header := request.headers.get(TRACE_HEADER, "")):
                requests = [replace(each, traceparent=header) for each in requests]
            tickets, events = self.desk.submit(requests, request.scope["label"], streams=bool(body.stream))
        except Exception as error:
            return self._refuse(error)
        self._note(body, requests, request.scope["label"])
        answer = Answer(body.model, len(tickets), Shape.of(body, requests))
        writing = _Writing(self, answer, tickets, events)
        try:
            if body.stream:
                return await writing.stream(request)
            return await writing.whole(request)
        except GrammarRefused as error:
            field = body.grammar_field if isinstance(body, ChatRequest) else "skydraft.grammar"
            return self._refuse(Refusal(400, error.message, param=field))
        except Exception as error:
            return self._refuse(error)

    def _note(self, body: ChatRequest | TextRequest, requests: list[GenerateRequest], label: str) -> None:
        extra: dict[str, Any] = {"model": body.model, "label": label, "choices": len(requests)}
        if self._options.logs_prompts:
            extra["prompt"] = [message.content for message in requests[0].messages]
        log.info("asked", extra=extra)

    def refuse(self, error: Exception) -> Refusal:
        """What a client is told of an error, counted."""
        refusal = refusal_of(error)
        self.metrics.refused(refusal.status)
        return refusal

    def _refuse(self, error: Exception) -> Response:
        refusal = self.refuse(error)
        return JSONResponse(refusal.body, refusal.status, refusal.headers)

    async def _models(self, request: Request) -> Response:
        pair = self._pair
        ours = {
            "edge": pair.edge.name,
            "cloud": pair.cloud_name,
            "default_mode": await asyncio.to_thread(lambda: pair.default_mode),
            "modes": pair.modes,  # after the default was looked for
            "takes_audio": pair.edge.takes_audio,
            "context": pair.edge.context_len,
        }
        return JSONResponse({"object": "list", "data": [_model_card(name) for name in pair.names], "skydraft": ours})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            self._pair.mode_of(name)
        except Refusal as refusal:
            return self._refuse(refusal)
        return JSONResponse(_model_card(name))

    async def _health(self, request: Request) -> Response:
        state = await asyncio.to_thread(self._pair.cloud_state)
        return JSONResponse({"status": "ok", "cloud": state})

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def _index(self, request: Request) -> Response:
        return FileResponse(_PAGE / "index.html", headers=_PAGE_HEADERS)

    def close(self) -> None:
        """End what is under way and let go of the cloud."""
        self.desk.close()
        self._pair.close()


class _Writing:
    """One answer on its way to one client."""

    def __init__(
        self, gateway: Gateway, answer: Answer, tickets: list[Ticket], events: asyncio.Queue[tuple[int, Event]]
    ) -> None:
        self._gateway, self._answer, self._jobs, self._events = gateway, answer, tickets, events

    async def whole(self, request: Request) -> Response:
        """The answer when it is complete. A client that hangs up ends it."""
        writing = asyncio.ensure_future(self._complete())
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                return Response(status_code=499)  # nobody reads it
            writing.result()
            return JSONResponse(self._answer.whole())
        finally:
            for task in (writing, gone):
                task.cancel()
            self._hang_up()

    async def _complete(self) -> None:
        while not self._answer.is_complete:
            self._take(*await self._events.get())

    def _take(self, index: int, event: Event) -> list[dict[str, Any]]:
        self._gateway.metrics.happened(event)
        return list(self._answer.take(index, event))

    async def stream(self, request: Request) -> Response:
        """The answer in chunks. What fails before its first token is raised."""
        begun: list[dict[str, Any]] = []
        gone = asyncio.ensure_future(_gone(request))
        until = time.monotonic() + self._gateway._options.hold_s  # then pings keep the client waiting
        try:
            while not begun and not gone.done() and time.monotonic() < until:
                begun = await self._first_chunks(gone, until - time.monotonic())
        except BaseException:
            self._hang_up()
            raise
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        body = self._chunks(begun)
        return _Stream(body, self._hang_up, media_type="text/event-stream", headers=headers)

    async def _first_chunks(self, gone: asyncio.Future[None], wait_s: float) -> list[dict[str, Any]]:
        """What the next event brings, which may be nothing to show; nothing if it does not come, or the client goes."""
        taking = asyncio.ensure_future(self._events.get())
        either: set[asyncio.Future[Any]] = {taking, gone}
        try:
            await asyncio.wait(either, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            return self._take(*taking.result()) if taking.done() else []
        finally:
            taking.cancel()  # what was not taken stays in the queue

    async def _chunks(self, begun: list[dict[str, Any]]) -> AsyncIterator[bytes]:
        try:
            yield b"".join(map(sse.event, (*self._answer.first(), *begun)))
            for ticket in self._jobs:
                ticket.has_begun.set()
            while not self._answer.is_complete:
                async for taken in sse.next_or_ping(self._events, self._gateway._options.ping_s):
                    yield sse.PING if taken is None else b"".join(map(sse.event, self._take(*taken)))
            for chunk in self._answer.last():
                yield sse.event(chunk)
        except Exception as error:
            yield sse.event(self._gateway.refuse(error).body)
        finally:
            self._hang_up()
        yield sse.DONE

    def _hang_up(self) -> None:
        for ticket in self._jobs:
            self._gateway.desk.cancel(ticket)


class _Stream(StreamingResponse):
    """A stream that says when it is over, also where nobody ever read a byte of it."""

    def __init__(self, content: AsyncIterator[bytes], over: Callable[[], None], **options: Any) -> None:
        super().__init__(content, **options)
        self._over = over

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()


class _Page(StaticFiles):
    """The page's files, which nothing but the page may use."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(_PAGE_HEADERS)
        return response


async def _gone(request: Request) -> None:
    """Return when the client has hung up. The body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read(request: Request, kind: type[R]) -> R:
    """The body, checked. Raises Refusal."""
    data = await request.body()
    return _parse(data, kind) if len(data) < _LONG_BODY else await asyncio.to_thread(_parse, data, kind)


def _parse(data: bytes, kind: type[R]) -> R:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "The body is not valid JSON.") from error
    if not isinstance(found, dict):
        raise Refusal(400, "The body must be a JSON object.")
    if b"\\u" in data and not _is_text(found):
        raise Refusal(400, "The body holds half of a character (a surrogate alone).")
    try:
        body = kind.model_validate(found)
    except ValidationError as error:
        raise refusal_of(error) from error
    if (
        len(data) > _MAX_CHARS
        and (num_chars := len(json.dumps(found, ensure_ascii=False)) - _speech_chars(body)) > _MAX_CHARS
    ):
        message = f"There are {num_chars} characters beside recordings; at most {_MAX_CHARS} are read."
        raise Refusal(400, message, code="context_length_exceeded")
    return body


def _speech_chars(body: ChatRequest | TextRequest) -> int:
    contents = [message.content for message in body.messages] if isinstance(body, ChatRequest) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return sum(len(part.input_audio.data) for part in parts if isinstance(part, AudioPart))


def _is_text(found: Any) -> bool:
    """Whether every text in it can be encoded."""
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _scope_of(label: str) -> str:
    """Whose conversations may share KV. It goes to the cloud, whom labels are none of the business of."""
    return hashlib.sha256(label.encode()).hexdigest()[:16]


def _has_audio(body: ChatRequest | TextRequest) -> bool:
    return isinstance(body, ChatRequest) and any(isinstance(message.content, list) for message in body.messages)


def _model_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "skydraft"}


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    refusal = Refusal(status, "There is no such thing here." if status == 404 else "This is not asked for that way.")
    return JSONResponse(refusal.body, status)
