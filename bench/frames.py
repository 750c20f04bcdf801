"""What crosses a socket, frame by frame: a server that answers as it is told, and a proxy that reads HTTP/2."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from skydraft.protocol.codec import CLOSES
from skydraft.protocol.values import FEW_FRAMES, SERVICE

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_KINDS = {0: "DATA", 1: "HEADERS", 3: "RST_STREAM", 4: "SETTINGS", 6: "PING", 7: "GOAWAY", 8: "WINDOW_UPDATE"}
_HEAD = 9  # of a frame
_PREFIX = 5  # of a gRPC message


@contextmanager
def answering(tls: list[str] | None = None) -> Iterator[tuple[int, deque[bytes]]]:
    """(port, replies) of a server with the channel options of ours, which gives the replies in turn.

    `tls` are options of `serve`, of which the certificate and its key are used.
    """
    replies: deque[bytes] = deque()
    loop = asyncio.new_event_loop()

    async def unary(request: bytes, context: Any) -> bytes:
        return replies.popleft()

    async def session(requests: Any, context: Any) -> None:
        while isinstance(request := await context.read(), bytes) and request != CLOSES:
            await context.write(replies.popleft())

    methods: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(unary) for name in ("Open", "Verify", "Close")
    } | {"Session": grpc.stream_stream_rpc_method_handler(session)}

    async def start() -> tuple[Any, int]:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *FEW_FRAMES])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        if tls:
            cert, key = (Path(tls[tls.index(flag) + 1]).read_bytes() for flag in ("--tls-cert", "--tls-key"))
            port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)]))
        else:
            port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield port, replies
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Recorder:
    """A proxy for one plaintext connection: bytes by kind of frame, messages apart from what wraps them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_bytes = 0
        self._sizes: Counter[str] = Counter()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def by_kind(self) -> list[tuple[str, int]]:
        """(kind, bytes), the most first."""
        return self._sizes.most_common()

    def _accept(self) -> None:
        edge, _ = self._listener.accept()
        cloud = socket.create_connection(("127.0.0.1", self._port))
        for side in (edge, cloud):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._pump, args=(edge, cloud), daemon=True).start()
        self._pump(cloud, edge)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        pending = b""
        with contextlib.suppress(OSError):  # either side may be gone first
            while data := source.recv(65536):
                with self._lock:
                    self.num_bytes += len(data)
                    pending = self._count(pending + data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _count(self, data: bytes) -> bytes:
        """Count the frames in `data`; returns the beginning of one that is not whole."""
        if data.startswith(_PREFACE):
            self._sizes["SETTINGS"] += len(_PREFACE)
            data = data[len(_PREFACE) :]
        while len(data) >= _HEAD and len(data) >= (size := _HEAD + int.from_bytes(data[:3], "big")):
            kind = _KINDS.get(data[3], "other")
            if kind == "DATA" and size > _HEAD:
                self._sizes["messages"] += size - _HEAD - _PREFIX
                self._sizes["frames and prefixes of messages"] += _HEAD + _PREFIX
            else:
                self._sizes[kind] += size
            data = data[size:]
        return data

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
