"""The gateway as a process: uvicorn around the application, with limits for slow clients."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from skydraft.errors import OptionError
from skydraft.gateway.app import Gateway

_IDLE_S = 30  # how long a connection may be without a request, before the first one or after an answer
_HEAD_S = 15.0  # how long the head of a request may take from its first byte
_UNREAD_S = 60.0  # how long a client may leave an answer unread
_READ = 16 * 1024  # bytes
_MAX_CONNECTIONS = 512
_GRACE_S = 0.7  # for clients to read their last answers, once the gateway stops


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """The address and certificate of the gateway. Other machines can reach it only with keys."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    tls_cert: Path | None = None
    tls_key: Path | None = None
    has_keys: bool = False
    insecure: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise OptionError(f"--port must be from 0 to 65535, not {self.port}.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError("--tls-cert and --tls-key belong together.", hint="Give both, or neither.")
        if _is_loopback(self.host):
            return
        if not self.has_keys:
            raise OptionError(
                f"On {self.host} other machines could use the models: an API key is required.",
                hint="Give --api-key-file FILE, or listen on 127.0.0.1.",
            )
        if self.tls_cert is None and not self.insecure:
            raise OptionError(
                f"On {self.host} prompts and keys would cross the network unencrypted.",
                hint="Give --tls-cert and --tls-key, or --insecure-host behind a proxy that speaks TLS.",
            )

    @property
    def url(self) -> str:
        """The URL for a browser on this machine, without the port."""
        host = "localhost" if self.host in ("127.0.0.1", "0.0.0.0", "::", "::1", "") else self.host
        return f"{'https' if self.tls_cert else 'http'}://{host}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection if the head of a request takes too long, or the client does not read.

    Without this a few slow clients would occupy all connections. uvicorn itself closes idle connections.
    """

    _head: asyncio.TimerHandle | None = None  # runs from the first byte of a head to its end
    _unread: asyncio.TimerHandle | None = None
    _num_framing = 0  # bytes of a body that are not its content, beyond a sixteenth

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # uvicorn starts its own timer only after the first answer.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _READ):
            if self.transport.is_closing():
                return
            self._read(data[start : start + _READ])
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head()  # the body has its own limit
        elif self._head is None:
            self._head = self.loop.call_later(_HEAD_S, self.transport.close)

    def _read(self, data: bytes) -> None:
        """Read a little, and hang up on a body in chunks of few bytes: each costs as much as a long one."""
        before, num_before = self.cycle, len(self.cycle.body) if self.cycle else 0
        super().data_received(data)
        if self.cycle is not before:
            self._num_framing = 0
        elif self.cycle is not None and self.cycle.more_body:
            num_content = len(self.cycle.body) - num_before
            self._num_framing = max(self._num_framing + len(data) - num_content - num_content // 16, 0)
            if self._num_framing > _READ:
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head()
        self._stop_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_unread()
        self._unread = self.loop.call_later(_UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _stop_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


class _Server(uvicorn.Server):
    """uvicorn, which calls `ready` when it listens, and ends streams when it stops."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, ready: Callable[[int], None]) -> None:
        super().__init__(config)
        self._gateway, self._ready = gateway, ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at Ctrl-C or SIGTERM, at a second one at once. uvicorn would raise the signals again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.servers:
            self._ready(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: Any = None) -> None:
        """End within two seconds. Who still sends a body is hung up on at once, who waits or reads after `_GRACE_S`."""
        self._gateway.desk.cancel_all()
        self._hang_up(lambda connection: connection.cycle is not None and connection.cycle.more_body)
        rest = asyncio.get_running_loop().call_later(_GRACE_S, self._hang_up, lambda connection: True)
        await super().shutdown(sockets)
        rest.cancel()

    def _hang_up(self, on: Callable[[Any], bool]) -> None:
        for connection in filter(on, list(self.server_state.connections)):
            connection.transport.abort()


def server_of(gateway: Gateway, options: ListenOptions, ready: Callable[[int], None]) -> uvicorn.Server:
    """A server for `gateway`; `ready` gets its port. Raises OptionError for certificates that do not load."""
    try:
        config = uvicorn.Config(
            gateway.app,
            host=options.host,
            port=options.port,
            http=PatientProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=1,  # for what is in a thread
            ssl_certfile=str(options.tls_cert) if options.tls_cert else None,
            ssl_keyfile=str(options.tls_key) if options.tls_key else None,
        )
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise OptionError(f"The certificate cannot be used: {error.strerror or error}.") from error
    return _Server(config, gateway, ready)


def listen(options: ListenOptions) -> socket.socket:
    """The listening socket. Raises OptionError if the port is taken."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # asyncio switches off Nagle's algorithm only where TCP is named: else each first token comes 40 ms late.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((options.host, options.port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise OptionError(
            f"Port {options.port} of {options.host} cannot be used: {error.strerror}.",
            hint="Choose another one with --port.",
        ) from error
    return listening


def serve(gateway: Gateway, options: ListenOptions, ready: Callable[[int], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises OptionError if the port is taken."""
    server = server_of(gateway, options, ready)
    with listen(options) as listening:
        try:
            server.run([listening])
        finally:
            gateway.close()
