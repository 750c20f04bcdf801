"""HTTP to a server without skydraft: JSON goes out, JSON or a stream of events comes in. All runs on the event loop."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from skydraft.characters import one_line
from skydraft.edge.channel import Waiting, shared_loop
from skydraft.edge.stock.refusals import no_connection, refusal
from skydraft.errors import CloudFailure, CloudLost, CloudTimeout, OptionError, SkydraftError, TlsFailure

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")
_MAX_ANSWER, _MAX_LINE, _MAX_REFUSAL = 8 << 20, 1 << 20, 1 << 16  # bytes
_MAX_ITEMS = 200_000  # brackets and quotes of an answer, each of which can become an object
_CRUMB, _SPARE = 16, 1 << 16  # bytes that a chunk has on average, beyond a start: each costs as much as a long one
_CONNECT_S = 10.0
_LOOK_AGAIN_S = 0.3  # between two signs of life of a server whose answer takes long
_IDLE_S, _IDLE_TLS_S = 4.0, 60.0  # an unused connection is kept for this long; llama-server keeps it for 5 s
_MAX_OLD = 64  # clients with dead connections that are kept for other requests
_REST_S = 1.0  # for the end of an answer after its last event
_MAX_EVENTS = 64  # that wait to be read; the server waits then


class Wire:
    """The HTTP connections to one server, shared by all generations.

    `url` is the root of its own interface, without `/v1`. `heard_at`: the time of its last answer, by the loop's clock.
    """

    def __init__(self, url: str, key: str | None, tls_ca: bytes | None, *, is_here: bool) -> None:
        self.url = url
        self.heard_at = 0.0
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "skydraft"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._tls_ca = tls_ca
        self._is_here = is_here
        self._client: httpx2.AsyncClient | None = None
        self._closing: asyncio.Future[None] | None = None
        self._old: list[httpx2.AsyncClient] = []  # whose requests may be under way

    @property
    def client(self) -> httpx2.AsyncClient:
        """The client with its pool of connections, made at the first use. Raises OptionError."""
        if self._client is None:
            import httpx2

            trusted: ssl.SSLContext | bool = not self.url.startswith("http:")  # roots take 35 ms to read
            if self._tls_ca:
                trusted = ssl.create_default_context(cadata=self._tls_ca.decode("ascii"))
            try:
                self._client = httpx2.AsyncClient(
                    verify=trusted, headers=self._headers, follow_redirects=False,
                    trust_env=not self._is_here,  # a proxy does not lead back to this machine
                    timeout=httpx2.Timeout(None, connect=_CONNECT_S),  # `patiently` watches the rest
                    limits=httpx2.Limits(max_connections=None, keepalive_expiry=_IDLE_TLS_S if trusted else _IDLE_S),
                )  # fmt: skip
            except ImportError as error:
                raise OptionError("ALL_PROXY names a SOCKS proxy.", hint="Run: pip install socksio") from error
        return self._client

    def renew(self) -> None:
        """Make new connections from now on. Requests under way keep theirs."""
        if self._client is not None:
            self._old.append(self._client)
            self._client = None
            if len(self._old) > _MAX_OLD:
                self._closing = asyncio.ensure_future(_closed(self._old.pop(0)))

    async def close(self) -> None:
        """Drop all connections; the next request makes new ones."""
        clients, self._old, self._client = [*self._old, self._client], [], None
        for client in clients:
            if client is not None:
                await _closed(client)

    async def get(self, path: str, timeout_s: float) -> Any:
        """The JSON at a path. Raises a SkydraftError."""
        return await self._timed(self._ask("GET", path, None), timeout_s)

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        """The JSON answer to a JSON body. Raises a SkydraftError."""
        return await self._timed(self._ask("POST", path, body), timeout_s)

    async def post_patiently(self, path: str, content: bytes, life: str, waiting: Waiting) -> tuple[Any, int]:
        """The JSON answer and its bytes; the server must show signs of life at the path `life` meanwhile."""
        return await self.patiently(self._exchange("POST", path, content), life, waiting)

    async def look(self, path: str, timeout_s: float) -> float:
        """Milliseconds until any answer at a path. Raises CloudLost."""
        began, seen = time.perf_counter(), shared_loop().now()
        try:
            await self._timed(self._ask("GET", path, None), timeout_s)
        except CloudTimeout as error:
            if shared_loop().now() - seen < timeout_s / 2:  # this process was stopped meanwhile
                return await self.look(path, timeout_s)
            raise CloudLost(f"no sign of life in {timeout_s:g} s.") from error
        except (CloudLost, TlsFailure):
            raise
        except SkydraftError:  # it answers, if only with an error
            pass
        return (time.perf_counter() - began) * 1e3

    async def patiently(self, work: Awaitable[T], life: str, waiting: Waiting) -> T:
        """The result of `work` within the times of `waiting`. Raises CloudTimeout, or CloudLost for a dead server."""
        now = shared_loop().now
        began, pause_s = now(), waiting.quick_s
        task = asyncio.ensure_future(work)
        looking: asyncio.Future[float] | None = None
        try:
            while not (await asyncio.wait((task,), timeout=pause_s))[0]:
                if now() - began >= waiting.timeout_s:
                    raise CloudTimeout("no answer in time.")
                looking = asyncio.ensure_future(self.look(life, waiting.ping_s))
                await asyncio.wait((task, looking), return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    looking.result()
                    pause_s = min(_LOOK_AGAIN_S, max(began + waiting.timeout_s - now(), 0.0))
            return task.result()
        finally:
            for each in (task, looking):
                if each is not None:
                    each.cancel()
                    each.add_done_callback(_seen)

    @asynccontextmanager
    async def answering(self, method: str, path: str, content: bytes | None) -> AsyncIterator[httpx2.Response]:
        """The response to a request, once its status says yes. Raises a SkydraftError, also for what the block raises
        about the connection."""
        import httpx2

        try:
            async with aclosing(await self._responding(method, path, content)) as response:
                self.heard_at = shared_loop().now()
                if response.status_code != 200:
                    raise refusal(response.status_code, response.headers, await _start(response))
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise CloudFailure("The server sends compressed answers though it was asked not to.")
                yield response
        except (ssl.SSLError, httpx2.ConnectError) as error:
            raise no_connection(error) from error
        except httpx2.TimeoutException as error:
            raise CloudLost("no connection in time.") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise CloudLost(f"the connection broke ({one_line(str(error)) or type(error).__name__}).") from error
        except RuntimeError as error:  # the client was closed meanwhile
            raise CloudLost("the connection was closed.") from error

    async def _responding(self, method: str, path: str, content: bytes | None) -> httpx2.Response:
        """The response once its headers are there.

        A request on a connection that the server has just closed is sent again: llama-server closes one in about ten
        after a stream, and does not say so.
        """
        import httpx2

        client = self.client
        headers = {"Content-Type": "application/json"} if content is not None else {}
        request = client.build_request(method, self.url + path, content=content, headers=headers)
        try:
            return await client.send(request, stream=True)
        except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
            return await client.send(request, stream=True)

    async def _exchange(self, method: str, path: str, content: bytes | None) -> tuple[Any, int]:
        async with self.answering(method, path, content) as response:
            data = bytearray()
            async for chunk in _chunks(response):
                data += chunk
                if len(data) > _MAX_ANSWER:
                    raise CloudFailure(f"The server sends an answer of more than {_MAX_ANSWER >> 20} MiB.")
        return parsed(bytes(data)), len(data)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        answer, _ = await self._exchange(method, path, None if body is None else as_json(body))
        return answer

    async def _timed(self, work: Awaitable[T], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError as error:
            raise CloudTimeout(f"no answer in {timeout_s:g} s.") from error


class Events:
    """The events of one streamed answer. They are read as they come, so that none waits for the edge."""

    def __init__(self, wire: Wire, path: str, content: bytes, life: str) -> None:
        self.bytes_up, self.bytes_down = len(content), 0
        self._wire = wire
        self._life = life
        self._has_ended = False
        self._queue: asyncio.Queue[Any] = asyncio.Queue(_MAX_EVENTS)
        self._task = asyncio.ensure_future(self._read(path, content))

    async def _read(self, path: str, content: bytes) -> None:
        last: Any = None
        try:
            async with self._wire.answering("POST", path, content) as response:
                lines = self._lines(response)
                async for line in lines:
                    data = _data(line)
                    if data == b"[DONE]":
                        break
                    if data:
                        await self._queue.put(data)  # parsed when it is read: it may become much more
                await self._queue.put(None)
                self._has_ended = True
                with suppress(TimeoutError, SkydraftError):
                    async with asyncio.timeout(_REST_S):  # a whole answer leaves its connection usable
                        async for _ in lines:
                            pass
                return
        except SkydraftError as error:
            last = error
        if not self._has_ended:
            await self._queue.put(last)

    async def _lines(self, response: httpx2.Response) -> AsyncIterator[bytes]:
        held = bytearray()
        async for chunk in _chunks(response):
            self._wire.heard_at = shared_loop().now()
            self.bytes_down += len(chunk)
            held += chunk
            if b"\n" in chunk:
                *lines, held = held.split(b"\n")
                for line in lines:
                    yield bytes(line.strip())
            if len(held) > _MAX_LINE:
                raise CloudFailure("The server sends an event that does not end.")
        yield bytes(held.strip())

    async def next(self, waiting: Waiting) -> Any:
        """The next event; None at the end. Raises a SkydraftError."""
        return self.read(await self.arriving(waiting))

    async def arriving(self, waiting: Waiting) -> Any:
        """What comes next, to `read`. Raises a SkydraftError if nothing comes within the times of `waiting`."""
        return self._queue.get_nowait() if self.has_more else await self._wait(waiting)

    def read(self, came: Any) -> Any:
        """The event that came; None for the end. Raises a SkydraftError, also the one that ended the answer."""
        if came is None or isinstance(came, SkydraftError):
            self._queue.put_nowait(came)  # so it ends here, whoever asks again
        if isinstance(came, SkydraftError):
            raise came
        return came and parsed(came)

    async def _wait(self, waiting: Waiting) -> Any:
        return await self._wire.patiently(self._queue.get(), self._life, waiting)

    @property
    def has_more(self) -> bool:
        """Whether an event, or the end, has come already."""
        return not self._queue.empty()

    def unread(self) -> Any:
        """An event that has come and that nobody has read; None if there is none."""
        event = self._queue.get_nowait() if self.has_more else None
        return parsed(event) if isinstance(event, bytes) else None

    def close(self) -> None:
        """Break the answer off, unless it is whole: the server stops writing."""
        if not self._has_ended:
            self._task.cancel()
        self._task.add_done_callback(_seen)


def _data(line: bytes) -> bytes:
    """The event in a line of an answer; empty if it holds none, such as a comment.

    Some servers send an error as the field "error" or bare, and a whole answer though they were asked for events.
    """
    if line.startswith(b"{"):
        return line
    name, _, data = line.partition(b":")
    data = data.strip()
    return data if name in (b"data", b"error") and not data.startswith(b":") else b""


def as_json(body: Mapping[str, Any]) -> bytes:
    """A body as it is sent: without spaces."""
    return json.dumps(body, separators=(",", ":")).encode()


def parsed(data: bytes) -> Any:
    """The JSON value. Raises CloudFailure."""
    if sum(map(data.count, (b"[", b"{", b'"'))) > _MAX_ITEMS:
        raise CloudFailure(f"The server sent an answer of more than {_MAX_ITEMS} brackets and quotes.")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CloudFailure("The server sent an answer that is not JSON.") from error


async def _chunks(response: httpx2.Response) -> AsyncIterator[bytes]:
    """The body as it comes. Raises CloudFailure for one in crumbs."""
    spare = _SPARE
    async for chunk in response.aiter_raw():
        spare += len(chunk) - _CRUMB
        if spare < 0:
            raise CloudFailure("The server sends its answer in pieces of a few bytes.")
        yield chunk


async def _start(response: httpx2.Response) -> bytes:
    data = bytearray()
    async for chunk in _chunks(response):
        data += chunk
        if len(data) >= _MAX_REFUSAL:
            break
    return bytes(data[:_MAX_REFUSAL])


async def _closed(client: httpx2.AsyncClient) -> None:
    with suppress(Exception):
        await client.aclose()


def _seen(task: asyncio.Future[Any]) -> None:
    _ = task.cancelled() or task.exception()
