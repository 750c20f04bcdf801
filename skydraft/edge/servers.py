"""The servers of a list: their channels, the order of tries, and facts about them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from hashlib import blake2b
from typing import Any, TypeVar

from skydraft.decoding.context import Committed
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import TargetFacts
from skydraft.edge.budget import Budget
from skydraft.edge.channel import Channel, EventLoop, shared_loop
from skydraft.edge.session import Session, new_number
from skydraft.edge.tls import ServerOptions
from skydraft.engines.vocab import Vocab
from skydraft.errors import SkydraftError, TargetChanged, VocabularyMismatch
from skydraft.protocol.codec import short_fingerprint, target_id
from skydraft.protocol.values import Opening, ServerInfo, TargetId
from skydraft.types import Prompt

T = TypeVar("T")
_NUM_PINGS = 2  # the shorter one counts
_AVOID_S = 5.0  # a lost server is tried last for this long
_CLOSE_S = 1.0  # time for the open closes of sessions
_ONE_FAMILY = "Choose two models of one family."

_loop: EventLoop | None = None


class Servers:
    """The servers of a list, their channels, and facts about them. All generations with this list share it."""

    prices = None  # our own servers sell no tokens
    is_exact = True  # unless a server says that it is not

    def __init__(self, options: Iterable[ServerOptions], budget: Budget | None = None) -> None:
        self._budget = budget
        self.channels = {each.target: Channel(each) for each in options}
        self.name = ",".join(self.channels)
        self.has_others = len(self.channels) > 1
        self.target: TargetId | None = None  # of several servers: the first one seen, which all must run
        self.facts: dict[str, tuple[float, TargetFacts]] = {}  # by server, with the time
        self._avoid_until: dict[str, float] = {}
        self._changed: set[str] = set()  # servers that run another target
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def loop(self) -> EventLoop:
        """The event loop of the channels: after a fork it stays that of the parent, as gRPC runs on no other."""
        global _loop
        _loop = _loop or shared_loop()
        return _loop

    @property
    def uses_tls(self) -> bool:
        """Whether all connections are encrypted."""
        return all(channel.options.uses_tls for channel in self.channels.values())

    def session(self, context: Committed, prompt: Prompt, vocab: Vocab, request: GenerateRequest) -> Session:
        """A text at the server that comes first for it."""
        number = new_number()
        opening = Opening(
            short_fingerprint(vocab.fingerprint), prompt, params=request.params, top=request.plan.top,
            cache_scope=request.cache_scope, target=self.target,
        )  # fmt: skip
        return Session(
            context, opening, vocab.size, self.in_order(number)[0], number=number, traceparent=request.traceparent,
            on_open=self.met, budget=self._budget,
        )  # fmt: skip

    def in_order(self, number: int) -> list[Channel]:
        """The channels in the order in which a session of this number tries them.

        Rendezvous hashing spreads the sessions evenly; a recently lost server comes last.
        """
        now = time.monotonic()

        def rank(name: str) -> tuple[bool, bytes]:
            digest = blake2b(f"{number} {name}".encode(), digest_size=8).digest()
            return self._avoid_until.get(name, 0.0) <= now, digest

        return [self.channels[name] for name in sorted(self.channels, key=rank, reverse=True)]

    def lost(self, channel: Channel) -> None:
        """Note that a server did not answer: it is tried last for a while."""
        self._avoid_until[channel.target] = time.monotonic() + _AVOID_S

    def met(self, channel: Channel, target: TargetId | None) -> None:
        """Note the target of one of several servers: the others must run the same."""
        self._changed.discard(channel.target)
        if self.has_others and self.target is None:
            self.target = target

    def changed(self, channel: Channel) -> bool:
        """Note that a server runs another target. True if all servers do: new texts then begin with the new target."""
        self._changed.add(channel.target)
        if len(self._changed) < len(self.channels) or self.target is None:
            return False
        self.target = None
        self._changed.clear()
        return True

    async def ask(self, number: int, ask: Callable[[Channel], Awaitable[T]]) -> T:
        """The answer of the first server that gives one, in order. Raises the error of the last server."""
        *others, last = self.in_order(number)
        for channel in others:
            try:
                return await ask(channel)
            except TargetChanged:
                self.changed(channel)
            except SkydraftError:
                self.lost(channel)
        try:
            return await ask(last)
        except TargetChanged:
            if not self.changed(last):
                raise
            return await ask(last)

    async def info(self, channel: Channel, timeout_s: float) -> ServerInfo:
        """The description of a server. Raises CloudError, or TargetChanged if the others run another target."""
        info = await channel.info(timeout_s)
        target, self.is_exact = target_id(info.weights, info.execution, info.context_len), info.execution == "exact"
        if self.target and not target.will_do_for(self.target):
            raise TargetChanged(
                f"The server {channel.target} runs {info.model} ({info.execution}), another one of the list does not.",
                hint="Name servers that run the same.",
            )
        self.met(channel, target)
        return info

    async def greet(self, number: int, vocab: Vocab, timeout_s: float) -> None:
        """Ask whether a server is there. Raises CloudError, TargetChanged or VocabularyMismatch."""
        info = await self.ask(number, lambda channel: self.info(channel, timeout_s))
        if info.fingerprint != short_fingerprint(vocab.fingerprint):
            raise VocabularyMismatch(f"{info.model} there reads other tokens than the draft model.", hint=_ONE_FAMILY)

    async def learn(self, channel: Channel, timeout_s: float) -> TargetFacts:
        """The facts about a server: its model and the round trip."""
        info = await self.info(channel, timeout_s)
        wire_ms = min([await channel.ping(timeout_s) for _ in range(_NUM_PINGS)])
        facts = TargetFacts(
            info.model, info.weights, info.forward_ms, info.max_rows, wire_ms=wire_ms, streams=True,
            max_block=info.max_block,
        )  # fmt: skip
        self.facts[channel.target] = time.monotonic(), facts
        return facts

    def end(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run closing work on the loop. Never waits."""

        def begin() -> None:
            task = asyncio.ensure_future(work())
            self._ending.add(task)
            task.add_done_callback(self._ended)

        self.loop.post(begin)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        _ = task.cancelled() or task.exception()  # a session that is not closed expires on the server

    async def close(self) -> None:
        """Close the connections after the open closes of sessions."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=_CLOSE_S)
        for channel in self.channels.values():
            await channel.close()
