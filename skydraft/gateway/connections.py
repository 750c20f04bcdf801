"""The connections of the gateway. They are counted from the first byte on, and the oldest idle one makes room."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from itertools import islice
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger("skydraft.gateway")
MAX_CONNECTIONS = 512
_HEAD_S = 15.0  # how long the head of a request may take from its first byte
_UNREAD_S = 60.0  # how long a client may leave an answer unread
_HANDSHAKE_S = 10.0
_SHUTDOWN_S = 5.0  # of TLS
_AGAIN_S = 0.1  # after a connection could not be accepted


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that ends connections whose head takes too long, or whose client does not read; uvicorn, idle ones."""

    _head: asyncio.TimerHandle | None = None  # runs from the first byte of a head to its end
    _unread: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.closed: asyncio.Future[None] = self.loop.create_future()

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete or self._unread is not None

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # uvicorn starts its own timer only after the first answer.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            _stop(self._head)  # the body has its own limit
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(_HEAD_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._head)
        _stop(self._unread)
        super().connection_lost(exc)
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        super().pause_writing()
        _stop(self._unread)
        self._unread = self.loop.call_later(_UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _stop(self._unread)
        self._unread = None


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Connections:
    """At most `MAX_CONNECTIONS`: one that asks nothing gives way to a new one. `make` makes the protocol of each."""

    def __init__(
        self, listening: socket.socket, make: Callable[[], PatientProtocol], tls: ssl.SSLContext | None = None
    ) -> None:
        self._listening, self._make, self._tls = listening, make, tls
        self._limit = MAX_CONNECTIONS
        self._open: dict[PatientProtocol, asyncio.Task[None]] = {}  # in the order in which they came

    async def accept(self) -> None:
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        while True:
            try:
                client, _ = await loop.sock_accept(self._listening)
            except OSError as error:
                if len(self._open) < self._limit:  # said once, as there are never that many again
                    self._limit = max(len(self._open) // 2, 16)
                    log.error("no more than %d connections from now on: %s", self._limit, error)
                self._make_room()
                await asyncio.sleep(_AGAIN_S)
                continue
            self._make_room()
            connection = self._make()
            self._open[connection] = loop.create_task(self._serve(connection, client))
            await asyncio.sleep(0)  # or a flood of them would keep the loop

    def _make_room(self) -> None:
        num_more = max(len(self._open) + 1 - self._limit, 0)
        idle = (connection for connection in self._open if connection.is_idle)
        for connection in list(islice(idle, num_more)):
            self._open.pop(connection).cancel()

    async def _serve(self, connection: PatientProtocol, client: socket.socket) -> None:
        """Let a connection live until it is closed; cancelling this aborts it."""
        times = {"ssl_handshake_timeout": _HANDSHAKE_S, "ssl_shutdown_timeout": _SHUTDOWN_S} if self._tls else {}
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: connection, client, ssl=self._tls, **times)
            await connection.closed
        except OSError:
            pass  # it was reset, or speaks no TLS
        finally:
            connection.abort()
            self._open.pop(connection, None)
