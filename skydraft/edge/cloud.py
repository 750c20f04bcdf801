"""A cloud: one server, or several that run the same model, as generations use them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from skydraft.decoding.context import Committed
from skydraft.decoding.plan import Plan
from skydraft.decoding.prices import Prices
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import TargetFacts
from skydraft.edge.channel import Awaited
from skydraft.edge.line import ServerList
from skydraft.edge.servers import Servers
from skydraft.edge.session import new_number
from skydraft.edge.stock.load import Examined, Steps
from skydraft.edge.stock.server import StockServer
from skydraft.edge.verifier import Notices, Notify, Patience, RemoteVerifier, silent, too_late
from skydraft.engines.vocab import Vocab
from skydraft.errors import CloudError, OptionError, SkydraftError
from skydraft.protocol.values import ServerInfo
from skydraft.types import Prompt

T = TypeVar("T")
_FACTS_S = 120.0  # how long facts about a server may be reused; rounds measure the rest
_ONE_OF_MANY_S = 3.0  # timeout of GetInfo for one of several servers
_PAUSE_S = 0.1  # between two tries of GetInfo


class Cloud:
    """One server, or several that run the same model, and the behaviour when they are slow or gone. Any number of
    generations may use it at once, from any thread.

    `timeout_s` is the time to wait for an answer, from a busy or a lost cloud. A gated plan continues alone within a
    second of silence, unless `require`; a cloud with a round trip above half a second counts as silent there.
    `engine` is None: the draft model's tokenizer encodes the requests. `open_ahead` opens each session at once instead
    of at the first escalation. `notify` gets a line when the cloud is lost and when it is back.
    """

    engine = None

    def __init__(
        self,
        servers: ServerList,
        *,
        timeout_s: float = 30.0,
        require: bool = False,
        open_ahead: bool = False,
        notify: Notify = silent,
    ) -> None:
        if not 0 < timeout_s < 86400:
            raise OptionError(f"--cloud-timeout must be a number of seconds above 0, not {timeout_s:g}.")
        self._servers = servers
        self._timeout_s = timeout_s
        self._require = require
        self._open_ahead = open_ahead
        self._notices = Notices(notify)
        self._number = new_number()  # orders the servers for GetInfo, as a session's number does for its text
        self._pending: Awaited[Any] | None = None  # the current or last wait
        self._is_cancelled = False

    def telling(self, notify: Notify) -> Cloud:
        """The same cloud with another `notify`."""
        return Cloud(
            self._servers, timeout_s=self._timeout_s, require=self._require, open_ahead=self._open_ahead, notify=notify
        )

    @property
    def name(self) -> str:
        """HOST:PORT of each server, with commas."""
        return self._servers.name

    @property
    def uses_tls(self) -> bool:
        """Whether the connections are encrypted."""
        return self._servers.uses_tls

    @property
    def is_exact(self) -> bool:
        """Whether its tokens do not depend on what else it computes; known once it has answered."""
        return self._servers.is_exact

    @property
    def is_stock(self) -> bool:
        """Whether it is a server without skydraft."""
        return isinstance(self._servers, StockServer)

    @property
    def prices(self) -> Prices | None:
        """What its tokens cost, if they are sold."""
        return self._servers.prices

    def info(self) -> ServerInfo:
        """The servers' description. Tries until `timeout_s` is over. Raises CloudError."""
        servers = self._servers
        assert isinstance(servers, Servers)
        wait_s = min(self._timeout_s, _ONE_OF_MANY_S) if servers.has_others else self._timeout_s
        return self._run(self._patiently(lambda channel: servers.info(channel, wait_s)))

    def examine(self, vocab: Vocab) -> Examined:
        """Who a server without skydraft is, and what it costs. Raises a SkydraftError."""
        assert isinstance(self._servers, StockServer)
        return self._run(self._servers.examine(vocab, self._timeout_s))

    def steps(self, num_texts: int) -> Steps:
        """What its steps take while it writes so many texts at once. Raises a SkydraftError."""
        assert isinstance(self._servers, StockServer)
        return self._run(self._servers.steps(num_texts, self._timeout_s))

    def ping(self, timeout_s: float) -> float:
        """The round trip to a server, in milliseconds. Raises CloudLost."""
        ping: Callable[[Any], Awaitable[float]] = lambda channel: channel.ping(timeout_s)  # noqa: E731
        return self._run(self._servers.ask(self._number, ping))

    def facts(self, wait_s: float | None) -> TargetFacts | None:
        """Facts about the servers, asked for now or in the last two minutes.

        Returns None if no server answers within `wait_s` seconds; with 0 no server is asked. `wait_s` None waits for
        `timeout_s`. Raises CloudError for errors that waiting does not cure.
        """
        known = [self._servers.facts.get(channel.target) for channel in self._servers.in_order(self._number)]
        for at, facts in filter(None, known):
            if time.monotonic() - at < _FACTS_S:
                return facts
        if wait_s is None:
            return self._run(self._patiently(lambda channel: self._servers.learn(channel, self._timeout_s)))
        if wait_s == 0:
            return None
        wait_s = min(wait_s, self._timeout_s)
        try:
            return self._run(self._servers.ask(self._number, lambda channel: self._servers.learn(channel, wait_s)))
        except CloudError as error:
            if not error.is_outage:
                raise
            return None

    async def _patiently(self, ask: Callable[[Any], Awaitable[T]]) -> T:
        now = self._servers.loop.now
        began = now()
        while True:
            try:
                return await self._servers.ask(self._number, ask)
            except SkydraftError as error:
                if not error.retryable:
                    raise
                if now() - began + _PAUSE_S > self._timeout_s:
                    raise too_late(self.name, error, self._timeout_s) from error
            await asyncio.sleep(_PAUSE_S)
            for channel in self._servers.in_order(self._number):
                await channel.renew()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        self._pending = pending = self._servers.loop.begin(work)
        if self._is_cancelled:
            pending.cancel()
        return pending.result()

    def cancel(self) -> None:
        """End the wait for facts with CloudLost, and all later ones. Any thread may call this."""
        self._is_cancelled = True
        if (pending := self._pending) is not None:
            pending.cancel()

    def falls_back(self, plan: Plan) -> bool:
        """Whether a generation by this plan continues alone if the cloud is lost."""
        return plan.is_gated and not self._require

    def verifier(
        self, context: Committed, prompt: Prompt, vocab: Vocab, request: GenerateRequest, *, drafts_first: bool = True
    ) -> RemoteVerifier:
        """The verifier of one generation."""
        plan = request.plan
        session = self._servers.session(context, prompt, vocab, request)
        patience = Patience(self._timeout_s, self.falls_back(plan), self._servers.has_others)
        verifier = RemoteVerifier(self._servers, context, session, patience, self._notices)
        if plan.drafts and drafts_first and (self._open_ahead or not plan.is_gated):
            verifier.open_ahead()
        if patience.falls_back and not any(each.heard_at for each in self._servers.in_order(0)):
            verifier.greet(vocab)
        return verifier

    def close(self) -> None:
        """Close the connections."""
        self._servers.loop.begin(self._servers.close()).result()
