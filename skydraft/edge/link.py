"""The link: one gRPC channel, made anew when it has died. Every message's bytes are counted."""

from __future__ import annotations

import contextlib
import queue
import re
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import grpc

from skydraft.characters import one_line
from skydraft.edge.tls import check_certificates, speaks_tls
from skydraft.errors import (
    CloudDraining,
    CloudFailure,
    CloudLost,
    CloudTimeout,
    OptionError,
    ProtocolError,
    SkydraftError,
    TlsFailure,
)
from skydraft.protocol import codec
from skydraft.protocol.address import is_loopback, parse_address
from skydraft.protocol.info import decode_info
from skydraft.protocol.status import from_rpc
from skydraft.protocol.values import FEW_FRAMES, SERVICE, ServerInfo
from skydraft.tracing import HEADER as TRACE_HEADER

PING_S = 5.0  # a server that is there answers a health check at once, however busy its model is
WATCH_S = 0.3  # how long a slow answer is waited for before the server is asked for a sign of life
_HEALTH = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"  # HealthCheckResponse(status=SERVING)
_CLOSE_S = 0.3


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Where the cloud is and how to get in.

    Loopback is spoken to in plaintext, everything else with TLS: by the system's roots, or by `tls_ca` (PEM). With
    `tls_ca` loopback uses TLS too. `tls_name` is the name in the server's certificate where it is not the host's.
    With `unary` each request of a session is a call of its own.
    """

    address: str
    token: str | None = None
    tls_ca: bytes | None = None
    tls_name: str | None = None
    insecure: bool = False
    unary: bool = False

    def __post_init__(self) -> None:
        host, _ = parse_address(self.address)
        if self.token is not None and not re.fullmatch(r"[\x21-\x7e]+", self.token):
            raise OptionError("The token is empty, or has a character that cannot be sent.")
        if self.insecure and (self.tls_ca or self.tls_name):
            raise OptionError("--insecure turns encryption off, so --tls-ca and --tls-name do not apply.")
        if self.tls_ca:
            check_certificates(self.tls_ca)
        if self.tls_name and not self.uses_tls:
            raise OptionError(f"The connection to {host} is not encrypted, so --tls-name does not apply.")

    @property
    def target(self) -> str:
        """HOST:PORT."""
        host, port = parse_address(self.address)
        return f"{host}:{port}"

    @property
    def uses_tls(self) -> bool:
        """Whether the channel is encrypted."""
        return bool(self.tls_ca) or not (self.insecure or self.is_here)

    @property
    def is_here(self) -> bool:
        """Whether the server is on this machine."""
        return is_loopback(parse_address(self.address)[0])


class Traffic:
    """Bytes of messages, which several links may count together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._up = self._down = 0

    def count(self, up: int, down: int) -> None:
        """Add to them."""
        with self._lock:
            self._up += up
            self._down += down

    def take(self) -> tuple[int, int]:
        """Bytes up and down since the last time this was asked."""
        with self._lock:
            taken = self._up, self._down
            self._up = self._down = 0
        return taken


class Link:
    """Calls to one server. Failures come as errors of our own tree. Threads may share it."""

    def __init__(self, options: LinkOptions, traffic: Traffic | None = None) -> None:
        self._options = options
        self.target = options.target
        self._metadata = self._authorization = (("authorization", f"Bearer {options.token}"),) if options.token else ()
        self._lock = threading.Lock()
        self._traffic = traffic or Traffic()
        self._started: list[Any] = []
        self._is_closed = False
        self.has_sessions = not options.unary  # until a server turns out to know no such streams
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
            *FEW_FRAMES,
        ]
        if self._options.is_here:
            settings.append(("grpc.enable_http_proxy", 0))
        if self._options.tls_name:
            settings.append(("grpc.ssl_target_name_override", self._options.tls_name))
        if self._options.uses_tls:
            credentials = grpc.ssl_channel_credentials(self._options.tls_ca)
            return _Wires(grpc.secure_channel(self.target, credentials, settings))
        return _Wires(grpc.insecure_channel(self.target, settings))

    def carry(self, traceparent: str) -> None:
        """Send it with each call and stream from now on; "" for nothing."""
        self._metadata = (*self._authorization, *([(TRACE_HEADER, traceparent)] if traceparent else []))

    def reconnect(self) -> None:
        """Leave a connection that may be dead, and make another one at the next call. Nothing on a closed link."""
        with self._lock:
            if not self._is_closed:
                self._wires.channel.close()
                self._wires = self._connect()

    def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """One unary call; blocks for at most `timeout_s`. The fast way: no other thread is woken."""
        self.count(up=len(request))
        try:
            reply: bytes = self._wires.unary[method](request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self.reason(error) from error
        except ValueError as error:  # the channel was closed meanwhile
            raise CloudLost("The connection was closed.") from error
        self.count(down=len(reply))
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
        self.count(up=len(request))
        try:
            call = self._wires.unary[method].future(request, timeout=timeout_s, metadata=self._metadata)
        except ValueError:
            return None  # the link was closed
        self.hold(call)
        return call

    def hold(self, call: Any) -> None:
        """Keep a call until it is done, since one that nobody holds is cancelled."""
        self._started = [*(held for held in self._started if not held.done()), call]

    def wait(self, started: Any, ping_s: float = PING_S) -> bytes:
        """The answer to a call that was started. Raises CloudLost when the server shows no sign of life meanwhile."""
        try:
            while True:
                try:
                    reply: bytes = started.result(timeout=WATCH_S)
                    self.count(down=len(reply))
                    self.heard_at = time.monotonic()
                    return reply
                except grpc.FutureTimeoutError:
                    self.ping(ping_s)
        except grpc.RpcError as error:
            raise self.reason(error) from error
        except grpc.FutureCancelledError as error:
            raise CloudLost("The connection was closed.") from error
        finally:
            started.cancel()

    def reason(self, error: grpc.RpcError) -> SkydraftError:
        """What a failed call stands for. A connection that was closed at once may be one to a server with TLS."""
        found = from_rpc(error)
        if not (isinstance(found, CloudLost) and "Socket closed" in found.message) or self.uses_tls or self.heard_at:
            return found
        if not speaks_tls(*parse_address(self._options.address)):
            return found
        hint = "Give the certificate that signs its own with --tls-ca."
        return TlsFailure(f"The server at {self.target} wants TLS, and this connection is plaintext.", hint=hint)

    def generate(self, request: bytes, timeout_s: float) -> Any:
        """A Generate call under way: an iterator of messages, to be counted. Raises CloudLost on a closed link."""
        self.count(up=len(request))
        try:
            return self._wires.generate(request, timeout=timeout_s, metadata=self._metadata)
        except ValueError as error:
            raise CloudLost("The connection was closed.") from error

    def session(self) -> SessionStream:
        """A stream for one session. Raises CloudLost on a closed link."""
        if sys.is_finalizing():
            raise CloudLost("The interpreter is ending.")
        requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        try:
            call = self._wires.session(iter(requests.get, None), metadata=self._metadata)
        except ValueError as error:
            raise CloudLost("The connection was closed.") from error
        return SessionStream(self, call, requests)

    def ping(self, timeout_s: float = PING_S) -> float:
        """Ask for a sign of life; returns the round trip in milliseconds. Raises CloudLost."""
        began = time.perf_counter()
        try:
            answer = self.call("Check", b"", timeout_s)
        except CloudTimeout as error:
            raise CloudLost(f"no sign of life in {timeout_s:g} s.") from error
        if answer != _SERVING:
            raise CloudDraining("it is shutting down.")
        return (time.perf_counter() - began) * 1e3

    def info(self, timeout_s: float) -> ServerInfo:
        """What the server runs. Names are one line without control characters, since they are shown."""
        try:
            info = decode_info(self.call("GetInfo", b"", timeout_s))
        except ProtocolError as error:
            raise CloudFailure(f"The cloud at {self.target} says of itself what cannot be: {error.message}") from error
        return replace(info, model=one_line(info.model), version=one_line(info.version))

    def count(self, *, up: int = 0, down: int = 0) -> None:
        """Note bytes of messages."""
        self._traffic.count(up, down)

    def take_bytes(self) -> tuple[int, int]:
        """Bytes of messages up and down since the last time this was asked, on all links that count with this one."""
        return self._traffic.take()

    def close(self) -> None:
        """Let go of the connection, once what was started has been sent."""
        for call in self._started:
            with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                call.result(timeout=_CLOSE_S)
        with self._lock:
            self._is_closed = True
            self._wires.channel.close()


class _Wires:
    """A channel and its methods: one value, so that a thread never calls half of an old one."""

    def __init__(self, channel: grpc.Channel) -> None:
        paths = {name: f"/{SERVICE}/{name}" for name in ("GetInfo", "Open", "Verify", "Close")} | {"Check": _HEALTH}
        self.channel = channel
        self.unary: dict[str, Any] = {name: channel.unary_unary(path) for name, path in paths.items()}
        self.generate: Any = channel.unary_stream(f"/{SERVICE}/Generate")
        self.session: Any = channel.stream_stream(f"/{SERVICE}/Session")


@dataclass(frozen=True, slots=True)
class _Wait:
    """For an answer: when to look whether anybody is there, and until when; times by the monotonic clock."""

    look_at: float
    until: float
    ping_s: float


class SessionStream:
    """The messages of one session, with one answer to each, for one thread.

    That thread sends and reads itself. gRPC lets it wait for an answer without an end, so a second one looks now and
    then whether it has been waiting for long, asks the server for a sign of life, and breaks off if there is none.
    """

    def __init__(self, link: Link, call: Any, requests: queue.SimpleQueue[bytes | None]) -> None:
        self._link = link
        self._call = call
        self._requests = requests
        self._num_owed = 0
        self._wait: _Wait | None = None
        self._broken_by: SkydraftError | None = None
        self._ended = threading.Event()
        self.is_named = False  # whether the server knows which session it is about
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        if not call.add_callback(self._end):
            self._end()

    def _end(self) -> None:
        """The call is over, however it came: let go of the threads that wait for it."""
        self._ended.set()
        self._requests.put(None)

    @property
    def is_over(self) -> bool:
        """Whether nothing can be asked here any more: it broke, or what was asked was given up."""
        return self._num_owed > 0 or not self._call.is_active()

    @property
    def is_draining(self) -> bool:
        """Whether it is over because the server is shutting down, which it said while nothing was asked."""
        return not self._call.is_active() and isinstance(from_rpc(self._call), CloudDraining)

    def send(self, request: bytes) -> None:
        """Ask for what `receive` will return."""
        self._link.count(up=len(request))
        self._num_owed += 1
        self.is_named = True
        self._requests.put(request)

    def receive(self, timeout_s: float, ping_s: float, quick_s: float = WATCH_S) -> bytes | None:
        """The next answer, or None from a server that knows no such streams.

        After `quick_s` the server is asked for signs of life. Raises what the unary call would, and is over then.
        """
        now = time.monotonic()
        self._wait = _Wait(now + quick_s, now + timeout_s, ping_s)
        try:
            reply: bytes = next(self._call)
        except StopIteration as error:
            raise CloudLost("The stream ended early.") from error
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._link.has_sessions = False
                return None
            raise self._broken_by or self._link.reason(error) from error
        finally:
            self._wait = None
        self._num_owed -= 1
        self._link.count(down=len(reply))
        self._link.heard_at = time.monotonic()
        return reply

    def _watch(self) -> None:
        pause_s = WATCH_S
        while not self._ended.wait(pause_s):
            wait, pause_s = self._wait, WATCH_S
            if wait is None:
                continue
            early_s = wait.look_at - time.monotonic()
            if early_s > 0:
                pause_s = min(early_s, WATCH_S)
            elif (error := self._silence(wait)) and self._wait is wait:
                self._broken_by = error
                self._call.cancel()

    def _silence(self, wait: _Wait) -> SkydraftError | None:
        """What an answer that is late means, if it means anything."""
        if time.monotonic() > wait.until:
            return CloudTimeout("no answer in time.")
        try:
            self._link.ping(wait.ping_s)
        except SkydraftError as error:
            return error
        return None

    def cancel(self) -> None:
        """Break off; the session stays."""
        self._call.cancel()

    def close(self) -> bool:
        """End the session with the stream. False where that cannot be said here: it broke, or an answer is awaited."""
        if self.is_over:
            self.cancel()
            return False
        self._requests.put(codec.CLOSES)
        self._link.hold(self._call)
        return True
