"""An emulated link: a TCP proxy with delay, jitter, bandwidth, cuts and stalls, seeded. All of it is emulation.

TCP cannot lose a packet in the middle, so loss shows as it does to programs: a connection that is cut, or one that
says nothing for a while.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass

_CHUNK = 16 * 1024
_TICK_S = 0.05
_SEND_S = 1.0  # a side that does not read for so long is dropped: one proxy thread serves all
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class LinkShape:
    """How a link behaves, each way. Delays in milliseconds, bandwidth in kilobits per second (0: no limit).

    `jitter_ms` adds up to so much at random, order kept. `cut_rate` is the share of chunks at which the connection is
    cut, half of the time after the chunk was passed on; `refuse_rate` the share of connections that are refused.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    bandwidth_kbps: float = 0.0
    cut_rate: float = 0.0
    refuse_rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.delay_ms, self.jitter_ms, self.bandwidth_kbps) < 0:
            raise ValueError("a link has no negative delay, jitter or bandwidth")
        if not (0 <= self.cut_rate <= 1 and 0 <= self.refuse_rate <= 1):
            raise ValueError("a rate lies between 0 and 1")


class _Pipe:
    """One direction of one connection: bytes on their way, each chunk with the time at which it arrives."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.on_the_way: deque[tuple[float, bytes]] = deque()
        self.free_at = 0.0  # when the last byte so far has left the sender
        self.closing = False


class EmulatedLink:
    """A proxy on a free port of loopback, in a thread of its own. `address` is where the edge connects.

    `bytes_up` and `bytes_down` count what went through the socket, headers and encryption included.
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
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._pipes: list[_Pipe] = []
        self._lock = threading.Lock()
        self._stalled_until = 0.0
        self._is_down = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def stall(self, seconds: float) -> None:
        """Pass nothing on for a while; connections stay open."""
        self._stalled_until = time.monotonic() + seconds

    def cut(self) -> None:
        """Cut all connections; new ones are taken."""
        with self._lock:
            self.num_cut += len(self._pipes) // 2
            self._drop(self._pipes)

    def down(self) -> None:
        """Cut all connections and refuse new ones, until `up`."""
        self._is_down = True
        self.cut()

    def up(self) -> None:
        """Take connections again."""
        self._is_down = False

    def reshape(self, shape: LinkShape) -> None:
        """Be another link from the next chunk on; what is on its way arrives as it would have."""
        self._shape = shape

    def retarget(self, target: Address) -> None:
        """Send new connections elsewhere: a server that came back on another port."""
        self._target = target

    def close(self) -> None:
        """End the proxy and its connections."""
        self._is_closed = True
        self._thread.join()
        with self._lock:
            self._drop(self._pipes)
        self._listener.close()
        self._selector.close()

    def __enter__(self) -> EmulatedLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._is_closed:
            events = self._selector.select(self._wait_s())
            with self._lock:
                for key, _ in events:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._pipes:
                        self._read(key.data)
                self._deliver()

    def _wait_s(self) -> float:
        with self._lock:
            arrivals = [pipe.on_the_way[0][0] for pipe in self._pipes if pipe.on_the_way]
        now = time.monotonic()
        if not arrivals:
            return _TICK_S
        return min(max(min(arrivals) - now, self._stalled_until - now, 0.0), _TICK_S)

    def _accept(self) -> None:
        edge, _ = self._listener.accept()
        if self._is_down or self._random.random() < self._shape.refuse_rate:
            _reset(edge)
            return
        try:
            cloud = socket.create_connection(self._target, timeout=2)
        except OSError:
            _reset(edge)
            return
        self.num_connections += 1
        for source, sink in ((edge, cloud), (cloud, edge)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            source.settimeout(_SEND_S)
            pipe = _Pipe(source, sink)
            self._pipes.append(pipe)
            self._selector.register(source, selectors.EVENT_READ, pipe)

    def _read(self, pipe: _Pipe) -> None:
        try:
            data = pipe.source.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            pipe.closing = True
            self._selector.unregister(pipe.source)
            return
        is_up = self._pipes.index(pipe) % 2 == 0
        self.bytes_up += len(data) * is_up
        self.bytes_down += len(data) * (not is_up)
        if self._random.random() < self._shape.cut_rate:
            self.num_cut += 1
            if self._random.random() < 0.5:
                with contextlib.suppress(OSError):
                    pipe.sink.sendall(b"".join(chunk for _, chunk in pipe.on_the_way) + data)
            self._drop(self._connection(pipe))
            return
        pipe.on_the_way.append((self._arrival(pipe, len(data)), data))

    def _arrival(self, pipe: _Pipe, num_bytes: int) -> float:
        shape, now = self._shape, time.monotonic()
        sending_s = num_bytes * 8 / (shape.bandwidth_kbps * 1e3) if shape.bandwidth_kbps else 0.0
        pipe.free_at = max(pipe.free_at, now) + sending_s
        travel_s = (shape.delay_ms + self._random.random() * shape.jitter_ms) / 1e3
        last = pipe.on_the_way[-1][0] if pipe.on_the_way else 0.0
        return max(pipe.free_at + travel_s, last)  # TCP keeps the order

    def _deliver(self) -> None:
        now = time.monotonic()
        if now < self._stalled_until:
            return
        for pipe in list(self._pipes):
            while pipe in self._pipes and pipe.on_the_way and pipe.on_the_way[0][0] <= now:
                try:
                    pipe.sink.sendall(pipe.on_the_way.popleft()[1])
                except OSError:
                    self._drop(self._connection(pipe))
            if pipe.closing and not pipe.on_the_way and pipe in self._pipes:
                self._drop(self._connection(pipe))

    def _connection(self, pipe: _Pipe) -> list[_Pipe]:
        first = self._pipes.index(pipe) // 2 * 2
        return self._pipes[first : first + 2]

    def _drop(self, pipes: list[_Pipe]) -> None:
        for pipe in list(pipes):
            self._pipes.remove(pipe)
            if not pipe.closing:
                self._selector.unregister(pipe.source)
            _reset(pipe.source)


def _reset(connection: socket.socket) -> None:
    """Close at once, so that the other side sees a connection that was cut, not one that was ended."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()
