"""An emulated link: a TCP proxy with delay, jitter, bandwidth, cuts and stalls, seeded. All of it is emulation.

A TCP stream cannot lose a packet in the middle. So loss appears as programs see it: as a cut connection, or as one
that stalls.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

_CHUNK = 16 * 1024
_CONNECT_S = 2.0
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class LinkShape:
    """The behaviour of a link, each way. Delays in milliseconds, bandwidth in kilobits per second (0: no limit).

    Each chunk gets a random extra delay up to `jitter_ms`; the order is kept. `cut_rate` is the share of chunks at
    which the connection is cut, half of the time after the chunk was passed on.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    bandwidth_kbps: float = 0.0
    cut_rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.delay_ms, self.jitter_ms, self.bandwidth_kbps) < 0:
            raise ValueError("a link has no negative delay, jitter or bandwidth")
        if not 0 <= self.cut_rate <= 1:
            raise ValueError("a rate lies between 0 and 1")


class EmulatedLink:
    """A proxy on a free port of loopback, in its own thread. The edge connects to `address`.

    `bytes_up` and `bytes_down` count the bytes on the socket, headers and encryption included.
    """

    def __init__(self, target: Address, shape: LinkShape | None = None) -> None:
        self._target = target
        self._shape = shape or LinkShape()
        self._random = random.Random(self._shape.seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.bytes_up = self.bytes_down = self.num_connections = self.num_cut = 0
        self._stalled_until = 0.0
        self._is_down = False
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._accepting = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()

    def stall(self, seconds: float) -> None:
        """Hold all bytes back for a while; connections stay open."""
        self._stalled_until = time.monotonic() + seconds

    def cut(self) -> None:
        """Cut all connections; new ones are accepted."""
        self.num_cut += len(self._connections)
        self._await(_cancelled(self._connections))

    def down(self) -> None:
        """Cut all connections and refuse new ones, until `up`."""
        self._is_down = True
        self.cut()

    def up(self) -> None:
        """Accept connections again."""
        self._is_down = False

    def reshape(self, shape: LinkShape) -> None:
        """Change the shape from the next chunk on; chunks on their way keep the old shape."""
        self._shape = shape

    def retarget(self, target: Address) -> None:
        """Send new connections to another address, such as a server that restarted on another port."""
        self._target = target

    def close(self) -> None:
        """End the proxy and its connections."""
        self._await(_cancelled([self._accepting]))
        self._await(_cancelled(self._connections))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._listener.close()

    def __enter__(self) -> EmulatedLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _accept(self) -> None:
        while True:
            edge, _ = await self._loop.sock_accept(self._listener)
            connection = self._loop.create_task(self._carry(edge))
            self._connections.add(connection)
            connection.add_done_callback(self._connections.discard)

    async def _carry(self, edge: socket.socket) -> None:
        """Carry one connection until a side ends it or the link cuts it, then reset both sides."""
        cloud = socket.socket()
        cloud.setblocking(False)
        try:
            if self._is_down:
                return
            async with asyncio.timeout(_CONNECT_S):
                await self._loop.sock_connect(cloud, self._target)
            self.num_connections += 1
            for side in (edge, cloud):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry_one_way(group, edge, cloud, is_up=True))
                group.create_task(self._carry_one_way(group, cloud, edge, is_up=False))
        except* OSError:
            pass
        finally:
            _reset(edge)
            _reset(cloud)

    async def _carry_one_way(
        self, group: asyncio.TaskGroup, source: socket.socket, sink: socket.socket, *, is_up: bool
    ) -> None:
        """Carry bytes one way. Raises ConnectionError at a cut, or once the source ended and all its bytes arrived."""
        in_turn = asyncio.Lock()
        on_the_way: deque[bytes] = deque()
        free_at = 0.0  # time at which the sender has sent all bytes so far

        async def deliver(arrives_at: float) -> None:
            async with in_turn:  # TCP keeps the order
                while (wait_s := max(arrives_at, self._stalled_until) - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                await self._loop.sock_sendall(sink, on_the_way.popleft())

        while data := await self._loop.sock_recv(source, _CHUNK):
            self.bytes_up += len(data) * is_up
            self.bytes_down += len(data) * (not is_up)
            on_the_way.append(data)
            shape = self._shape
            if self._random.random() < shape.cut_rate:
                self.num_cut += 1
                if self._random.random() < 0.5:
                    with contextlib.suppress(OSError):
                        sink.send(b"".join(on_the_way))
                raise ConnectionError
            sending_s = len(data) * 8 / (shape.bandwidth_kbps * 1e3) if shape.bandwidth_kbps else 0.0
            free_at = max(free_at, time.monotonic()) + sending_s
            group.create_task(deliver(free_at + (shape.delay_ms + self._random.random() * shape.jitter_ms) / 1e3))
        async with in_turn:
            raise ConnectionError


async def _cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their end."""
    tasks = [*tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _reset(connection: socket.socket) -> None:
    """Close with a reset, so that the other side sees a cut connection instead of an ended one."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()
