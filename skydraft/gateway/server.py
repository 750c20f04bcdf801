"""Run the gateway's application in uvicorn."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.responses import JSONResponse

from skydraft.access.certificates import Certificate
from skydraft.errors import OptionError, or_else, telling
from skydraft.gateway.app import Gateway
from skydraft.protocol.address import check_encrypted, is_loopback

_IDLE_S = 30  # how long an idle connection stays open after an answer
_GRACE_S = 1  # time for clients to read their last answers when the gateway stops
_BACKLOG = 128  # connections that wait; also the errors that asyncio logs each second when no file descriptor is left
_LOOK_S = 0.5
_STARTING = {"message": "The gateway is starting: its models load.", "type": "server_error", "code": "starting"}


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """The listening address and TLS files. Raises OptionError: beyond loopback, keys are required."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    tls_cert: Path | None = None
    tls_key: Path | None = None
    has_keys: bool = False
    insecure: bool = False

    def __post_init__(self) -> None:
        if not (self.has_keys or is_loopback(self.host)):
            message = f"Other machines can reach {self.host}, so an API key is required."
            raise OptionError(message, hint="Give --api-key-file FILE, or listen on 127.0.0.1.")
        check_encrypted(self.host, self.tls_cert, self.tls_key, insecure=self.insecure, flag="--insecure-host")

    @property
    def url(self) -> str:
        """The URL for a browser on this machine, without the port."""
        host = "localhost" if self.host in ("127.0.0.1", "0.0.0.0", "::", "::1", "") else self.host
        return f"{'https' if self.tls_cert else 'http'}://{host}"


class Entrance:
    """An ASGI application that forwards to `gateway` once that is loaded. Until then it answers 503."""

    def __init__(self, gateway: Gateway | None = None) -> None:
        self.gateway = gateway

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.gateway:
            with suppress(asyncio.CancelledError):  # the gateway stops; uvicorn would log a traceback
                await self.gateway.app(scope, receive, send)
            return
        body = {"status": "starting"} if scope["path"] == "/health" else {"error": _STARTING}
        await JSONResponse(body, 503, {"Retry-After": "2", "Refresh": "2"})(scope, receive, send)


def server_of(entrance: Entrance, options: ListenOptions) -> uvicorn.Server:
    """Return the server; its `run` takes the listening socket. Raises OptionError for certificates that do not load."""
    config = uvicorn.Config(
        entrance, http="h11", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        backlog=_BACKLOG, timeout_keep_alive=_IDLE_S, timeout_graceful_shutdown=_GRACE_S,
    )  # fmt: skip
    config.load()
    config.ssl = Certificate(options.tls_cert, options.tls_key).context() if options.tls_cert else None
    return uvicorn.Server(config)


def listen(options: ListenOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # asyncio disables Nagle's algorithm only for an explicit TCP socket. Otherwise each first token is 40 ms late.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    hint = "Choose another --host or --port; port 0 is any free one."
    with telling(OptionError, f"Cannot listen on {options.host}:{options.port}", hint), or_else(listening.close):
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((options.host, options.port))
        listening.listen(_BACKLOG)
    return listening


def serve(
    load: Callable[[], Gateway], options: ListenOptions, listening: socket.socket, ready: Callable[[Gateway, int], None]
) -> None:
    """Serve on a listening socket until Ctrl-C or SIGTERM. While `load` runs, clients get the status 503.

    `ready` gets the gateway and the port. The server runs in its own thread: `load` needs the main thread, where Ctrl-C
    ends it.
    """
    entrance = Entrance()
    server = server_of(entrance, options)
    thread = threading.Thread(target=server.run, args=([listening],), name="serving", daemon=True)
    thread.start()
    try:
        # Also while loading: a container's first process ignores signals without a handler.
        with _signals(signal.default_int_handler), closing(load()) as gateway:
            entrance.gateway = gateway

            def stop(*_: object) -> None:
                gateway.desk.stop()
                server.should_exit = True

            with _signals(stop):
                ready(gateway, listening.getsockname()[1])
                while thread.is_alive():  # with a timeout, because an endless join can miss a signal
                    thread.join(_LOOK_S)
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def _signals(stop: Callable[[int, Any], None]) -> Iterator[None]:
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
