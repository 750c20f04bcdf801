"""Access: bearer tokens from a file, each with a label for the logs and a budget of rows; and calls by address."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc

from skydraft.cloud.connections import plain_host, shut_out
from skydraft.errors import NotAuthorized, OptionError, RateLimited
from skydraft.files import read_file, warn_if_shared
from skydraft.protocol.values import SERVICE

log = logging.getLogger("skydraft.cloud")
ANONYMOUS = "anonymous"
_MIN_TOKEN_CHARS = 16
_LINE = re.compile(r"(?P<label>[\w.@-]{1,64})\s+(?P<token>[\x21-\x7e]+)")
_RELOAD_S = 1.0
_BURST_S = 2.0  # seconds of its rate that a token may use at once
_MIN_BURST_ROWS = 64.0  # but always a whole block
# gRPC hands over each call, also a cancelled one, and each takes the event loop 0.2 to 0.7 ms.
_CALLS_PER_S = 400  # of one address; a server manages 1,000 to 5,000
_CALLS_OF_KNOWN = 20  # of one connection with a session; a device pings 3 times a second, however many texts it has
_OUT_S = 5.0
_MOST_OUT = 64  # addresses
# gRPC cancels the calls beyond these.
MOST_PENDING = (("grpc.server.max_pending_requests", 400), ("grpc.server.max_pending_requests_hard_limit", 400))
RpcContext: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]
Method: TypeAlias = Callable[[Any, RpcContext], Awaitable[None]]  # takes the requests and the call


class Keyring:
    """The tokens of a file with lines `LABEL TOKEN`; `#` begins a comment. Changes are seen within a second.

    Without a file every client is "anonymous". Raises OptionError for a file that is unreadable, wrong or empty.
    If the file becomes unreadable or wrong later, an error is logged and the old tokens stay. An empty one refuses all.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._looked_at = clock()
        self._stamp = _stamp(path) if path else None
        self._labels = _read(path) if path else {}
        self._had_several = False
        if path and not self._labels:
            raise OptionError(
                f"The token file {path} holds no tokens, so every client would be refused.",
                hint="Write lines: LABEL TOKEN.",
            )
        if path:
            warn_if_shared(path)

    @property
    def has_tokens(self) -> bool:
        """Whether tokens distinguish the callers."""
        return self._path is not None

    def has_several(self) -> bool:
        """Whether it has, or had, tokens of several labels."""
        self._had_several = self._had_several or len(set(self._labels.values())) > 1
        return self._had_several

    def label(self, authorization: str | None) -> str:
        """The label of the token in an authorization header. Raises NotAuthorized."""
        if self._path is None:
            return ANONYMOUS
        self._reload(self._path)
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise NotAuthorized("This server requires a token.", hint="Give one with --cloud-token-file.")
        given = token.strip().encode()
        # Every token is compared, each in constant time, so the duration reveals nothing.
        labels = [label for known, label in self._labels.items() if hmac.compare_digest(known.encode(), given)]
        if not labels:
            raise NotAuthorized("This server does not know this token.", hint="Ask the operator of the server.")
        return labels[0]

    def _reload(self, path: Path) -> None:
        now = self._clock()
        if now - self._looked_at < _RELOAD_S:
            return
        self._looked_at = now
        stamp = _stamp(path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._labels = _read(path)
                log.info("tokens read", extra={"tokens": len(self._labels)})
            except OptionError as error:
                log.error("tokens kept as they were: %s", error)


def _stamp(path: Path) -> bytes | None:
    """The content of the file: a replaced token need not change the file's time or size."""
    try:
        return hashlib.sha256(read_file(path)).digest()
    except OSError:
        return None


def _read(path: Path) -> dict[str, str]:
    """Label by token."""
    try:
        lines = read_file(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise OptionError(
            f"The token file {path} cannot be read: {reason}.", hint="Check its name and its permissions."
        ) from error
    labels: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not (text := re.sub(r"(^|\s)#.*", "", line).strip()):
            continue
        match = _LINE.fullmatch(text)
        if match is None or len(match["token"]) < _MIN_TOKEN_CHARS:
            raise OptionError(
                f"Line {number} of the token file {path} must be LABEL TOKEN, with a token of at least "
                f"{_MIN_TOKEN_CHARS} characters.",
                hint="Make one with: openssl rand -hex 24.",
            )
        if match["token"] in labels:
            raise OptionError(
                f"Line {number} of the token file {path} has the same token as a line before it.",
                hint="Give each label a token of its own.",
            )
        labels[match["token"]] = match["label"]
    return labels


class RowBudget:
    """Target rows per second for each label: a bucket that fills at `rows_per_s` and holds two seconds of it."""

    def __init__(self, rows_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rows_per_s
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()  # requests are charged where they arrive, streams where they are computed

    def spend(self, label: str, num_rows: int) -> None:
        """Take rows from the bucket; it may go below zero once. Raises RateLimited while it is empty."""
        if wait_s := self._take(label, num_rows, refuse=True):
            raise RateLimited(f"The token {label} has used up its {self._rate:g} rows a second.", retry_after_s=wait_s)

    def charge(self, label: str, num_rows: int) -> float:
        """Take rows even from an empty bucket; returns the seconds until it holds a row again."""
        return self._take(label, num_rows, refuse=False)

    def _take(self, label: str, num_rows: int, *, refuse: bool) -> float:
        """Seconds until the bucket holds a row again, or 0. With `refuse` nothing is taken from an empty bucket."""
        if not self._rate:
            return 0.0
        with self._lock:
            burst, now = max(_BURST_S * self._rate, _MIN_BURST_ROWS), self._clock()
            left, before = self._left.get(label, (burst, now))
            left = min(left + (now - before) * self._rate, burst)
            is_refused = refuse and left <= 0
            after = left if is_refused else left - num_rows
            self._left[label] = after, now
        return (1 - after) / self._rate if is_refused or (not refuse and after <= 0) else 0.0


class Calls(grpc.GenericRpcHandler):
    """The calls of a server on `port`, by the paths of its methods.

    An address that begins too many a second is shut out: its calls are refused, its connections are closed, and it gets
    no new one for five seconds. Calls that begin a session do not count, nor do some of each connection in `known`,
    which are the ports of clients with a session: such a connection stays and is answered, whoever else is there. Those
    in `spared` stay whatever they do.
    """

    def __init__(self) -> None:
        self._methods: dict[str, Any] = {}
        self._other = self._counted(self._refuse)
        self._begun: Counter[str | int] = Counter()  # in this second, by address and by port
        self._until = 0.0
        self._out: set[str] = set()
        self.known: Callable[[], Collection[int]] = tuple
        self.spared: Callable[[], Collection[int]] = tuple
        self.port = 0

    def add(self, methods: Mapping[str, Method]) -> None:
        """Answer these, too."""
        self._methods |= {path: self._counted(method) for path, method in methods.items()}

    def forgive(self, context: RpcContext) -> None:
        """Do not count this call: it began a session, of which there is a limit."""
        self._begun[_address(context.peer())[0]] -= 1

    def service(self, handler_call_details: Any) -> Any:
        return self._methods.get(handler_call_details.method, self._other)

    def _counted(self, method: Method) -> Any:
        async def answer(requests: Any, context: RpcContext) -> None:
            if self._is_too_many(*_address(context.peer())):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Too many calls a second.")
            await method(requests, context)

        return grpc.stream_stream_rpc_method_handler(answer)

    async def _refuse(self, requests: Any, context: RpcContext) -> None:
        if self._methods:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"There is no such method, only {SERVICE}.")
        await context.abort(grpc.StatusCode.UNAVAILABLE, "The server is starting: its model loads.")

    def _is_too_many(self, address: str, port: int) -> bool:
        loop = asyncio.get_running_loop()
        if loop.time() > self._until:
            self._begun.clear()
            self._until = loop.time() + 1
        self._begun[port] += 1
        calm = {each for each in self.known() if self._begun[each] <= _CALLS_OF_KNOWN}
        if port in calm:
            return False
        self._begun[address] += 1
        if self._begun[address] > _CALLS_PER_S and address not in self._out and len(self._out) < _MOST_OUT:
            log.warning("more than %d calls in a second, shut out for %g s: %s", _CALLS_PER_S, _OUT_S, address)
            self._out.add(address)
            loop.run_in_executor(None, shut_out, self.port, frozenset(self._out), address, calm.union(self.spared()))
            loop.call_later(_OUT_S, self._let_in, address)
        return address in self._out

    def _let_in(self, address: str) -> None:
        self._out.discard(address)
        asyncio.get_running_loop().run_in_executor(None, shut_out, self.port, frozenset(self._out))


def _address(peer: str) -> tuple[str, int]:
    """Address and port in what gRPC calls a client, such as `ipv4:10.0.0.1:50000` or `ipv6:%5B::1%5D:50000`."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return plain_host(host.strip("[]")), int(port) if port.isdecimal() else 0
