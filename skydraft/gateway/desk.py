"""Who is being answered: a few generations at a time, each in a thread of its own, the others in a queue.

Rounds take turns on the engines (`Engine.floor`), so a short answer is not stuck behind a long one. Whoever hangs up
gives up its place, its sequence and its seat in the cloud, wherever it is, and disturbs nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from skydraft.decoding.generation import Generation
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.stats import Stats
from skydraft.errors import CloudLost, SkydraftError
from skydraft.gateway.pair import Pair
from skydraft.gateway.refusals import Refusal, busy
from skydraft.types import FinishReason, Round, Token

_FIRST_TOKEN_S = 0.05  # at most; a client that reads slowly holds nothing up
log = logging.getLogger("skydraft.gateway")


@dataclass(frozen=True, slots=True)
class Wrote:
    """A round of it; `news` is of the cloud, "" where there is none."""

    done: Round
    tokens: Seq[Token]
    news: str


@dataclass(frozen=True, slots=True)
class Ended:
    """It is complete."""

    finish: FinishReason
    stats: Stats
    num_prompt_tokens: int


Event: TypeAlias = Wrote | Ended | Exception


class Ticket:
    """One choice on its way. `index` and what happens to it go into `events`; the last event is Ended or an error.

    `label` says whose it is. `has_begun` is set once a client has its first token, or where none waits for it.
    """

    def __init__(
        self, request: GenerateRequest, label: str, index: int, events: asyncio.Queue[tuple[int, Event]]
    ) -> None:
        self.request = request
        self.label = label
        self.has_begun = threading.Event()
        self.is_cancelled = False  # only `Desk.cancel` changes it
        self.generation: Generation | None = None  # only its thread changes it
        self._index = index
        self._events = events
        self._loop = asyncio.get_running_loop()

    def tell(self, event: Event) -> None:
        """Say what happened. From any thread."""
        if not self.is_cancelled:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (self._index, event))


class Desk:
    """Runs at most `max_running` tickets at a time, and lets `max_waiting` wait.

    Who has the fewest running goes next. Where there are keys, who has a place already leaves as many free as it takes,
    and the last place to run in is for somebody who runs nothing: long answers of one key let all others wait.
    All but `_run` belongs to the thread of the event loop.
    """

    def __init__(self, pair: Pair, max_running: int, max_waiting: int, *, has_keys: bool = False) -> None:
        self._pair = pair
        self._has_keys = has_keys
        self._max_running, self._max_waiting = max_running, max_waiting
        self._waiting: deque[Ticket] = deque()
        self._running: set[Ticket] = set()
        self._pool = ThreadPoolExecutor(max_running, thread_name_prefix="generation")

    @property
    def num_running(self) -> int:
        """Choices being written."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Choices in the queue."""
        return len(self._waiting)

    def submit(
        self, requests: Seq[GenerateRequest], label: str = "", *, streams: bool = False
    ) -> tuple[list[Ticket], asyncio.Queue[tuple[int, Event]]]:
        """Take all of them or none, and return where their events arrive. Raises Refusal when the queue is full.

        Where a client `streams`, its first token goes out before a second round begins.
        """
        free = self._max_running - len(self._running) + self._max_waiting - len(self._waiting)
        if len(requests) > self._max_running + self._max_waiting:
            raise Refusal(400, f"There is room for {self._max_running + self._max_waiting} choices at most.", param="n")
        own = sum(ticket.label == label for ticket in (*self._waiting, *self._running))
        if len(requests) > free or (self._has_keys and own and own + 2 * len(requests) > free):
            raise busy()
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()  # as long as the answers at most
        tickets = [Ticket(request, label, index, events) for index, request in enumerate(requests)]
        if not streams:
            for ticket in tickets:
                ticket.has_begun.set()
        self._waiting.extend(tickets)
        self._start()
        return tickets, events

    def cancel(self, ticket: Ticket) -> None:
        """Nobody reads it any more: it leaves the queue, or ends after the round in hand."""
        ticket.is_cancelled = True
        ticket.has_begun.set()
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        elif (generation := ticket.generation) is not None:
            with suppress(SkydraftError):  # it may be ending
                generation.cancel()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            running = Counter(ticket.label for ticket in self._running)
            ticket = min(self._waiting, key=lambda ticket: running[ticket.label])
            is_last = len(self._running) == self._max_running - 1 > 0
            if self._has_keys and is_last and running[ticket.label]:
                return
            self._waiting.remove(ticket)
            self._running.add(ticket)
            future = asyncio.get_running_loop().run_in_executor(self._pool, self._run, ticket)
            future.add_done_callback(partial(self._end, ticket))

    def _end(self, ticket: Ticket, _: object) -> None:
        self._running.discard(ticket)
        self._start()

    def _run(self, ticket: Ticket) -> None:
        """Write one choice, in a thread of the pool."""
        try:
            with self._pair.start(ticket.request) as (generation, news):
                ticket.generation = generation
                if not ticket.is_cancelled:  # it may have been, before there was anything to cancel
                    for done, tokens in generation.rounds():
                        ticket.tell(Wrote(done, tokens, news.take()))
                        # A round in Python would take the interpreter from the event loop at each of its steps.
                        ticket.has_begun.wait(_FIRST_TOKEN_S)
                if generation.finish_reason:
                    ticket.tell(Ended(generation.finish_reason, generation.stats, generation.num_prompt_tokens))
        except Exception as error:
            ticket.tell(error)  # unless it was cancelled, when errors are how it ends
        finally:
            ticket.generation = None

    def cancel_all(self) -> None:
        """The gateway stops: everybody is told, and nothing goes on."""
        for ticket in (*self._waiting, *self._running):
            ticket.tell(CloudLost("The gateway is shutting down."))
            self.cancel(ticket)

    def close(self) -> None:
        """End what is under way, and wait for it."""
        self.cancel_all()
        self._pool.shutdown(wait=True)
