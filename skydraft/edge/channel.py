"""The gRPC channel to a skydraft server, and the event loop on which a process waits for all servers.

The loop runs in one thread. Deadlines, pings and cancelling are its timers and tasks, so a generation starts no thread.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import grpc

from skydraft import errors
from skydraft.edge.tls import ServerOptions, first_error
from skydraft.errors import Cancelled, CloudLost, CloudTimeout, OptionError, SkydraftError, or_else
from skydraft.protocol.status import from_rpc
from skydraft.protocol.values import FEW_FRAMES, HEALTH, SERVING, SESSION

T = TypeVar("T")
_CLOSE_S = 10.0  # timeout for closing a session, in the background
_NOT_SENT = "Internal error from Core"  # gRPC's text for a message that could not be sent
_LOOK_AGAIN_S = 0.3  # from an answer of the server to the next ping
_END_S = 0.3  # timeout of tasks that run when the interpreter ends
_TICK_S, _UNSEEN_S = 0.1, 0.3  # a longer pause between two ticks means that this process was stopped


@dataclass(frozen=True, slots=True)
class Waiting:
    """Times of one wait, in seconds: pings begin after `quick_s`, each has `ping_s`, the answer has `timeout_s`."""

    timeout_s: float
    quick_s: float
    ping_s: float


class Waits:
    """Threads' waits for work on the event loop, which one thread can cancel."""

    def __init__(self) -> None:
        self._pending = set[Future[Any]]()
        self._is_cancelled = False

    def run(self, work: Coroutine[Any, Any, T], soon_s: float | None = None, late: Callable[[], object] = int) -> T:
        """Run `work` on the event loop and return its result. Call `late` if it takes longer than `soon_s`. Raises the
        work's errors, Cancelled after `cancel`, CloudLost at the interpreter's end, OptionError in a forked process."""
        pending = shared_loop().begin(work)
        self._pending.add(pending)
        if self._is_cancelled:
            pending.cancel()
        try:
            with or_else(pending.cancel):
                if soon_s is not None and not wait((pending,), soon_s).done:
                    late()
                return pending.result()
        except CancelledError as error:
            if shared_loop().is_over:  # the interpreter is ending: wait here to end with it
                threading.Event().wait()
            raise (Cancelled if self._is_cancelled else CloudLost)("The generation was cancelled.") from error
        finally:
            self._pending.discard(pending)

    def cancel(self) -> None:
        """End these waits and all later ones with Cancelled. Any thread may call this."""
        self._is_cancelled = True
        for pending in tuple(self._pending):
            pending.cancel()


class EventLoop:
    """An event loop in a daemon thread, for callers that block."""

    def __init__(self) -> None:
        self._pid, self._loop = os.getpid(), asyncio.new_event_loop()
        self._ran_s, self._ticked = 0.0, time.monotonic()
        self.is_over = False  # only `_wind_up` changes it
        self._loop.call_soon(self._tick)
        self._thread = threading.Thread(target=self._loop.run_forever, name="skydraft edge", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def now(self) -> float:
        """Return the seconds that the loop ran. Time of a stopped process or a sleeping machine does not count."""
        return self._ran_s + min(time.monotonic() - self._ticked, _UNSEEN_S)

    def _tick(self) -> None:
        self._ran_s, self._ticked = self.now(), time.monotonic()
        self._loop.call_later(_TICK_S, self._tick)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start work on the loop. Raises as `call` does."""
        with or_else(work.close):
            self.call(lambda: None)  # raises if no work can start
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Callable[[], Any]) -> None:
        """Run `work` on the loop. Raises CloudLost while the interpreter ends, OptionError in a forked process."""
        self.check_process()
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError as error:
            raise CloudLost("The interpreter is ending.") from error

    def check_process(self) -> None:
        """Raise OptionError in a forked process."""
        if self._pid != os.getpid():  # the loop's thread runs only in the parent, and gRPC cannot change its loop
            hint = "Start processes with the method spawn, or use the cloud only in them."
            raise OptionError("This process was forked after a cloud was used, so it cannot use a cloud.", hint=hint)

    def post(self, work: Callable[[], Any]) -> None:
        """Run `work` on the loop, unless the interpreter is ending. Never waits, so a finalizer may call this."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def _stop(self) -> None:
        self.post(lambda: self._loop.create_task(self._wind_up()))
        self._thread.join(2.0)
        if not self._thread.is_alive() and not self._loop.is_running():  # in a forked process both may be wrong
            self._loop.close()

    async def _wind_up(self) -> None:
        """End all tasks: asyncio would complain about pending ones."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        _, late = await asyncio.wait(others, timeout=_END_S) if others else ((), ())
        self.is_over = True
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        self._loop.stop()


_lock = threading.Lock()
_shared: EventLoop | None = None


def shared_loop() -> EventLoop:
    """Return the event loop of this process. A forked process gets its parent's loop, which raises on use."""
    global _shared
    with _lock:
        _shared = _shared or EventLoop()
        return _shared


Look: TypeAlias = Callable[[float], Awaitable[object]]  # pings a server, with a timeout in seconds


async def watch(look: Look, waiting: Waiting, began: float, heard_at: Callable[[], float]) -> None:
    """Ping the server during a wait. Raises CloudTimeout when the answer is too late, or the error of `look`."""
    while (now := shared_loop().now()) < began + waiting.timeout_s:
        pause_s = min(heard_at() + _LOOK_AGAIN_S, began + waiting.timeout_s) - now
        await (asyncio.sleep(pause_s) if pause_s > 0 else look(waiting.ping_s))
    raise CloudTimeout("no answer in time.")


async def sign_of_life(ask: Look, timeout_s: float) -> float:
    """Return the milliseconds until `ask` has an answer. Raises CloudLost after `timeout_s`."""
    now = shared_loop().now
    while True:
        began, ran = time.perf_counter(), now()
        try:
            await ask(timeout_s)
        except CloudTimeout as error:
            if now() - ran >= timeout_s / 2:  # else this process was stopped meanwhile: ask again
                raise CloudLost(f"no sign of life in {timeout_s:g} s.") from error
        else:
            return (time.perf_counter() - began) * 1e3


def seen(task: asyncio.Future[Any]) -> None:
    """Read the error of a task that perhaps nobody awaits: asyncio would complain about an unread one."""
    _ = task.cancelled() or task.exception()


class Channel:
    """A connection to one server, shared by all generations. Its methods run on the loop and raise SkydraftErrors."""

    def __init__(self, options: ServerOptions) -> None:
        self.options, self.address = options, options.target
        self.heard_at = 0.0  # when the server last answered, in the loop's time
        self._pings: dict[float, asyncio.Task[float]] = {}  # under way, by timeout
        self._authorization = (("authorization", f"Bearer {options.token}"),) if options.token else ()
        self._wire: grpc.aio.Channel | None = None

    @property
    def wire(self) -> grpc.aio.Channel:
        self._wire = self._wire or self._connect()
        return self._wire

    def _connect(self) -> grpc.aio.Channel:
        settings: list[tuple[str, Any]] = [
            ("grpc.use_local_subchannel_pool", 1),  # else a new channel would share the dead connection
            ("grpc.enable_retries", 0),  # only edge/recovery.py retries
            ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.enable_http_proxy", int(not self.options.is_here)), *FEW_FRAMES,
        ]  # fmt: skip
        if self.options.tls_name:
            settings.append(("grpc.ssl_target_name_override", self.options.tls_name))
        if self.options.uses_tls:
            return grpc.aio.secure_channel(self.address, grpc.ssl_channel_credentials(self.options.tls_ca), settings)
        return grpc.aio.insecure_channel(self.address, settings)

    async def renew(self, wire: grpc.aio.Channel | None = None) -> None:
        """Drop a connection that may be dead: `wire`, if it is still in use, by default the current one."""
        dead = wire or self._wire
        if dead is not None and self._wire is dead:
            self._wire = None
            await dead.close()

    close = renew

    async def call(self, path: str, timeout_s: float, message: bytes = b"") -> bytes:
        try:
            method: Any = self.wire.unary_unary(path)
            reply: bytes = await method(message, timeout=timeout_s, metadata=self._authorization)
        except grpc.aio.AioRpcError as error:
            raise self.reason(error) from error
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            raise _closed(error) from error
        self.heard_at = shared_loop().now()
        return reply

    def reason(self, error: grpc.aio.AioRpcError) -> SkydraftError:
        meant = from_rpc(error)
        return meant if self.heard_at else first_error(meant, self.options)

    async def ping(self, timeout_s: float) -> float:
        """Return the round trip in ms. Callers at the same time share one ping. Raises CloudLost."""
        if (ping := self._pings.get(timeout_s)) is None or ping.done():
            ping = self._pings[timeout_s] = asyncio.ensure_future(sign_of_life(self._look, timeout_s))
            ping.add_done_callback(seen)
        return await asyncio.shield(ping)

    async def _look(self, timeout_s: float) -> None:
        if await self.call(HEALTH, timeout_s) != SERVING:
            raise errors.CloudDraining("it is shutting down.")

    def stream(self) -> SessionStream:
        method: Any = self.wire.stream_stream(SESSION)
        return SessionStream(self, self.wire, method(metadata=self._authorization))


class SessionStream:
    def __init__(self, channel: Channel, wire: grpc.aio.Channel, call: Any) -> None:
        self._channel, self._wire, self._call = channel, wire, call
        self._broken_by: SkydraftError | None = None
        self._watching: asyncio.Task[None] | None = None
        self._sending = set[asyncio.Task[None]]()
        self._turn = asyncio.Lock()  # gRPC takes one message at a time
        self._has_replied = self._has_written = False

    @property
    def is_over(self) -> bool:
        return bool(self._call.done())

    @property
    def may_have_sent(self) -> bool:
        """Whether a message may have left this device: one was written, or the connection is ready."""
        return self._has_written or self._wire.get_state() is grpc.ChannelConnectivity.READY

    def send(self, message: bytes) -> None:
        """Send a message that gets no reply. If sending fails, the stream is over."""
        task = asyncio.ensure_future(self._write(message))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def write(self, message: bytes) -> None:
        """Send a message after all earlier ones, and wait until it is sent."""
        if self._sending:
            await asyncio.wait(self._sending)
        await self._write(message)

    async def _write(self, message: bytes) -> None:
        async with self._turn:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # `receive` raises the cause
                await self._call.write(message)
                self._has_written = True

    async def receive(self, waiting: Waiting, message: bytes | None = None) -> bytes:
        """Send `message`, if given, and return the next one. A SkydraftError ends the stream."""
        late = asyncio.get_running_loop().call_later(waiting.quick_s, self._watch, waiting, shared_loop().now())
        try:
            if message is not None and self._has_replied and not self._sending:
                await self._write(message)  # sooner than in a task of its own
            elif message is not None:
                self.send(message)  # without a connection a write never returns, even if cancelled
            reply = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._broken_by or self._reason(error) from error
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

    def _reason(self, error: grpc.aio.AioRpcError) -> SkydraftError:
        """Return the server's error. gRPC reports its own error for a message to an ended stream."""
        if error.details() == _NOT_SENT:
            return errors.SessionNotFound("The stream ended early.")  # open again: the connection may be sound
        return self._channel.reason(error)

    def _watch(self, waiting: Waiting, began: float) -> None:
        self._watching = asyncio.ensure_future(self._look_for_life(waiting, began))

    async def _look_for_life(self, waiting: Waiting, began: float) -> None:
        try:
            await watch(self._channel.ping, waiting, began, lambda: self._channel.heard_at)
        except SkydraftError as error:
            self._broken_by = error
        self.cancel()

    async def renew(self) -> None:
        await self._channel.renew(self._wire)

    def cancel(self) -> None:
        self._call.cancel()
        for task in self._sending:
            task.cancel()

    async def finish(self, last: bytes) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self.write(last)
                while isinstance(await self._call.read(), bytes):
                    pass
        self.cancel()


def _closed(error: BaseException) -> CloudLost:
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error
    return CloudLost("The connection was closed.")
