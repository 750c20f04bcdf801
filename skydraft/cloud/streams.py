"""The open streams of sessions: their limit, and the choice of streams to end.

The server may end an idle stream at any time: the session stays, and the client opens another stream for it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from skydraft.access.keys import Keyring
from skydraft.access.limits import Limits
from skydraft.access.shares import Shares
from skydraft.cloud.docket import Job
from skydraft.errors import CloudBusy, CloudDraining, CloudLost, SkydraftError
from skydraft.types import Draft

_STREAMS_PER_PLACE = 4  # for each place in the queue: a drafting client has a stream without a request


@dataclass(eq=False, slots=True)
class Stream:
    """`is_busy` is set during a request, `used_at` after it. `requests` end with None. `job` is the current job, which
    takes `drafts`."""

    owner: str
    authorization: str
    task: asyncio.Task[Any]
    used_at: float
    requests: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    session: int = 0
    job: Job | None = None
    drafts: deque[Draft] = field(default_factory=deque)
    num_drafts: int = 0  # messages with drafts, less the share that written tokens have used up
    is_busy: bool = False
    ended_by: SkydraftError | None = None


class Streams:
    """All open streams of a server; used only on the server's event loop. `clock` is in seconds."""

    def __init__(self, keyring: Keyring, limits: Limits, clock: Callable[[], float]) -> None:
        self._keyring, self._clock = keyring, clock
        self._most = _STREAMS_PER_PLACE * limits.max_queue
        self._open: set[Stream] = set()
        self.is_draining = False

    @contextmanager
    def entered(self, authorization: str) -> Iterator[Stream]:
        """Yield a stream for the current task. Raises NotAuthorized, CloudBusy, and the error that ended the stream."""
        task = asyncio.current_task()
        assert task is not None  # this runs on the event loop
        owner = self._keyring.label(authorization)
        if self.is_draining:
            raise CloudDraining("The server is shutting down.")
        self._make_room(owner)
        stream = Stream(owner, authorization, task, self._clock())
        self._open.add(stream)
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
        """End the least recently used idle stream of the owner with the most streams, if it has more than `owner`."""
        shares = Shares(self._most, held=(stream.owner for stream in self._open))
        if shares.num_free > 0:
            return
        idle = [each for each in self._open if not each.is_busy and shares.gives_way(each.owner, owner)]
        if not idle:
            raise CloudBusy(f"{len(self._open)} streams are open already.", hint="Try again later.")
        idle.sort(key=lambda each: each.used_at)
        self.end(shares.largest_first(idle, lambda each: each.owner)[0], CloudLost("The stream made way for another."))

    def end(self, stream: Stream, error: SkydraftError) -> None:
        stream.ended_by = error
        stream.task.cancel()
        self._open.discard(stream)

    def drain(self) -> set[asyncio.Task[Any]]:
        """End idle streams, refuse new ones, and return all tasks. The service ends busy streams after their answer."""
        tasks = {stream.task for stream in self._open}
        self.is_draining = True
        for stream in [stream for stream in self._open if not stream.is_busy]:
            self.end(stream, CloudDraining("The server is shutting down."))
        return tasks
