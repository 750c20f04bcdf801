"""The open streams of sessions: their limit, and the rules by which the server ends one.

The server may end an idle stream at any time: the session stays, and the client opens another stream for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from skydraft.cloud.access import Keyring
from skydraft.cloud.limits import Limits
from skydraft.cloud.shares import Shares
from skydraft.errors import CloudBusy, CloudDraining, CloudLost, NotAuthorized, SkydraftError

_STREAMS_PER_PLACE = 4  # of the queue: a client that is drafting has a stream without a request
_SWEEP_S = 1.0  # how often idle streams are checked; the token file is read as often


@dataclass(eq=False, slots=True)
class Stream:
    """An open stream; its client is at `port`. `is_busy` is set during a request, `is_known` and `used_at` after it."""

    owner: str
    authorization: str
    task: asyncio.Task[None]
    used_at: float
    port: int
    is_busy: bool = False
    is_known: bool = False  # a request of it was answered
    ended_by: SkydraftError | None = None


class Streams:
    """All open streams of a server; used only on the server's event loop. `clock` is in seconds."""

    def __init__(self, keyring: Keyring, limits: Limits, clock: Callable[[], float]) -> None:
        self._keyring = keyring
        self._most = _STREAMS_PER_PLACE * limits.max_queue
        self._ttl_s = limits.session_ttl_s
        self._clock = clock
        self._open: set[Stream] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self.is_draining = False

    @contextmanager
    def entered(self, authorization: str, task: asyncio.Task[None], peer: str) -> Iterator[Stream]:
        """Register the stream that `task` serves for `peer`, as gRPC names it, for the duration of the block.

        Raises NotAuthorized, CloudBusy, and at the end of the block the error with which the server ended the stream.
        """
        owner = self._keyring.label(authorization)
        if self.is_draining:
            raise CloudDraining("The server is shutting down.")
        self._make_room(owner)
        port = peer.rpartition(":")[2]
        stream = Stream(owner, authorization, task, self._clock(), int(port) if port.isdecimal() else 0)
        self._open.add(stream)
        if self._sweeper is None:
            self._sweep_later()
        try:
            yield stream
        except asyncio.CancelledError:
            if stream.ended_by is None:
                raise  # the client disconnected
            task.uncancel()
            raise stream.ended_by from None
        finally:
            self._open.discard(stream)

    def _make_room(self, owner: str) -> None:
        """End the least recently used idle stream of the owner with the most, if that is more than `owner` has."""
        shares = Shares(self._most, held=(stream.owner for stream in self._open))
        if shares.num_free > 0:
            return
        idle = [each for each in self._open if not each.is_busy and shares.gives_way(each.owner, owner)]
        if not idle:
            raise CloudBusy(f"{len(self._open)} streams are open already.", hint="Try again later.")
        idle.sort(key=lambda each: each.used_at)
        self._end(shares.largest_first(idle, lambda each: each.owner)[0], CloudLost("The stream made way for another."))

    def _end(self, stream: Stream, error: SkydraftError) -> None:
        stream.ended_by = error
        stream.task.cancel()
        self._open.discard(stream)

    def _sweep_later(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """End idle streams whose token was revoked, or that were idle for as long as a session lives."""
        self._sweeper = None
        revoked = {each: error for each in {s.authorization for s in self._open} if (error := self._refusal(each))}
        latest = self._clock() - self._ttl_s
        for stream in [stream for stream in self._open if not stream.is_busy]:
            if stream.authorization in revoked:
                self._end(stream, revoked[stream.authorization])
            elif stream.used_at < latest:
                self._end(stream, CloudLost("The stream was idle for too long."))
        if self._open:
            self._sweep_later()

    def _refusal(self, authorization: str) -> NotAuthorized | None:
        try:
            self._keyring.label(authorization)
        except NotAuthorized as error:
            return error
        return None

    @property
    def ports(self) -> set[int]:
        """The ports of the clients that have a session, or wait for one."""
        return {stream.port for stream in self._open if stream.is_busy or stream.is_known}

    def drain(self) -> set[asyncio.Task[None]]:
        """End all idle streams and refuse new ones; returns the tasks of all streams, which end with them.

        The service ends each busy stream after its answer.
        """
        tasks = {stream.task for stream in self._open}
        self.is_draining = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for stream in [stream for stream in self._open if not stream.is_busy]:
            self._end(stream, CloudDraining("The server is shutting down."))
        return tasks
