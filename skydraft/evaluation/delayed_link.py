"""An emulated link: a TCP proxy in front of a server, which holds back what passes."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import TypeAlias

_CHUNK = 16 * 1024
_CONNECT_S = 2.0
Address = tuple[str, int]
Chunks: TypeAlias = "asyncio.Queue[tuple[float, bytes]]"


class DelayedLink:
    """A proxy on a free port of loopback, in its own thread: what comes goes on `delay_ms` later, each way."""

    def __init__(self, target: Address, delay_ms: float = 0.0) -> None:
        self.target, self.delay_ms = target, delay_ms
        self._is_over = asyncio.Event()
        started: Future[int] = Future()
        self._thread = threading.Thread(target=asyncio.run, args=[self._serve(started)], name="link", daemon=True)
        self._thread.start()
        self.port = started.result()
        self.address = f"127.0.0.1:{self.port}"

    async def _serve(self, started: Future[int]) -> None:
        self.loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self.carry, "127.0.0.1", 0)
        started.set_result(server.sockets[0].getsockname()[1])
        await self._is_over.wait()
        server.close()  # its connections are tasks, which `asyncio.run` cancels

    def __enter__(self) -> DelayedLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until a side ends it and all of its bytes have arrived."""
        writers = [writer]
        try:
            async with asyncio.timeout(_CONNECT_S):
                answers, to_target = await asyncio.open_connection(*self.target)
            writers.append(to_target)
            async with asyncio.TaskGroup() as group:
                for source, sink, is_up in ((reader, to_target, True), (answers, writer, False)):
                    chunks: Chunks = asyncio.Queue()
                    group.create_task(self._read(source, chunks, is_up=is_up))
                    group.create_task(self._write(chunks, sink))
        except* OSError:
            pass
        finally:
            for each in writers:
                each.transport.abort()

    async def _read(self, source: asyncio.StreamReader, chunks: Chunks, *, is_up: bool) -> None:
        data = b"any"
        while data:
            data = await source.read(_CHUNK)
            self.pass_on(data, chunks, is_up=is_up)

    def pass_on(self, data: bytes, chunks: Chunks, *, is_up: bool) -> None:
        """Say when what came now goes on (`time.monotonic`). No data is the end."""
        chunks.put_nowait((time.monotonic() + self.delay_ms / 1e3, data))

    async def _write(self, chunks: Chunks, sink: asyncio.StreamWriter) -> None:
        """Write chunks in order, each at its time. Raises ConnectionError at the end."""
        sink.transport.set_write_buffer_limits(0)
        while True:
            at, data = await chunks.get()
            await asyncio.sleep(at - time.monotonic())
            if not data:
                raise ConnectionError
            sink.write(data)
            await sink.drain()
