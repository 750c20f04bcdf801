"""HTTP to a server without skydraft: send JSON, receive JSON or a stream of events. All runs on the event loop."""

from __future__ import annotations

import asyncio
import codecs
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from skydraft.characters import one_line
from skydraft.edge.channel import Waiting, seen, shared_loop, sign_of_life, watch
from skydraft.edge.stock.ledger import Ledger, Request
from skydraft.edge.stock.refusals import NOT_READY, no_connection, refusal
from skydraft.edge.tls import trusting
from skydraft.errors import CloudFailure, CloudLost, CloudTimeout, OptionError, SkydraftError, TlsFailure, within

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")
_CONNECT_S = 10.0
_IDLE_S, _IDLE_TLS_S = 4.0, 60.0  # keep an unused connection this long; llama-server closes it after 5 s
_MAX_ANSWER, _MAX_LINE, _MAX_REFUSAL = 8 << 20, 1 << 20, 1 << 16  # bytes
_NO_HTTP = "illegal request line", "the answer is not HTTP; the address of skydraft serve has no http://"  # h11's words
_STALE_S = 1.0  # a connection that the server closed earlier fails within this time
_REST_S = 1.0  # timeout for the rest of an answer after its last event
_MAX_EVENTS = 64  # unread events; beyond them the server has to wait


class Pool:
    """The connections, shared by all generations. `heard_at` is the loop's time of the server's last answer."""

    def __init__(self, url: str, key: str | None, tls_ca: bytes | None, *, is_here: bool) -> None:
        self.heard_at = 0.0
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "skydraft"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._is_plain = url.startswith("http:")
        self._tls_ca, self._is_here = tls_ca, is_here
        self._client: httpx2.AsyncClient | None = None
        self._lent: Counter[httpx2.AsyncClient] = Counter()  # requests under way
        self._known: WeakSet[Any] = WeakSet()  # connections that have carried an answer
        self._asked: WeakSet[Any] = WeakSet()  # the known connections when the server last described itself

    @property
    def client(self) -> httpx2.AsyncClient:
        if self._client is None:
            import httpx2

            trusted: ssl.SSLContext | bool = not self._is_plain  # loading the roots takes 35 ms
            if self._tls_ca:
                trusted = trusting(self._tls_ca)
            limits = httpx2.Limits(max_connections=None, keepalive_expiry=_IDLE_S if self._is_plain else _IDLE_TLS_S)
            # A client with its own transport ignores proxies: none leads back to this machine.
            direct = httpx2.AsyncHTTPTransport(verify=trusted, limits=limits) if self._is_here else None
            try:
                self._client = httpx2.AsyncClient(
                    verify=trusted, headers=self._headers, follow_redirects=False, transport=direct, limits=limits,
                    timeout=httpx2.Timeout(None, connect=_CONNECT_S),  # `patiently` limits the rest
                )  # fmt: skip
            except (ImportError, ValueError, httpx2.InvalidURL) as error:
                hint = "Check HTTP_PROXY, HTTPS_PROXY and ALL_PROXY. For socks5://HOST:PORT run: pip install socksio"
                raise OptionError("The environment names a proxy that cannot be used.", hint=hint) from error
        return self._client

    def asked(self) -> None:
        """Note that the server has described itself over the connections known now."""
        self._asked |= self._known

    @asynccontextmanager
    async def sending(self, request: Request, url: str) -> AsyncIterator[httpx2.Response]:
        """Yield the response once its headers are there. Close a replaced client after its last response."""
        client = self.client
        self._lent[client] += 1
        try:
            async with aclosing(await self._responding(client, request, url)) as response:
                connection = response.extensions["network_stream"]
                request.is_new = connection not in self._asked
                self._known.add(connection)
                yield response
        finally:
            self._lent[client] -= 1
            if not self._lent[client]:
                del self._lent[client]
                if client is not self._client:
                    await _closed(client)

    async def _responding(self, client: httpx2.AsyncClient, request: Request, url: str) -> httpx2.Response:
        """Return the response. A request counts when its body is sent. If one fails at once on a reused connection,
        send it again: llama-server closes about one in ten connections after a stream, just as the next request comes.
        """
        import httpx2

        may_be_old = bool(self._known)
        while True:
            if len(request.text):
                request.ledger.budget.check()
            began, sent = shared_loop().now(), client.build_request("GET", url)
            if request.content is not None:
                headers = {"Content-Type": "application/json", "Content-Length": str(len(request.content))}
                sent = client.build_request("POST", url, content=request.going_out(), headers=headers)
            try:
                return await client.send(sent, stream=True)
            except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
                if not may_be_old or shared_loop().now() - began > _STALE_S:
                    raise
                may_be_old = False
                request.is_lost()

    async def renew(self) -> None:
        client, self._client = self._client, None
        if client is not None and client not in self._lent:
            await _closed(client)

    async def close(self) -> None:
        await self.renew()
        for client in [*self._lent]:
            await _closed(client)


@dataclass(frozen=True, slots=True)
class Wire:
    """Requests to one server, counted in `ledger`. Paths with `/v1/` are below `base`, others below `root`. A ping may
    take at least `look_s`."""

    root: str
    base: str
    pool: Pool
    ledger: Ledger
    look_s: float = 0.0

    def url_of(self, path: str) -> str:
        return self.base + path.removeprefix("/v1") if path.startswith("/v1/") else self.root + path

    async def ask(self, path: str, timeout_s: float, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON answer to a request that costs nothing. Raises a SkydraftError."""
        async with within(timeout_s, CloudTimeout(f"no answer in {timeout_s:g} s.")):
            return await self.whole(Request(self.ledger, path, None if body is None else as_json(body)))

    async def whole(self, request: Request) -> Any:
        try:
            async with self.answering(request) as response:
                data = await _start(response, request, _MAX_ANSWER + 1)
                if len(data) > _MAX_ANSWER:
                    raise CloudFailure(f"The server sends an answer of more than {_MAX_ANSWER >> 20} MiB.")
        except (CloudLost, CloudTimeout, asyncio.CancelledError):
            request.is_lost()
            raise
        return parsed(data)

    async def look(self, path: str, timeout_s: float) -> float:
        """Return the milliseconds until any answer at a path. Raises CloudLost or TlsFailure."""

        async def ask(timeout_s: float) -> None:
            try:
                await self.ask(path, timeout_s)
            except SkydraftError as error:
                if isinstance(error, CloudLost | TlsFailure):  # any other error is an answer
                    raise

        return await sign_of_life(ask, timeout_s)

    async def patiently(self, work: Awaitable[T], life: str, waiting: Waiting, began: float | None = None) -> T:
        """Return the result of `work` within the times of `waiting`, from `began` or from now. Raises CloudTimeout, or
        CloudLost for a dead server."""
        now, task = shared_loop().now(), asyncio.ensure_future(work)
        began = now if began is None else began
        waiting = replace(waiting, ping_s=min(max(waiting.ping_s, self.look_s), waiting.timeout_s))
        tasks: list[asyncio.Future[Any]] = [task]
        try:
            if not (await asyncio.wait((task,), timeout=min(waiting.quick_s, began + waiting.timeout_s - now)))[0]:
                look = watch(partial(self.look, life), waiting, began, lambda: self.pool.heard_at)
                tasks.append(asyncio.ensure_future(look))
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    tasks[1].result()
            return task.result()
        finally:
            for each in tasks:
                each.cancel()
                each.add_done_callback(seen)

    @asynccontextmanager
    async def answering(self, request: Request) -> AsyncIterator[httpx2.Response]:
        """Yield the response to a request if its status is 200. Raises a SkydraftError, also for connection errors
        inside the block."""
        import httpx2

        try:
            async with self.pool.sending(request, self.url_of(request.path)) as response:
                if response.status_code != NOT_READY:
                    self.pool.heard_at = shared_loop().now()
                if response.status_code != 200:
                    raise refusal(response.status_code, response.headers, await _start(response, request, _MAX_REFUSAL))
                yield response
        except (ssl.SSLError, httpx2.ConnectError) as error:
            raise no_connection(error) from error
        except httpx2.TimeoutException as error:
            raise CloudLost("no connection in time.") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            says = one_line(str(error)).replace(*_NO_HTTP) or type(error).__name__
            raise CloudLost(f"the connection broke ({says}).") from error
        except RuntimeError as error:  # the client was closed meanwhile
            raise CloudLost("the connection was closed.") from error


class Events:
    """The events of one streamed answer. A task reads them as they come, so that the server need not wait."""

    def __init__(self, wire: Wire, request: Request, life: str) -> None:
        self.request, self._wire, self._life = request, wire, life
        self._has_ended = False
        self._queue: asyncio.Queue[bytes | SkydraftError | None] = asyncio.Queue(_MAX_EVENTS)
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async with self._wire.answering(self.request) as response:
                lines = self._lines(response)
                async for line in lines:
                    data = _data(line)
                    if data == b"[DONE]":
                        break
                    if data not in (b"", b"null"):
                        await self._queue.put(data)  # parsed later: parsed JSON can be much larger
                await self._queue.put(None)
                self._has_ended = True
                with suppress(TimeoutError, SkydraftError):
                    async with asyncio.timeout(_REST_S):  # reading to the end keeps the connection usable
                        async for _ in lines:
                            pass
        except SkydraftError as error:
            if not self._has_ended:
                await self._queue.put(error)

    async def _lines(self, response: httpx2.Response) -> AsyncIterator[bytes]:
        held = bytearray()
        async for chunk in _chunks(response, self.request):
            self._wire.pool.heard_at = shared_loop().now()
            held += chunk
            if b"\n" in chunk:
                *lines, held = held.split(b"\n")
                for line in lines:
                    yield bytes(line.strip())
            if len(held) > _MAX_LINE:
                raise CloudFailure("The server sends an event that does not end.")
        yield bytes(held.strip())

    async def next(self, waiting: Waiting, began: float | None = None) -> bytes | SkydraftError | None:
        """Return the next event, None for the end, or the error that ended the answer. Raises a SkydraftError if
        nothing comes within the times of `waiting`, like `Wire.patiently`."""
        if self.has_more:
            return self._queue.get_nowait()
        return await self._wire.patiently(self._queue.get(), self._life, waiting, began)

    @property
    def has_more(self) -> bool:
        return not self._queue.empty()

    def unread(self) -> bytes | None:
        """Return an event that has arrived, or None."""
        event = self._queue.get_nowait() if self.has_more else None
        return event if isinstance(event, bytes) else None

    def close(self) -> None:
        """Close the stream unless it is complete, so that the server stops writing."""
        if not self._has_ended:
            self._task.cancel()
        self._task.add_done_callback(seen)


def _data(line: bytes) -> bytes:
    """Return the event in a line, b"" without one. Some servers send an error as the field "error" or as bare JSON, or
    a whole answer instead of events."""
    line = line.removeprefix(codecs.BOM_UTF8)
    if line.startswith(b"{"):
        return line
    name, _, data = line.partition(b":")
    data = data.strip()
    return data if name in (b"data", b"error") and not data.startswith(b":") else b""


def as_json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CloudFailure("The server sent an answer that is not JSON.") from error


async def _chunks(response: httpx2.Response, request: Request) -> AsyncIterator[bytes]:
    """Yield the body's chunks, and count their bytes."""
    async for chunk in response.aiter_raw():
        request.came(len(chunk))
        yield chunk


async def _start(response: httpx2.Response, request: Request, most: int) -> bytes:
    """Return at most the first `most` bytes of the body."""
    data = bytearray()
    async for chunk in _chunks(response, request):
        data += chunk
        if len(data) >= most:
            break
    return bytes(data[:most])


async def _closed(client: httpx2.AsyncClient) -> None:
    with suppress(Exception):
        await client.aclose()
