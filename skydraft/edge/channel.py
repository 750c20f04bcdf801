"""The channel to a server of ours: TLS, tokens, bytes. Its methods run on the event loop, and raise SkydraftErrors."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc

from skydraft.edge.event_loop import Waiting, seen, shared_loop, sign_of_life
from skydraft.edge.tls import ServerOptions, first_error
from skydraft.errors import CloudDraining, CloudLost, CloudTimeout, SessionNotFound, SkydraftError
from skydraft.protocol.status import from_rpc
from skydraft.protocol.values import FEW_FRAMES, SERVICE
from skydraft.tracing import HEADER as TRACE_HEADER

_HEALTH = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"  # HealthCheckResponse(status=SERVING)
_SESSION = f"/{SERVICE}/Session"
_CLOSE_S = 10.0  # for the close of a session to be sent, in the background
_NOT_SENT = "Internal error from Core"  # gRPC's text for a message that could not be sent; the status has the cause
_LOOK_S, _NUM_LOOKS = 0.01, 20  # interval and number of looks for that status
_LOOK_AGAIN_S = 0.3  # from an answer of the server to the next ping, while other answers take long


class Channel:
    """A connection to one server, shared by all generations."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.address = options.target
        self.heard_at = 0.0  # when the server last answered, in the loop's time
        self._pings: dict[float, asyncio.Task[float]] = {}  # under way, by how long they may take
        self._authorization = (("authorization", f"Bearer {options.token}"),) if options.token else ()
        self._wire: grpc.aio.Channel | None = None

    @property
    def wire(self) -> grpc.aio.Channel:
        self._wire = self._wire or self._connect()
        return self._wire

    def _connect(self) -> grpc.aio.Channel:
        settings: list[tuple[str, Any]] = [
            ("grpc.use_local_subchannel_pool", 1),  # or a new channel would share the dead connection
            ("grpc.enable_retries", 0),  # edge/recovery.py alone decides about retries
            ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.enable_http_proxy", int(not self.options.is_here)), *FEW_FRAMES,
        ]  # fmt: skip
        if self.options.tls_name:
            settings.append(("grpc.ssl_target_name_override", self.options.tls_name))
        if self.options.uses_tls:
            credentials = grpc.ssl_channel_credentials(self.options.tls_ca)
            return grpc.aio.secure_channel(self.address, credentials, settings)
        return grpc.aio.insecure_channel(self.address, settings)

    async def renew(self, wire: grpc.aio.Channel | None = None) -> None:
        """Drop a connection that may be dead, the current one or `wire`, unless it was dropped before."""
        dead = wire or self._wire
        if dead is not None and self._wire is dead:
            self._wire = None
            await dead.close()

    async def call(self, path: str, timeout_s: float) -> bytes:
        try:
            method: Any = self.wire.unary_unary(path)
            reply: bytes = await method(b"", timeout=timeout_s, metadata=self._authorization)
        except grpc.aio.AioRpcError as error:
            raise await self.reason(error) from error
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            raise _closed(error) from error
        self.heard_at = shared_loop().now()
        return reply

    async def reason(self, error: grpc.aio.AioRpcError) -> SkydraftError:
        meant = from_rpc(error)
        return meant if self.heard_at else await first_error(meant, self.options)

    async def ping(self, timeout_s: float) -> float:
        """Ping the server, once for all who ask meanwhile; returns the round trip in ms. Raises CloudLost."""
        if (ping := self._pings.get(timeout_s)) is None or ping.done():
            ping = self._pings[timeout_s] = asyncio.ensure_future(self._ping(timeout_s))
            ping.add_done_callback(seen)
        return await asyncio.shield(ping)

    async def _ping(self, timeout_s: float) -> float:
        return await sign_of_life(self._look, timeout_s)

    async def _look(self, timeout_s: float) -> None:
        if await self.call(_HEALTH, timeout_s) != _SERVING:
            raise CloudDraining("it is shutting down.")

    def stream(self, traceparent: str) -> SessionStream:
        """A stream for one session, in the trace of `traceparent` ("": in none)."""
        trace = [(TRACE_HEADER, traceparent)] if traceparent else []
        method: Any = self.wire.stream_stream(_SESSION)
        return SessionStream(self, self.wire, method(metadata=[*self._authorization, *trace]))

    async def close(self) -> None:
        await self.renew()


class SessionStream:
    """The messages of one session, for one reader."""

    def __init__(self, channel: Channel, wire: grpc.aio.Channel, call: Any) -> None:
        self._channel = channel
        self._wire = wire
        self._call = call
        self._broken_by: SkydraftError | None = None
        self._watching: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._has_replied = self._has_written = False

    @property
    def is_over(self) -> bool:
        return bool(self._call.done())

    @property
    def may_have_sent(self) -> bool:
        """Whether a message may have left this device: one was written, or there is a connection."""
        return self._has_written or self._wire.get_state() is grpc.ChannelConnectivity.READY

    def send(self, message: bytes) -> None:
        """Send a message that has no reply of its own; if that fails, the stream is over."""
        self._sending = asyncio.ensure_future(self._write(message))

    async def _write(self, message: bytes) -> None:
        if self._sending is not None and self._sending is not asyncio.current_task():
            await asyncio.wait((self._sending,))  # gRPC takes one message at a time
            self._sending = None
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # `receive` raises the cause
            await self._call.write(message)
            self._has_written = True

    async def receive(self, waiting: Waiting, message: bytes | None = None) -> bytes:
        """The next message, after sending one. Raises a SkydraftError, which ends the stream."""
        loop = asyncio.get_running_loop()
        late = loop.call_later(waiting.quick_s, self._watch, waiting, shared_loop().now())
        try:
            if message is not None and self._has_replied:
                await self._write(message)  # a task of its own would begin later
            elif message is not None:
                self.send(message)  # a write waits for ever if no connection comes, whatever is cancelled
            reply = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._broken_by or await self._reason(error) from error
        except (asyncio.CancelledError, asyncio.InvalidStateError) as error:
            raise self._broken_by or _closed(error) from error
        finally:
            late.cancel()
            if self._watching is not None:
                self._watching.cancel()
                self._watching = None
        if not isinstance(reply, bytes):
            raise CloudLost("The stream ended early.")
        self._has_replied, self._channel.heard_at = True, shared_loop().now()
        return reply

    async def _reason(self, error: grpc.aio.AioRpcError) -> SkydraftError:
        """The server's error. For a message to an ended stream gRPC reports one of its own first, or only that."""
        for _ in range(_NUM_LOOKS):
            if error.details() != _NOT_SENT:
                return await self._channel.reason(error)
            await asyncio.sleep(_LOOK_S)
            try:
                await self._call.read()
            except grpc.aio.AioRpcError as later:
                error = later
        return SessionNotFound("The stream ended early.")  # open it again: the connection may be sound

    def _watch(self, waiting: Waiting, began: float) -> None:
        self._watching = asyncio.ensure_future(self._look_for_life(waiting, began))

    async def _look_for_life(self, waiting: Waiting, began: float) -> None:
        """Break the stream off if the answer is too late, or the server answers nobody: no other text, and no ping."""
        try:
            while (now := shared_loop().now()) < began + waiting.timeout_s:
                pause_s = self._channel.heard_at + _LOOK_AGAIN_S - now
                await (asyncio.sleep(pause_s) if pause_s > 0 else self._channel.ping(waiting.ping_s))
            self._broken_by = CloudTimeout("no answer in time.")
        except SkydraftError as error:
            self._broken_by = error
        self.cancel()

    async def renew(self) -> None:
        await self._channel.renew(self._wire)

    def cancel(self) -> None:
        self._call.cancel()
        if self._sending is not None:
            self._sending.cancel()

    async def finish(self, last: bytes) -> None:
        """Send the last message; the server then ends the stream."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._write(last)
                while isinstance(await self._call.read(), bytes):
                    pass
        self.cancel()


def _closed(error: BaseException) -> CloudLost:
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error
    return CloudLost("The connection was closed.")
