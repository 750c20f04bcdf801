"""The routes of the gateway: requests go to the desk, and its events become answers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from skydraft.errors import GrammarRefused
from skydraft.gateway.answers import PING, Answer, ChatAnswer, TextAnswer
from skydraft.gateway.chat_page import PageFiles
from skydraft.gateway.desk import Desk, Event, Events, GatewayMetrics, Ticket
from skydraft.gateway.doorkeeper import Authorize, Doorkeeper, Visit
from skydraft.gateway.messages import MessagesAnswer
from skydraft.gateway.pair import PREFIX, CloudHealth, ModelNames, Pair, model_card
from skydraft.gateway.refusals import Refusal, refusal_of
from skydraft.gateway.requests import Defaults, Order, check_sent, in_words_of, num_heard, order_of, read_body
from skydraft.gateway.responses import ResponsesAnswer
from skydraft.gateway.schema import ChatRequest, Sent, TextRequest, Translated
from skydraft.gateway.tokens import DetokenizeRequest, TokenizeRequest
from skydraft.prompts.pair import read_prompt
from skydraft.tracing import HEADER as TRACE_HEADER
from skydraft.tracing import is_traceparent

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
log = logging.getLogger("skydraft.gateway")


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Settings of the gateway. Times in seconds, sizes in bytes.

    `max_running` answers are written at a time, and `max_waiting` more may wait. A stream begins with its first token
    or after `hold_s`, so that an earlier failure can still be an HTTP error; then it sends a ping every `ping_s`.
    Pages of `origins` may use the gateway. A body must arrive within `body_s` and have at most `max_body_bytes`.
    `logs_prompts` writes prompts into the log.
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
    """OpenAI's interface over a pair. `app` is the ASGI application. With `authorize` there are keys, of several owners
    if `has_several` says so."""

    def __init__(
        self, pair: Pair, defaults: Defaults, options: GatewayOptions, authorize: Authorize | None = None,
        has_several: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self._is_shared = has_several if authorize else lambda: False
        self.pair, self._defaults, self._options = pair, defaults, options
        self.names = ModelNames(pair)
        self._cloud = CloudHealth(pair)
        self.desk = Desk(pair, options.max_running, options.max_waiting, has_keys=authorize is not None)
        self.metrics = GatewayMetrics(self.desk)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reading")
        cors = Middleware(
            CORSMiddleware, allow_origins=options.origins, allow_methods=["*"], allow_headers=["*"],
            allow_private_network=True,
        )  # fmt: skip
        posts = {
            "/v1/chat/completions": partial(self._answer, kind=ChatAnswer),
            "/v1/chat/completions/input_tokens": partial(self._count, kind=ChatAnswer),
            "/v1/completions": partial(self._answer, kind=TextAnswer),
            "/v1/responses": partial(self._answer, kind=ResponsesAnswer),
            "/v1/responses/input_tokens": partial(self._count, kind=ResponsesAnswer),
            "/v1/messages": partial(self._answer, kind=MessagesAnswer),
            "/v1/messages/count_tokens": partial(self._count, kind=MessagesAnswer),
            "/tokenize": partial(self._convert, body_of=TokenizeRequest),
            "/detokenize": partial(self._convert, body_of=DetokenizeRequest),
        }
        gets = {
            "/v1/models": self._models,
            "/v1/models/{name}": self._model,
            "/health": self._health,
            "/metrics": self._metrics,
        }
        self._served = ", ".join([*posts, *gets])
        self.app = Starlette(
            routes=[
                *(Route(path, self._refusing(answer), methods=["POST"]) for path, answer in posts.items()),
                *(Route(path, self._refusing(answer)) for path, answer in gets.items()),
                Mount("/page", files := PageFiles()),
                Route("/", files.index),
            ],
            middleware=[
                *([cors] if options.origins else []),
                Middleware(Doorkeeper, authorize, options.origins, options.max_body_bytes, options.body_s),
            ],
            exception_handlers={404: self._not_found, 405: self._not_found},
        )

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
        self.desk.close()

    def _refusing(self, answer: Callable[..., Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The same with its errors as answers, in the shape of its interface."""
        kind = getattr(answer, "keywords", {}).get("kind", ChatAnswer)

        async def endpoint(request: Request) -> Response:
            try:
                return await answer(request)
            except Exception as error:
                refusal = self.refuse(error)
                return JSONResponse(kind.refused(refusal), refusal.status, refusal.headers)

        return endpoint

    async def _order(self, request: Request, own: Sent) -> tuple[ChatRequest | TextRequest, Order]:
        """What a body is as one of OpenAI's completions, and what it asks for. Raises Refusal or UsageError."""
        visit: Visit = request.state.visit
        body = own.as_chat() if isinstance(own, Translated) else own
        await self._reading(visit.is_long, check_sent, visit.body, body)
        is_long, visit.body = visit.is_long or bool(body.recordings), bytearray()
        if body.model == PREFIX and not body.choice.local_only:
            await self._look()
        order = await self._reading(is_long, order_of, body, self.pair.edge, self.names, self._defaults)
        visit.take(num_heard(order.requests))
        trace = request.headers.get(TRACE_HEADER, "")
        more: dict[str, Any] = {
            # Of a label's conversations; a hash, since the cloud must not learn the label.
            "cache_scope": hashlib.sha256(repr((visit.label, body.cache_salt)).encode()).hexdigest()[:16],
            "shares_target": self._is_shared(),
            "traceparent": trace if trace and is_traceparent(trace) else "",
        }
        requests, anew = ([replace(each, **more) for each in some] for some in (order.requests, order.anew))
        return body, replace(order, requests=requests, anew=anew)

    async def _count(self, request: Request, kind: type[Answer]) -> Response:
        own = await self._body(request, kind.reads)
        with in_words_of(own.names):
            _, order = await self._order(request, own)
            first = order.requests[0]
            prompts = await self._reading(True, partial(read_prompt, self.pair.edge, first.messages, tools=first.tools))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompts.edge.token_ids)})

    async def _body(self, request: Request, kind: type[B]) -> B:
        visit: Visit = request.state.visit
        return await self._reading(visit.is_long, read_body, visit.body, kind)

    async def _convert(self, request: Request, body_of: type[TokenizeRequest | DetokenizeRequest]) -> Response:
        body = await self._body(request, body_of)
        edge = self.pair.edge
        return JSONResponse(await self._reading(True, body.answer, edge.vocab, edge.context_len))

    async def _answer(self, request: Request, kind: type[Answer]) -> Response:
        own, label = await self._body(request, kind.reads), request.state.visit.label
        with in_words_of(own.names):
            body, order = await self._order(request, own)
            answer = kind(own, body, order.requests, self.pair.edge.vocab)
            tickets, events = self.desk.submit(
                order.requests, label, streams=bool(own.stream), reader=order.reader, anew=order.anew
            )
            extra: dict[str, Any] = {"model": body.model, "label": label, "choices": len(order.requests)}
            if self._options.logs_prompts:
                extra["prompt"] = [message.content for message in order.requests[0].messages]
            log.info("asked", extra=extra)
            writing = _Writing(self, answer, tickets, events)
            try:
                return await (writing.stream(request) if own.stream else writing.whole(request))
            except GrammarRefused as error:
                refusal = refusal_of(error)
                refusal.param = body.grammar_field
                raise refusal from error

    async def _reading(self, takes_long: bool, read: Callable[..., T], *given: Any) -> T:
        """Call `read`, what takes long in a thread: one for all, so that such requests slow each other and no other."""
        return (
            await asyncio.get_running_loop().run_in_executor(self._reader, read, *given) if takes_long else read(*given)
        )

    async def _look(self) -> None:
        if not self.names.is_default_known:
            await asyncio.to_thread(self.names.look)  # may send a request to the cloud

    def refuse(self, error: Exception) -> Refusal:
        refusal = refusal_of(error)
        self.metrics.refused(refusal.status)
        return refusal

    async def _not_found(self, request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        unknown = f"Unknown path. Served: {self._served}."
        refusal = Refusal(status, unknown if status == 404 else f"{request.method} is not allowed here.")
        return JSONResponse(refusal.body, status)

    async def _models(self, request: Request) -> Response:
        pair, names = self.pair, self.names
        await self._look()
        ours = {
            "edge": pair.edge.name,
            "cloud": pair.cloud_name,
            "default_mode": names.default_mode,
            "modes": names.modes,
            "takes_audio": pair.edge.takes_audio,
            "context": pair.edge.context_len,
        }
        return JSONResponse({"object": "list", "data": [model_card(name) for name in names.all], "skydraft": ours})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.names.mode_of(name)
        return JSONResponse(model_card(name))

    async def _health(self, request: Request) -> Response:
        state = await asyncio.to_thread(self._cloud.state)
        return JSONResponse({"status": "ok", "cloud": state})

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)


class _Writing:
    def __init__(self, gateway: Gateway, answer: Answer, tickets: list[Ticket], events: Events) -> None:
        self._gateway, self._answer, self._tickets, self._events = gateway, answer, tickets, events

    async def whole(self, request: Request) -> Response:
        """The complete answer. A client that hangs up ends it."""
        gone = asyncio.ensure_future(_gone(request))
        try:
            while not (self._answer.is_complete or gone.done()):
                await self._next(gone)
            return JSONResponse(self._answer.whole()) if self._answer.is_complete else Response(status_code=499)
        finally:
            gone.cancel()
            self._hang_up()

    def _take(self, index: int, event: Event) -> list[dict[str, Any]]:
        self._gateway.metrics.happened(event)
        return list(self._answer.take(index, event))

    async def stream(self, request: Request) -> Response:
        """The answer in chunks. Raises errors from before the first token."""
        begun: list[dict[str, Any]] = []
        gone = asyncio.ensure_future(_gone(request))
        until = time.monotonic() + self._gateway._options.hold_s  # then pings keep the client waiting
        try:
            while not (begun or self._answer.is_complete or gone.done()) and time.monotonic() < until:
                begun = await self._next(gone, until - time.monotonic())
        except BaseException:
            self._hang_up()
            raise
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return _Stream(self._chunks(begun), self._hang_up, media_type="text/event-stream", headers=headers)

    async def _next(self, gone: asyncio.Future[None], wait_s: float | None = None) -> list[dict[str, Any]]:
        """The chunks of the next event; none if it does not come in time or the client hangs up."""
        taking = asyncio.ensure_future(self._events.get())
        either: set[asyncio.Future[Any]] = {taking, gone}
        try:
            await asyncio.wait(either, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            return self._take(*taking.result()) if taking.done() else []
        finally:
            taking.cancel()  # the event stays in the queue

    async def _chunks(self, begun: list[dict[str, Any]]) -> AsyncIterator[bytes]:
        try:
            yield b"".join(map(self._answer.as_event, (*self._answer.first(), *begun)))
            for ticket in self._tickets:
                ticket.has_begun.set()
            while not self._answer.is_complete:
                try:
                    taken = await asyncio.wait_for(self._events.get(), self._gateway._options.ping_s)
                except TimeoutError:
                    yield PING
                    continue
                yield b"".join(map(self._answer.as_event, self._take(*taken)))
            for chunk in self._answer.last():
                yield self._answer.as_event(chunk)
        except Exception as error:
            yield self._answer.as_event(self._answer.failed(self._gateway.refuse(error)))
        finally:
            self._hang_up()
        yield self._answer.ending

    def _hang_up(self) -> None:
        for ticket in self._tickets:
            self._gateway.desk.cancel(ticket)


class _Stream(StreamingResponse):
    """A stream that calls `over` at its end, even if the client read no byte of it."""

    def __init__(self, content: AsyncIterator[bytes], over: Callable[[], None], **options: Any) -> None:
        super().__init__(content, **options)
        self._over = over

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()


async def _gone(request: Request) -> None:
    """Return when the client has hung up. Call this after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
