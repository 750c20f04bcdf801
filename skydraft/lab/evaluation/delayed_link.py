"""An emulated link: a TCP proxy before a server on this machine, which delays all bytes."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from contextlib import AbstractContextManager

Chunks = asyncio.Queue[tuple[float, bytes]]


class DelayedLink(AbstractContextManager["DelayedLink"]):
    """A proxy on a free port of loopback, in its own thread. It forwards bytes `delay_ms` later, each way."""

    def __init__(self, target: tuple[str, int], delay_ms: float = 0.0) -> None:
        self.target, self.delay_ms = target, delay_ms
        self.held_until = 0.0  # time (`time.monotonic`) before which nothing is forwarded
        self.connections: set[asyncio.Task[None]] = set()
        self._is_over = asyncio.Event()
        started: Future[int] = Future()
        self._thread = threading.Thread(target=asyncio.run, args=[self._serve(started)], name="link", daemon=True)
        self._thread.start()
        self.port = started.result()
        self.address = f"127.0.0.1:{self.port}"

    async def _serve(self, started: Future[int]) -> None:
        self.loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        started.set_result(server.sockets[0].getsockname()[1])
        await self._is_over.wait()
        server.close()  # `asyncio.run` cancels the tasks of its connections

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(task := self.loop.create_task(self.carry(reader, writer)))
        task.add_done_callback(self.connections.discard)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until a side ends it and all its bytes have arrived."""
        try:
            answers, to_target = await asyncio.open_connection(*self.target)
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
            chunks.put_nowait((self.goes_on_at(data, is_up=is_up), data))
        chunks.put_nowait((0.0, b""))

    def goes_on_at(self, data: bytes, *, is_up: bool) -> float:
        """Return the time (`time.monotonic`) at which to forward data that came now."""
        return time.monotonic() + self.delay_ms / 1e3

    async def _write(self, chunks: Chunks, sink: asyncio.StreamWriter) -> None:
        """Write chunks in order, each at its time. Raises ConnectionError at the end."""
        try:
            while True:
                at, data = await chunks.get()
                while (wait_s := max(at, self.held_until) - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                if not data:
                    raise ConnectionError
                sink.write(data)
                await sink.drain()
        finally:
            sink.close()
