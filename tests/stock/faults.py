"""What a server can do wrong, one request at a time. A fault lies about tokens and answers, or answers in the server's
place, bytes and all."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Message: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
App: TypeAlias = Callable[[Any, Receive, Send], Awaitable[None]]
Wire: TypeAlias = Callable[[App, Any, Receive, Send], Awaitable[None]]


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Fault:
    """`wire` answers in the server's place or stands around it; `token` is what the server calls a token that it wrote;
    an endless one never stops by itself."""

    wire: Wire | None = None
    token: Callable[[int], Any] = _same
    is_endless: bool = False


SOUND = Fault()


async def reply(send: Send, status: int, headers: dict[str, str], body: bytes, *, more: bool = False) -> None:
    named = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def refuses(status: int, body: str = '{"error": {"message": "not now", "code": 0}}', **headers: str) -> Fault:
    """An error of HTTP; `Retry_After="1"` becomes a header of that name."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def wire(app: App, scope: Any, receive: Receive, send: Send) -> None:
        await reply(send, status, {"content-type": "application/json"} | named, body.encode())

    return Fault(wire)


def says(body: bytes, kind: str = "text/html", status: int = 200, **headers: str) -> Fault:
    return refuses(status, body.decode(), Content_Type=kind, **headers)


def redirects(url: str, status: int = 307) -> Fault:
    return refuses(status, "", Location=url)


def silent() -> Fault:
    async def wire(app: App, scope: Any, receive: Receive, send: Send) -> None:
        await gone(receive)

    return Fault(wire)


def slow(seconds: float) -> Fault:
    async def wire(app: App, scope: Any, receive: Receive, send: Send) -> None:
        async def later(message: Message) -> None:
            await asyncio.sleep(seconds)
            await send(message)

        await app(scope, receive, later)

    return Fault(wire)


class Cut(Exception):
    """The connection is closed in the middle of an answer: uvicorn does so when the application fails."""


class HungUp(Exception):
    """The connection is closed before an answer; what it carries is sent at once."""


def hangs_up(after_s: float = 0.0) -> Fault:
    """Closes the connection, as if it had been idle for too long when the request came."""

    async def wire(app: App, scope: Any, receive: Receive, send: Send) -> None:
        await asyncio.sleep(after_s)
        raise HungUp

    return Fault(wire)


def _breaks(num_parts: int, ends: Callable[[Message, Receive, Send], Awaitable[None]]) -> Fault:
    """Says so many parts of the answer; the next one `ends` it."""

    async def wire(app: App, scope: Any, receive: Receive, send: Send) -> None:
        left = num_parts

        async def first(message: Message) -> None:
            nonlocal left
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name != b"content-length"]
                return await send({**message, "headers": kept})
            left -= 1
            if left < 0:
                await ends(message, receive, send)
            await send({**message, "more_body": True})

        await app(scope, receive, first)
        raise Cut

    return Fault(wire)


def cut(num_parts: int = 1, num_bytes: int = 0) -> Fault:
    """Breaks off after so many parts of the answer, and so many bytes of the next."""

    async def ends(message: Message, receive: Receive, send: Send) -> None:
        await send({**message, "body": message.get("body", b"")[:num_bytes], "more_body": True})
        raise Cut

    return _breaks(num_parts, ends)


def stalls(num_parts: int = 1) -> Fault:
    """Stops sending after so many parts of the answer, with the connection open."""
    return _breaks(num_parts, lambda message, receive, send: gone(receive))


def floods(part: bytes, kind: str = "text/event-stream", sent: list[int] | None = None, every_s: float = 0.0) -> Fault:
    """Sends this part again and again, until the client hangs up, gigabytes if need be. `sent` gets their sizes."""

    async def wire(app: App, scope: Any, receive: Receive, send: Send) -> None:
        left = asyncio.ensure_future(gone(receive))
        await reply(send, 200, {"content-type": kind}, b"", more=True)
        while not left.done():
            await send({"type": "http.response.body", "body": part, "more_body": True})
            if sent is not None:
                sent.append(len(part))
            await asyncio.sleep(every_s)

    return Fault(wire)


def gzip_bomb(num_bytes: int = 1 << 30, kind: str = "application/json") -> Fault:
    part = gzip.compress(b" " * (1 << 24))

    async def wire(app: App, scope: Any, receive: Receive, send: Send) -> None:
        headers = {"content-type": kind, "content-encoding": "gzip"}
        await reply(send, 200, headers, part * (num_bytes >> 24))

    return Fault(wire)


ENDLESS = Fault(is_endless=True)


def retells(change: Callable[[bytes], bytes]) -> Fault:
    """Passes each event of its stream, `data: ` and all, through `change`; what that gives may be several, or none."""

    async def wire(app: App, scope: Any, receive: Receive, send: Send) -> None:
        async def other(message: Message) -> None:
            if message["type"] == "http.response.body" and message.get("body"):
                message = {**message, "body": change(message["body"])}
            await send(message)

        await app(scope, receive, other)

    return Fault(wire)


def retells_json(change: Callable[[Any], Any]) -> Fault:
    """The same for what its events say; [DONE] stays."""

    def changed(event: bytes) -> bytes:
        if event.startswith(b"data: [DONE]"):
            return event
        return b"data: " + json.dumps(change(json.loads(event[5:]))).encode() + b"\n\n"

    return retells(changed)


def choices(change: Callable[[Any], Any]) -> Fault:
    """The same for each choice of an event of OpenAI's kind."""
    return retells_json(lambda event: event | {"choices": [change(each) for each in event["choices"]]})


def tells(*events: Any, done: bool = True) -> Fault:
    """These events in place of an answer, in one burst; with OpenAI's mark at the end if it is `done`."""
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    return says(b"".join([*lines, b"data: [DONE]\n\n" if done else b""]), "text/event-stream")


def bursts(num_events: int, ending: bytes = b"", *, breaks: bool = False) -> Fault:
    """Sends the first events of a stream in one piece, then `ending`; after that it ends, or the connection breaks."""

    async def wire(app: App, scope: Any, receive: Receive, send: Send) -> None:
        events = list[bytes]()

        async def kept(message: Message) -> None:
            if message["type"] == "http.response.body":
                events.append(message.get("body", b""))
            elif not breaks:
                await send(message)

        await app(scope, receive, kept)
        body = b"".join(events[:num_events]) + ending
        if breaks:
            head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(body) + 9}\r\n\r\n"
            raise HungUp(head.encode() + body)
        await send({"type": "http.response.body", "body": body})

    return Fault(wire)
