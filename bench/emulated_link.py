"""A bad link on one machine: delay, jitter, bandwidth, cuts and stalls, seeded. All of it is emulation.

A TCP stream cannot lose a packet in the middle. So loss appears as programs see it: as a cut connection, or as one
that stalls.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

Chunks = asyncio.Queue[tuple[float, bytes]]


@dataclass(frozen=True, slots=True)
class LinkShape:
    """The behaviour of a link, each way. Delays in milliseconds, bandwidth in kilobits per second (0: no limit).

    Each chunk gets a random extra delay up to `jitter_ms`; the order is kept. `cut_rate` is the share of chunks that
    do not arrive, since the connection is cut.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    bandwidth_kbps: float = 0.0
    cut_rate: float = 0.0
    seed: int = 0


class EmulatedLink:
    """A proxy on a free port of loopback, in its own thread, in front of a server on this machine.

    `bytes_up` and `bytes_down` count the bytes on the socket, headers and encryption included."""

    def __init__(self, target: tuple[str, int], shape: LinkShape = LinkShape()) -> None:
        self._target, self._random, self._shape = target, random.Random(shape.seed), shape
        self._held_until = 0.0  # nothing goes on before that, on `time.monotonic`
        self._connections: set[asyncio.Task[None]] = set()
        self._is_over = asyncio.Event()
        self._free_at = {True: 0.0, False: 0.0}  # when the sender has sent all bytes so far
        self.bytes_up = self.bytes_down = self.num_connections = self.num_cut = 0
        started: Future[int] = Future()
        self._thread = threading.Thread(target=asyncio.run, args=[self._serve(started)], name="link", daemon=True)
        self._thread.start()
        self.port = started.result()
        self.address = f"127.0.0.1:{self.port}"

    async def _serve(self, started: Future[int]) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        started.set_result(server.sockets[0].getsockname()[1])
        await self._is_over.wait()
        server.close()  # its connections are tasks, which `asyncio.run` cancels

    def __enter__(self) -> EmulatedLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()

    def stall(self, seconds: float) -> None:
        """Hold all bytes back for a while; connections stay open."""
        self._held_until = time.monotonic() + seconds

    def cut(self) -> None:
        """Cut all connections; new ones are accepted."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()

    async def _cut(self) -> None:
        tasks = [*self._connections]
        self.num_cut += len(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def reshape(self, shape: LinkShape) -> None:
        """Change the shape from the next chunk on; chunks on their way keep the old shape."""
        self._shape = shape

    def retarget(self, target: tuple[str, int]) -> None:
        """Send new connections to another address, such as a server that restarted on another port."""
        self._target = target

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(task := self._loop.create_task(self._carry(reader, writer)))
        task.add_done_callback(self._connections.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until a side ends it and all of its bytes have arrived. The edge sees its end as a cut,
        not as an end."""
        at_once = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.num_connections += 1
        try:
            answers, to_target = await asyncio.open_connection(*self._target)
            async with asyncio.TaskGroup() as group:
                for source, sink, is_up in ((reader, to_target, True), (answers, writer, False)):
                    chunks = Chunks()
                    group.create_task(self._read(source, chunks, is_up=is_up))
                    group.create_task(self._write(chunks, sink))
        except* OSError:
            pass
        finally:
            writer.close()

    async def _read(self, source: asyncio.StreamReader, chunks: Chunks, *, is_up: bool) -> None:
        while data := await source.read(1 << 14):
            chunks.put_nowait((self._goes_on_at(data, is_up=is_up), data))
        chunks.put_nowait((0.0, b""))

    async def _write(self, chunks: Chunks, sink: asyncio.StreamWriter) -> None:
        """Write chunks in order, each at its time. Raises ConnectionError at the end."""
        try:
            while True:
                at, data = await chunks.get()
                while (wait_s := max(at, self._held_until) - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                if not data:
                    raise ConnectionError
                sink.write(data)
                await sink.drain()
        finally:
            sink.close()

    def _goes_on_at(self, data: bytes, *, is_up: bool) -> float:
        """When what came now goes on, on `time.monotonic`. Raises ConnectionError for a cut."""
        self.bytes_up += len(data) * is_up
        self.bytes_down += len(data) * (not is_up)
        shape = self._shape
        if self._random.random() < shape.cut_rate:
            self.num_cut += 1
            raise ConnectionError
        sending_s = len(data) * 8 / (shape.bandwidth_kbps * 1e3) if shape.bandwidth_kbps else 0.0
        self._free_at[is_up] = max(self._free_at[is_up], time.monotonic()) + sending_s
        return self._free_at[is_up] + (shape.delay_ms + self._random.random() * shape.jitter_ms) / 1e3
