"""Where a server listens: its address, its certificate, and what it answers while its model loads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from skydraft.cloud.certificate import check_certificate
from skydraft.errors import OptionError
from skydraft.files import warn_if_shared

if TYPE_CHECKING:
    from skydraft.cloud.server import ServeOptions

ONE_LISTENER = ("grpc.so_reuseport", 0)  # two servers on one port would split the calls of a session


def bind(server: grpc.Server | grpc.aio.Server, options: ServeOptions) -> int:
    """Have a server listen at the address of `options`; returns the port. Raises OptionError."""
    host = f"[{options.host}]" if ":" in options.host and "[" not in options.host else options.host
    address = f"{host}:{options.port}"
    try:
        if options.tls_cert is None or options.tls_key is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _credentials(options.tls_cert, options.tls_key))
    except RuntimeError as error:
        raise OptionError(
            f"Cannot listen on {address}: the port is in use, the address is not this machine's, or the "
            "certificate and the key do not belong together.",
            hint="Choose another --port, or 0 for any free one.",
        ) from error


def _credentials(cert: Path, key: Path) -> grpc.ServerCredentials:
    check_certificate(cert, key)
    warn_if_shared(key)
    return grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])


@contextmanager
def starting(options: ServeOptions) -> Iterator[None]:
    """Answer each call with UNAVAILABLE within the block, so that clients learn why and try again.

    Raises OptionError at once if the real server could not listen later. Any free port is free later, too.
    """
    if not options.port:
        yield
        return
    server = grpc.server(ThreadPoolExecutor(1), handlers=[_Starting()], options=[ONE_LISTENER])
    bind(server, options)
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


class _Starting(grpc.GenericRpcHandler):
    def service(self, handler_call_details: object) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.stream_stream_rpc_method_handler(_refuse)


def _refuse(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    context.abort(grpc.StatusCode.UNAVAILABLE, "The server is starting: its model loads.")
    yield b""
