"""A server's address, certificate and port, which is open while the model loads."""

import errno
import socket

import grpc

from skydraft.access.certificates import Certificate
from skydraft.access.keys import Keyring
from skydraft.cloud.options import ServeOptions
from skydraft.cloud.service import Calls
from skydraft.errors import OptionError
from skydraft.protocol.values import FEW_FRAMES

_ONE_LISTENER = ("grpc.so_reuseport", 0)  # two servers on one port would split the calls of a session
# Per connection, unhandled cancelled calls included, so that a flood leaves room for others. All texts and pings of a
# device share one connection.
_MOST_CALLS = ("grpc.max_concurrent_streams", 256)
# Unhandled calls; gRPC cancels further ones.
_MOST_PENDING = (("grpc.server.max_pending_requests", 400), ("grpc.server.max_pending_requests_hard_limit", 400))
_INT32_MAX = 2**31 - 1  # limit of gRPC's settings
_MESSAGE_BYTES = 256 * 1024  # for text
_BYTES_PER_AUDIO_TOKEN = 4 * 128 * 2  # frames, mels, half precision
_HANDSHAKE_MS = 10_000
_MAX_CONNECTIONS = 800  # each takes an open file (a process may have 1,024) and, if idle, 17 KB


def bind(server: grpc.aio.Server, options: ServeOptions) -> int:
    host = options.host.strip("[]")
    address = f"[{host}]:{options.port}" if ":" in host else f"{host}:{options.port}"
    try:
        _try(host, options.port)
        if options.tls_cert is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _credentials(Certificate(options.tls_cert, options.tls_key)))
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "gRPC does not say why"
        hint = "Choose another --host or --port; port 0 is any free one."
        raise OptionError(f"Cannot listen on {address}: {reason}.", hint=hint) from error


def _try(host: str, port: int) -> None:
    """Raise OSError unless the port is free at all addresses of the host. gRPC gives no reason, or skips addresses."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE or len(found) == 1:  # one of several may belong to another machine
                raise


def _credentials(certificate: Certificate) -> grpc.ServerCredentials:
    def newest() -> grpc.ServerCertificateConfiguration:
        certificate.renew()
        return grpc.ssl_server_certificate_configuration([certificate.pair])

    return grpc.dynamic_ssl_server_credentials(newest(), newest)


class Listener:
    """The port and keys of a server, from before its model is loaded to the end.

    Call `start`, then `stop`, on one event loop. Connections made before the model is loaded stay. A model that takes
    audio allows larger messages. Raises OptionError for an invalid token file.
    """

    def __init__(self, options: ServeOptions, *, takes_audio: bool) -> None:
        self._options = options
        of_audio = _BYTES_PER_AUDIO_TOKEN * options.limits.max_prompt if takes_audio else 0  # all in one message
        self._most_bytes = min(_MESSAGE_BYTES + of_audio, _INT32_MAX)
        self.keyring = Keyring(options.token_file)
        self.calls = Calls()
        self.port = 0  # from `start` on
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Bind; returns the port. Raises OptionError."""
        idle_ms = int(min(self._options.limits.session_ttl_s * 1e3, _INT32_MAX))  # for a connection without a call
        self._server = server = grpc.aio.server(options=[
            ("grpc.max_receive_message_length", self._most_bytes), ("grpc.max_connection_idle_ms", idle_ms),
            _ONE_LISTENER, *FEW_FRAMES, *_MOST_PENDING, _MOST_CALLS,
            ("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),  # also for clients that speak no HTTP/2
            ("grpc.max_allowed_incoming_connections", _MAX_CONNECTIONS),
        ])  # fmt: skip
        self.calls.answer_at(server)
        self.port = bind(server, self._options)
        await server.start()
        return self.port

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and end the others after `grace_s` seconds. A second call changes nothing."""
        server, self._server = self._server, None  # gRPC would crash the second time
        if server is not None:
            await server.stop(grace_s)
