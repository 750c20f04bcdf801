"""Run generations: a few at a time, each in its own thread, the others in a queue.

Generations alternate on an engine round by round, so a short answer does not wait for a long one. When a client
disconnects, its place, its sequence and its session in the cloud are freed.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from skydraft.access.shares import Shares
from skydraft.decoding.accounts.receipt import Receipt
from skydraft.decoding.accounts.stats import Stats
from skydraft.decoding.generation import Generation
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import CloudLost, SkydraftError
from skydraft.gateway.pair import Pair
from skydraft.gateway.refusals import RETRY_AFTER_S, Refusal
from skydraft.prompts.tool_calls import Piece, Reader
from skydraft.types import FinishReason, Round, Score, Token

_TTFT_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


@dataclass(frozen=True, slots=True)
class Began:
    """A choice starts, after the text `begins`. Scores are empty unless requested."""

    num_prompt_tokens: int = 0
    begins: str = ""
    prompt_scores: Seq[Score] = ()


@dataclass(frozen=True, slots=True)
class Wrote:
    """A round was written. `pieces` has the pieces that each of its tokens made certain."""

    done: Round
    tokens: Seq[Token]
    pieces: Seq[Seq[Piece]]
    notices: str  # lines about the cloud, or ""
    scores: Seq[Score] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The choice is complete. `pieces` are the last ones. `scores` are its tokens' scores by (draft model, target), if
    requested."""

    finish: FinishReason  # "interrupted" after the only allowed call
    pieces: Seq[Piece]
    stop: str  # the stop string that ended it, or ""
    stats: Stats
    receipt: Receipt
    scores: tuple[Seq[Score | None], Seq[Score | None]] = ((), ())


Event: TypeAlias = Began | Wrote | Ended | Exception
Events: TypeAlias = "asyncio.Queue[tuple[int, Event]]"


@dataclass(eq=False, slots=True)
class Ticket:
    """One choice to write for the client `label`. Its events go into `events` with its `index`: Began, several Wrote,
    then Ended or an error.
    """

    request: GenerateRequest
    label: str
    index: int
    events: Events
    reader: Reader  # only the generation's thread uses it, and changes the next two
    pair: Pair | None = None
    generation: Generation | None = None
    is_cancelled: bool = False  # only `Desk.cancel` changes it
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def read(self, tokens: Iterable[Token]) -> Iterator[Seq[Piece]]:
        """Yield the pieces that each token makes certain. Stop after the only allowed call."""
        for token in tokens:
            if self.reader.is_done:
                return
            thought = [Piece(token.reasoning, "thinking")] if token.reasoning else []
            yield thought + self.reader.push(token.text)

    def tell(self, event: Event) -> None:
        if not self.is_cancelled:
            self.loop.call_soon_threadsafe(self.events.put_nowait, (self.index, event))


class Desk:
    """Run at most `max_running` tickets at a time; at most `max_waiting` wait.

    The key with the fewest running tickets goes next. With keys, a key must leave as many places free as it has. The
    last running place is for a key that runs nothing, so long answers of one key do not block all others. The thread of
    the event loop calls everything but `_run`.
    """

    def __init__(self, pair: Pair, max_running: int, max_waiting: int, *, has_keys: bool = False) -> None:
        self._pair, self._has_keys = pair, has_keys
        self._max_running, self._num_places = max_running, max_running + max_waiting
        self._waiting: list[Ticket] = []
        self._running: set[Ticket] = set()
        self._pool = ThreadPoolExecutor(max_running, thread_name_prefix="generation")
        self._is_stopping = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _shares(self, total: int, holders: Iterable[Ticket], spare: int | None = None) -> Shares:
        return Shares(total, apart=self._has_keys, spare=spare, held=(ticket.label for ticket in holders))

    def submit(
        self, requests: Seq[GenerateRequest], label: str = "", reader: Callable[[], Reader] = Reader
    ) -> tuple[list[Ticket], Events]:
        """Queue all choices or none; return their tickets and event queue. `reader` makes a choice's parser of calls.

        Raises Refusal if there is no room, CloudLost once the gateway stops.
        """
        if self._is_stopping:
            raise CloudLost("The gateway is shutting down.")
        num_choices = len(requests)
        if num_choices > self._num_places:
            raise Refusal(400, f"There is room for {self._num_places} choices at most.", param="n")
        if not self._shares(self._num_places, (*self._waiting, *self._running)).may_take(label, num_choices):
            raise Refusal(503, "The gateway is busy. Try again later.", code="busy", retry_after_s=RETRY_AFTER_S)
        events: Events = asyncio.Queue()  # bounded by the length of the answers
        tickets = [Ticket(request, label, index, events, reader()) for index, request in enumerate(requests)]
        self._waiting += tickets
        self._start()
        return tickets, events

    def cancel(self, ticket: Ticket) -> None:
        """Take a ticket out of the queue, or end its generation after the current round."""
        ticket.is_cancelled = True
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            return
        for under_way in (ticket.pair, ticket.generation):
            if under_way is not None:
                with suppress(SkydraftError):  # it may end at this moment
                    under_way.cancel()

    def _start(self) -> None:
        while ticket := self._next():
            self._waiting.remove(ticket)
            self._running.add(ticket)
            future = asyncio.get_running_loop().run_in_executor(self._pool, self._run, ticket)
            future.add_done_callback(partial(self._end, ticket))

    def _next(self) -> Ticket | None:
        lanes = self._shares(self._max_running, self._running, spare=1)
        return lanes.next_of(self._waiting, lambda ticket: ticket.label)

    def _end(self, ticket: Ticket, _: object) -> None:
        self._running.discard(ticket)
        self._start()

    def _run(self, ticket: Ticket) -> None:
        notices: list[str] = []  # lines about the cloud, in order
        try:
            ticket.pair = self._pair.telling(notices.append)
            if not ticket.is_cancelled:  # a cancel before this line found no pair
                with ticket.pair.start(ticket.request) as ticket.generation:
                    self._write(ticket, ticket.generation, notices)
        except Exception as error:
            ticket.tell(error)  # `tell` drops it for a cancelled ticket
        finally:
            ticket.pair = ticket.generation = None

    def _write(self, ticket: Ticket, generation: Generation, notices: list[str]) -> None:
        if ticket.is_cancelled:
            return
        scored = takewhile(lambda _: not ticket.is_cancelled, generation.prompt_scores())
        ticket.tell(Began(generation.num_prompt_tokens, generation.begins, tuple(scored)))
        self._finish(ticket, generation)  # a request may write no tokens
        for done, tokens in generation.rounds():
            lines, notices[:] = " ".join(notices), []
            pieces = list(ticket.read(tokens))
            shown, scores = tokens[: len(pieces)], generation.scores(done)[: len(pieces)]
            ticket.tell(Wrote(done, shown, pieces, lines, scores))
            if ticket.reader.is_done:
                generation.interrupt()
            self._finish(ticket, generation)  # before observers run

    def _finish(self, ticket: Ticket, generation: Generation) -> None:
        finish = generation.finish_reason
        if finish is None:
            return
        left = ticket.reader.finish("" if generation.text or finish != "eos" else generation.reasoning)
        if ticket.reader.is_done:  # even if the last token has another reason
            finish = "interrupted"
        stats, scores = generation.stats, generation.scores_of_both()
        if auditor := self._pair.auditor:
            stats = replace(stats, audits=auditor.figures_of(generation))
        ticket.tell(Ended(finish, left, generation.stop_string, stats, generation.receipt, scores))

    def stop(self) -> None:
        """Tell all clients that the gateway stops. Any thread may call this."""
        self._is_stopping = True
        for ticket in (*self._waiting, *self._running):
            ticket.tell(CloudLost("The gateway is shutting down."))

    def close(self) -> None:
        for ticket in (*self._waiting, *self._running):
            self.cancel(ticket)
        self._pool.shutdown(wait=True)


class GatewayMetrics:
    def __init__(self, desk: Desk, pair: Pair) -> None:
        self._registry, cloud = CollectorRegistry(), pair.far
        ours: dict[str, Any] = {"namespace": "skydraft_gateway", "registry": self._registry}
        self._answers = Counter("answers", "Completed choices", **ours)
        self._refusals = Counter("refusals", "Errors sent to clients", ["status"], **ours)
        self._tokens = Counter("tokens", "Tokens by origin", ["origin"], **ours)
        self._rounds = Counter("rounds", "Rounds by outcome", ["outcome"], **ours)
        self._cached = Counter("cached_tokens", "Prompt tokens reused", ["side"], **ours)
        self._ttft = Histogram("ttft_seconds", "Time from start to first round", buckets=_TTFT_S, **ours)
        Gauge("running", "Choices being written", **ours).set_function(lambda: desk.num_running)
        Gauge("waiting", "Choices in the queue", **ours).set_function(lambda: desk.num_waiting)
        if cloud is not None:  # gauges: a server may report cache hits late, which lowers the cost
            tokens = Gauge("cloud_tokens", "Tokens that servers read, found in a cache, and wrote", ["kind"], **ours)
            for kind in ("in", "hit", "out"):
                tokens.labels(kind).set_function(partial(lambda name: getattr(cloud.spent, name), f"tokens_{kind}"))
        if cloud is not None and (prices := cloud.prices):
            Gauge("cloud_cost", "Cost of the cloud's tokens", **ours).set_function(lambda: prices.of(cloud.spent))

    def happened(self, event: Event) -> None:
        if isinstance(event, Wrote):
            self._rounds.labels(event.done.record.outcome).inc()
            for token in event.tokens:
                self._tokens.labels(token.origin).inc()
        elif isinstance(event, Ended):
            self._answers.inc()
            self._cached.labels("edge").inc(event.stats.cached_tokens.edge)
            self._cached.labels("cloud").inc(event.stats.cached_tokens.cloud)
            if event.stats.ttft_ms is not None:
                self._ttft.observe(event.stats.ttft_ms / 1e3)

    def refused(self, status: int) -> None:
        self._refusals.labels(str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
