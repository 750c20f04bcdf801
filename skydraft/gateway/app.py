"""The routes of the gateway: requests go to the desk, and its events become answers."""

import asyncio
import hashlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from skydraft.decoding.builder import prompted
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import ContextExceeded
from skydraft.gateway.answers import Answer
from skydraft.gateway.chats import ChatAnswer
from skydraft.gateway.completions import TextAnswer
from skydraft.gateway.desk import Desk, Event, Events, GatewayMetrics
from skydraft.gateway.doorkeeper import Authorize, Doorkeeper, Visit
from skydraft.gateway.messages import MessagesAnswer
from skydraft.gateway.pair import CloudHealth, ModelNames, Pair, model_card
from skydraft.gateway.refusals import Refusal, refusal_of
from skydraft.gateway.requests import Defaults, Order, order_of
from skydraft.gateway.responses import ResponsesAnswer
from skydraft.gateway.schema import read_ask
from skydraft.prompts.messages import asked

T = TypeVar("T")
log = logging.getLogger("skydraft.gateway")
_PAGE_HEADERS = {  # prevent other sites from using the page
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Limits and times of a gateway. It writes `max_running` answers at a time, and `max_waiting` more may wait.

    A stream starts with its first token or after `hold_s`, so that earlier failures are still HTTP errors. A silent
    stream sends a ping every `ping_s`. Pages of `origins` may use the gateway. A body must arrive within `body_s`.
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
    """`app` is the ASGI application. With `authorize` clients need keys; `has_several` tells whether these have several
    owners.

    Raises OptionError for defaults that the model's chats cannot follow.
    """

    def __init__(
        self, pair: Pair, defaults: Defaults, options: GatewayOptions, authorize: Authorize | None = None,
        has_several: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self._is_shared = has_several if authorize else lambda: False
        self.pair, self._defaults, self._options = pair, defaults, options
        if defaults.think != "auto" or defaults.params.think_budget:  # raises now what every chat would raise
            prompted(GenerateRequest(asked("a"), params=defaults.params, think=defaults.think), pair.edge)
        self.names = ModelNames(pair)
        self._cloud = CloudHealth(pair)
        self.desk = Desk(pair, options.max_running, options.max_waiting, has_keys=authorize is not None)
        self.metrics = GatewayMetrics(self.desk, pair)
        self._reader = ThreadPoolExecutor(2 if authorize else 1, thread_name_prefix="reading")
        self._reads = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by label: a key reads one long body at a time
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
        kind = getattr(answer, "keywords", {}).get("kind", ChatAnswer)

        async def endpoint(request: Request) -> Response:
            try:
                return await answer(request)
            except Exception as error:
                refusal = self.refuse(error)
                return JSONResponse(kind.refused(refusal), refusal.status, refusal.headers)

        return endpoint

    async def _order(self, request: Request, kind: type[Answer]) -> Order:
        """Return the requests of a body. Raises Refusal or UsageError."""
        visit: Visit = request.state.visit
        ask = await self._reading(visit, read_ask, visit.body, kind.reads)
        is_long, visit.body = visit.is_long or bool(ask.recordings), bytearray()
        # Separates the caches of labels. A hash, because the cloud must not learn the label.
        scope = hashlib.sha256(repr((visit.label, ask.body.cache_salt)).encode()).hexdigest()[:16]
        make = partial(order_of, cache_scope=scope, shares_target=self._is_shared())
        order = await self._reading(visit, make, ask, self.pair.edge, self.names, self._defaults, takes_long=is_long)
        # The decoded recordings, which all choices share.
        visit.take(sum(audio.samples.nbytes for message in order.requests[0].messages for audio in message.audio))
        return order

    async def _count(self, request: Request, kind: type[Answer]) -> Response:
        order, visit = await self._order(request, kind), request.state.visit
        read = await self._reading(visit, prompted, order.requests[0], self.pair.edge, takes_long=True)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(read.prompts.edge.token_ids)})

    async def _answer(self, request: Request, kind: type[Answer]) -> Response:
        order, visit = await self._order(request, kind), request.state.visit
        body, streams = order.ask.body, bool(order.ask.body.stream)
        tickets, events = self.desk.submit(order.requests, visit.label, order.ask.reader)
        for ticket in tickets:
            visit.at_end.callback(self.desk.cancel, ticket)
        extra: dict[str, Any] = {"model": body.model, "label": visit.label, "choices": len(tickets)}
        if self._options.logs_prompts:
            extra["prompt"] = [message.content for message in order.requests[0].messages]
        log.info("asked", extra=extra)
        return await _Writing(self, kind(order, self.pair.edge.vocab), events).reply(request, streams=streams)

    async def _reading(self, visit: Visit, read: Callable[..., T], *given: Any, takes_long: bool = False) -> T:
        """Call `read`, in a thread if it `takes_long` or the body is long. Each key uses that thread once at a time."""
        if not (takes_long or visit.is_long):
            return read(*given)
        async with self._reads[visit.label]:
            return await asyncio.get_running_loop().run_in_executor(self._reader, read, *given)

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
        await asyncio.to_thread(names.look)  # may send a request to the cloud
        listed = await asyncio.to_thread(lambda: names.all)  # reads adapters
        ours = {
            "edge": pair.edge.name,
            "cloud": pair.cloud_name,
            "default_mode": names.default_mode,
            "modes": names.modes,
            "takes_audio": pair.edge.takes_audio,
            "context": pair.edge.context_len,
        }
        return JSONResponse({"object": "list", "data": [model_card(name) for name in listed], "skydraft": ours})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.names.mode_of(name)
        return JSONResponse(model_card(name))

    async def _health(self, request: Request) -> Response:
        state = await asyncio.to_thread(self._cloud.state)
        auditor, (num_read, of) = self.pair.auditor, self.pair.progress
        audits = {"audits": {**auditor.counts, "newest": list(map(asdict, auditor.figures))}} if auditor else {}
        is_told = of and not self._is_shared()  # a key must not learn the length of another key's prompts
        reading = {"reading": {"tokens": num_read, "of": of}} if is_told else {}
        return JSONResponse({"status": "ok", "cloud": state} | audits | reading)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)


class _Writing:
    def __init__(self, gateway: Gateway, answer: Answer, events: Events) -> None:
        self._gateway, self._answer, self._events = gateway, answer, events

    def _take(self, index: int, event: Event) -> list[dict[str, Any]]:
        self._gateway.metrics.happened(event)
        return list(self._answer.take(index, event))

    async def reply(self, request: Request, *, streams: bool) -> Response:
        """Return the complete answer, or its stream. Return early if the client disconnects; the visit then ends the
        tickets.

        Raises errors; of a stream, only those before its first token.
        """
        hold_s = self._gateway._options.hold_s if streams else None  # after it, pings keep the connection open
        gone, begun = asyncio.ensure_future(_gone(request)), asyncio.ensure_future(self._begin(streams))
        try:
            await asyncio.wait({gone, begun}, timeout=hold_s, return_when=asyncio.FIRST_COMPLETED)
            chunks = begun.result() if begun.done() else []
        except ContextExceeded as error:
            if not streams or not self._answer.tells_length_in_stream:
                raise
            told = (*self._answer.first(), self._answer.failed(self._gateway.refuse(error)))
            return Response(b"".join(map(self._answer.as_event, told)), media_type="text/event-stream")
        finally:
            for each in (gone, begun):
                each.cancel()  # loses no event: unread ones stay in the queue
            await asyncio.wait({gone, begun})
        if not streams:
            return JSONResponse(self._answer.whole()) if self._answer.is_complete else Response(status_code=499)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._chunks(chunks), media_type="text/event-stream", headers=headers)

    async def _begin(self, streams: bool) -> list[dict[str, Any]]:
        """Return the first chunks of a stream, or the last ones of an answer in one piece."""
        chunks: list[dict[str, Any]] = []
        while not (self._answer.is_complete or (streams and chunks)):
            chunks = self._take(*await self._events.get())
        return chunks

    async def _chunks(self, begun: list[dict[str, Any]]) -> AsyncIterator[bytes]:
        try:
            yield b"".join(map(self._answer.as_event, (*self._answer.first(), *begun)))
            while not self._answer.is_complete:
                try:
                    taken = await asyncio.wait_for(self._events.get(), self._gateway._options.ping_s)
                except TimeoutError:
                    yield self._answer.ping()
                    continue
                yield b"".join(map(self._answer.as_event, self._take(*taken)))
            for chunk in self._answer.last():
                yield self._answer.as_event(chunk)
        except Exception as error:
            yield self._answer.as_event(self._answer.failed(self._gateway.refuse(error)))
        yield self._answer.ending


async def _gone(request: Request) -> None:
    """Return when the client has disconnected. Call this only after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class PageFiles(StaticFiles):
    def __init__(self) -> None:
        super().__init__(directory=Path(__file__).parent / "page")

    async def index(self, request: Request) -> Response:
        return await self.get_response("index.html", request.scope)

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(_PAGE_HEADERS)
        return response
