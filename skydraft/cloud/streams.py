"""The streams of sessions that are open: how many there may be, and which of them end before their clients end them.

A stream between two requests holds nothing that its client cannot have again by opening another one, so an idle one may
end at any time: its session stays.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from skydraft.cloud.access import Keyring
from skydraft.cloud.limits import Limits
from skydraft.errors import CloudBusy, CloudDraining, CloudLost, NotAuthorized, SkydraftError

_STREAMS_PER_PLACE = 4  # of the queue: whoever drafts has a stream and asks for nothing
_SWEEP_S = 1.0  # how often idle streams are looked at, as the token file is


@dataclass(eq=False, slots=True)
class Stream:
    """An open stream. Whoever answers its requests notes `is_busy` and, when one was answered, `used_at`."""

    owner: str
    authorization: str
    task: asyncio.Task[None]
    used_at: float
    is_busy: bool = False
    ended_by: SkydraftError | None = None


class Streams:
    """All open streams of a server; everything here happens on its event loop. `clock` is in seconds."""

    def __init__(self, keyring: Keyring, limits: Limits, clock: Callable[[], float]) -> None:
        self._keyring = keyring
        self._most = _STREAMS_PER_PLACE * limits.max_queue
        self._ttl_s = limits.session_ttl_s
        self._clock = clock
        self._open: set[Stream] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self.is_draining = False

    @contextmanager
    def entered(self, authorization: str, task: asyncio.Task[None]) -> Iterator[Stream]:
        """The stream that `task` serves, for as long as it does.

        Raises NotAuthorized, CloudBusy, and within the block what ended the stream from outside.
        """
        owner = self._keyring.label(authorization)
        if self.is_draining:
            raise CloudDraining("The server is shutting down.")
        self._make_room(owner)
        stream = Stream(owner, authorization, task, self._clock())
        self._open.add(stream)
        if self._sweeper is None:
            self._sweep_later()
        try:
            yield stream
        except asyncio.CancelledError:
            if stream.ended_by is None:
                raise  # the client has left
            task.uncancel()
            raise stream.ended_by from None
        finally:
            self._open.discard(stream)

    def _make_room(self, owner: str) -> None:
        """End the idle stream that was used least recently, of whoever has the most and not fewer than `owner`."""
        if len(self._open) < self._most:
            return
        counts = Counter(stream.owner for stream in self._open)
        idle = [
            stream
            for stream in self._open
            if not stream.is_busy and (stream.owner == owner or counts[stream.owner] > counts[owner])
        ]
        if not idle:
            raise CloudBusy(f"{len(self._open)} streams are open already.", hint="Try again later.")
        last = min(idle, key=lambda stream: (-counts[stream.owner], stream.used_at))
        self._end(last, CloudLost("The stream made way for another one."))

    def _end(self, stream: Stream, error: SkydraftError) -> None:
        stream.ended_by = error
        stream.task.cancel()
        self._open.discard(stream)

    def _sweep_later(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """End idle streams whose token was revoked, or whose client has said nothing for as long as a session lives."""
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

    def drain(self) -> None:
        """End what is idle, and let nobody in any more. Who is answered now has to end his stream afterwards."""
        self.is_draining = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for stream in [stream for stream in self._open if not stream.is_busy]:
            self._end(stream, CloudDraining("The server is shutting down."))
