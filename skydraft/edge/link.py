"""The link: one gRPC channel, made anew when it has died. Every message's bytes are counted."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc

from skydraft.characters import one_line
from skydraft.errors import CloudFailure, CloudLost, CloudTimeout, OptionError, ProtocolError, SkydraftError, TlsFailure
from skydraft.protocol.address import is_loopback, parse_address
from skydraft.protocol.info import decode_info
from skydraft.protocol.status import from_rpc
from skydraft.protocol.values import SERVICE, ServerInfo

PING_S = 5.0  # a server that is there answers a health check at once, however busy its model is
_WATCH_S = 0.3  # how long a slow answer is waited for before the server is asked for a sign of life
_TLS_S = 1.0  # how long a server may take to answer a greeting
_HEALTH = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"  # HealthCheckResponse(status=SERVING)
_CLOSE_S = 0.3
_READ_AHEAD = 1024 * 1024  # bytes of a stream that nobody has asked for yet; beyond them the server has to wait


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Where the cloud is and how to get in.

    Loopback is spoken to in plaintext, everything else with TLS: by the system's roots, or by `tls_ca` (PEM). With
    `tls_ca` loopback uses TLS too. `tls_name` is the name in the server's certificate where it is not the host's.
    """

    address: str
    token: str | None = None
    tls_ca: bytes | None = None
    tls_name: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        host, _ = parse_address(self.address)
        if self.token is not None and not re.fullmatch(r"[\x21-\x7e]+", self.token):
            raise OptionError("The token is empty, or has a character that cannot be sent.")
        if self.insecure and (self.tls_ca or self.tls_name):
            raise OptionError("--insecure turns encryption off, so --tls-ca and --tls-name do not apply.")
        if self.tls_ca:
            _check_certificates(self.tls_ca)
        if self.tls_name and not self.uses_tls:
            raise OptionError(f"The connection to {host} is not encrypted, so --tls-name does not apply.")

    @property
    def uses_tls(self) -> bool:
        """Whether the channel is encrypted."""
        return bool(self.tls_ca) or not (self.insecure or is_loopback(parse_address(self.address)[0]))


def _check_certificates(pem: bytes) -> None:
    try:
        ssl.create_default_context(cadata=pem.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        raise OptionError(
            "What --tls-ca names is no certificate in PEM form.", hint="Give the file that signs."
        ) from error


class Link:
    """Calls to one server. Failures come as errors of our own tree. Threads may share it."""

    def __init__(self, options: LinkOptions) -> None:
        self._options = options
        host, port = parse_address(options.address)
        self.target = f"{host}:{port}"
        self._metadata = (("authorization", f"Bearer {options.token}"),) if options.token else ()
        self._lock = threading.Lock()
        self._bytes_up = self._bytes_down = 0
        self._started: list[Any] = []
        self._is_closed = False
        self.heard_at = 0.0  # when the server last answered anything, by the monotonic clock
        self._wires = self._connect()

    @property
    def uses_tls(self) -> bool:
        """Whether the channel is encrypted."""
        return self._options.uses_tls

    def _connect(self) -> _Wires:
        settings: list[tuple[str, Any]] = [
            ("grpc.use_local_subchannel_pool", 1),  # or a new channel would share the dead connection
            ("grpc.enable_retries", 0),  # what may be repeated, and when, is decided in one place: not here
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if is_loopback(parse_address(self._options.address)[0]):
            settings.append(("grpc.enable_http_proxy", 0))
        if self._options.tls_name:
            settings.append(("grpc.ssl_target_name_override", self._options.tls_name))
        if self._options.uses_tls:
            credentials = grpc.ssl_channel_credentials(self._options.tls_ca)
            return _Wires(grpc.secure_channel(self.target, credentials, settings))
        return _Wires(grpc.insecure_channel(self.target, settings))

    def reconnect(self) -> None:
        """Leave a connection that may be dead, and make another one at the next call. Nothing on a closed link."""
        with self._lock:
            if not self._is_closed:
                self._wires.channel.close()
                self._wires = self._connect()

    def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """One unary call; blocks for at most `timeout_s`. The fast way: no other thread is woken."""
        self._count(up=len(request))
        try:
            reply: bytes = self._wires.unary[method](request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._reason(error) from error
        except ValueError as error:  # the channel was closed meanwhile
            raise CloudLost("The connection was closed.") from error
        self._count(down=len(reply))
        self.heard_at = time.monotonic()
        return reply

    def call_watched(self, method: str, request: bytes, timeout_s: float, ping_s: float = PING_S) -> bytes:
        """Like `call`, for what may take long: a server that shows no sign of life meanwhile raises CloudLost."""
        started = self.start(method, request, timeout_s)
        if started is None:
            raise CloudLost("The connection was closed.")
        return self.wait(started, ping_s)

    def start(self, method: str, request: bytes, timeout_s: float) -> Any:
        """Begin a call, to `wait` for or to forget. None while the interpreter ends: gRPC needs a thread for it."""
        if sys.is_finalizing():
            return None
        self._count(up=len(request))
        self._started = [call for call in self._started if not call.done()]
        try:
            call = self._wires.unary[method].future(request, timeout=timeout_s, metadata=self._metadata)
        except ValueError:
            return None  # the link was closed
        self._started.append(call)  # a call that nobody holds is cancelled
        return call

    def wait(self, started: Any, ping_s: float = PING_S) -> bytes:
        """The answer to a call that was started. Raises CloudLost when the server shows no sign of life meanwhile."""
        try:
            while True:
                try:
                    reply: bytes = started.result(timeout=_WATCH_S)
                    self._count(down=len(reply))
                    self.heard_at = time.monotonic()
                    return reply
                except grpc.FutureTimeoutError:
                    self.ping(ping_s)
        except grpc.RpcError as error:
            raise self._reason(error) from error
        except grpc.FutureCancelledError as error:
            raise CloudLost("The connection was closed.") from error
        finally:
            started.cancel()

    def _reason(self, error: grpc.RpcError) -> SkydraftError:
        """What a failed call stands for. A connection that was closed at once may be one to a server with TLS."""
        found = from_rpc(error)
        if not (isinstance(found, CloudLost) and "Socket closed" in found.message) or self.uses_tls or self.heard_at:
            return found
        if not _speaks_tls(*parse_address(self._options.address)):
            return found
        hint = "Give the certificate that signs its own with --tls-ca."
        return TlsFailure(f"The server at {self.target} wants TLS, and this connection is plaintext.", hint=hint)

    def stream(self, request: bytes, timeout_s: float) -> TokenStream:
        """A Generate call under way. Raises CloudLost on a closed link."""
        self._count(up=len(request))
        try:
            call = self._wires.generate(request, timeout=timeout_s, metadata=self._metadata)
        except ValueError as error:
            raise CloudLost("The connection was closed.") from error
        return TokenStream(self, call)

    def ping(self, timeout_s: float = PING_S) -> float:
        """Ask for a sign of life; returns the round trip in milliseconds. Raises CloudLost."""
        began = time.perf_counter()
        try:
            answer = self.call("Check", b"", timeout_s)
        except CloudTimeout as error:
            raise CloudLost(f"no sign of life in {timeout_s:g} s.") from error
        if answer != _SERVING:
            raise CloudLost("it is shutting down.")
        return (time.perf_counter() - began) * 1e3

    def info(self, timeout_s: float) -> ServerInfo:
        """What the server runs. Names are one line without control characters, since they are shown."""
        try:
            info = decode_info(self.call("GetInfo", b"", timeout_s))
        except ProtocolError as error:
            raise CloudFailure(f"The cloud at {self.target} says of itself what cannot be: {error.message}") from error
        return replace(info, model=one_line(info.model), version=one_line(info.version))

    def _count(self, *, up: int = 0, down: int = 0) -> None:
        with self._lock:
            self._bytes_up += up
            self._bytes_down += down

    def count_streamed(self, message: bytes) -> None:
        """Note a message that came in a stream."""
        self._count(down=len(message))

    def take_bytes(self) -> tuple[int, int]:
        """Bytes of messages up and down since the last time this was asked."""
        with self._lock:
            taken = self._bytes_up, self._bytes_down
            self._bytes_up = self._bytes_down = 0
        return taken

    def close(self) -> None:
        """Let go of the connection, once what was started has been sent."""
        for call in self._started:
            with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                call.result(timeout=_CLOSE_S)
        with self._lock:
            self._is_closed = True
            self._wires.channel.close()


def _speaks_tls(host: str, port: int) -> bool:
    """Whether the server there begins an encrypted connection, whoever it is."""
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), _TLS_S) as plain, anybody.wrap_socket(plain):
            return True
    except OSError:
        return False


class _Wires:
    """A channel and its methods: one value, so that a thread never calls half of an old one."""

    def __init__(self, channel: grpc.Channel) -> None:
        paths = {name: f"/{SERVICE}/{name}" for name in ("GetInfo", "Open", "Verify", "Close")} | {"Check": _HEALTH}
        self.channel = channel
        self.unary: dict[str, Any] = {name: channel.unary_unary(path) for name, path in paths.items()}
        self.generate: Any = channel.unary_stream(f"/{SERVICE}/Generate")


class TokenStream:
    """Messages of one Generate call, read by a thread so that silence can be told from death."""

    def __init__(self, link: Link, call: Any) -> None:
        self._link = link
        self._call = call
        self._arrived: deque[bytes | Exception] = deque()
        self._num_bytes = 0  # of what has arrived
        self._is_cancelled = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, name="stream", daemon=True).start()

    def _read(self) -> None:
        try:
            for message in self._call:
                self._put(message)
            self._put(CloudLost("The stream ended early."))
        except grpc.RpcError as error:
            self._put(from_rpc(error))

    def _put(self, item: bytes | Exception) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_bytes < _READ_AHEAD or self._is_cancelled)
            self._arrived.append(item)
            self._num_bytes += _size(item)
            self._changed.notify_all()

    def messages(self, timeout_s: float, ping_s: float = PING_S) -> Iterator[bytes]:
        """One message after the other. Raises CloudError when the stream fails, when nobody is at the other end, and
        when the next message takes longer than `timeout_s`."""
        while True:
            item = self._next(time.monotonic() + timeout_s, ping_s)
            if isinstance(item, Exception):
                raise item
            self._link.count_streamed(item)
            yield item

    def _next(self, until: float, ping_s: float) -> bytes | Exception:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._arrived, _WATCH_S):
                    item = self._arrived.popleft()
                    self._num_bytes -= _size(item)
                    self._changed.notify_all()
                    return item
            if time.monotonic() > until:
                raise CloudTimeout("the stream is silent.")
            self._link.ping(ping_s)

    def cancel(self) -> None:
        """Read no more."""
        self._call.cancel()
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()


def _size(item: bytes | Exception) -> int:
    return len(item) if isinstance(item, bytes) else 0
