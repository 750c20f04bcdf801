"""The cloud of a generation: one server, or several that run the same model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, TypeVar, get_args

from skydraft.decoding.context import Context
from skydraft.decoding.plan import Plan
from skydraft.decoding.request import GenerateRequest, Prepared
from skydraft.decoding.target import TargetFacts
from skydraft.edge.channel import Waits, shared_loop
from skydraft.edge.server import OURS, Server, check_drafts
from skydraft.edge.servers import Servers
from skydraft.edge.session import OwnServer
from skydraft.edge.verifier import SILENT_S, Notify, RemoteText, RemoteVerifier, silent, too_late, waiting_for
from skydraft.engines.base import Engine
from skydraft.engines.vocab import Vocab
from skydraft.errors import (
    CloudError,
    CloudFailure,
    CloudLoading,
    CloudLost,
    CloudTimeout,
    OptionError,
    SkydraftError,
)  # fmt: skip
from skydraft.protocol.values import ServerInfo
from skydraft.types import LinkCost

T = TypeVar("T")
_FACTS_S = 120.0  # how long facts about a server may be reused; rounds measure the rest
_ONE_OF_MANY_S = 3.0  # timeout of GetInfo for one of several servers
_BACKGROUND_S = 600.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.0  # between two tries; the pause doubles while a cloud loads its model
_LOOK_S = 0.1  # timeout of a ping to a cloud that another text has just lost
_FIRST_S = 10.0  # longest timeout of the first requests to a cloud
Fallback = Literal["lost", "start"]


@dataclass(eq=False)
class Cloud:
    """One server, or several with the same model, and what to do when they are slow or lost (see `api.connect`).

    Any number of generations may use it at once, from any thread. A gated plan treats a cloud with a round trip above
    half a second as silent. `engine` is None: the draft model's tokenizer encodes the requests.
    """

    servers: Servers
    _: KW_ONLY
    timeout_s: float = 30.0
    require: bool = False
    fallback: Fallback = "lost"
    open_ahead: bool = False
    notify: Notify = silent

    engine = None

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < 86400:
            raise OptionError(f"--cloud-timeout must be a number of seconds above 0, not {self.timeout_s:g}.")
        if self.fallback not in get_args(Fallback) or (self.require and self.fallback == "start"):
            raise OptionError("--fallback must be lost or start, and start does not go with --require-cloud.")
        self.name, self.prices = self.servers.name, self.servers.all[0].budget.prices
        self.uses_tls = all(server.uses_tls for server in self.servers.all)
        self._key = random.random()  # orders the servers for requests that belong to no text
        self._waits = Waits()
        self.cancel = self._waits.cancel

    def in_background(self) -> Cloud:
        """Return a copy for audits, which no user waits for: it may take long, prints nothing, and ends soon if the
        cloud is lost. Raises OptionError for a server without skydraft."""
        if self.is_stock:
            message = "--audit-share does not apply to a server without skydraft: it cannot check a finished answer."
            raise OptionError(message, hint="Leave it out, or use a server that runs skydraft serve.")
        return replace(self, notify=silent, require=False, open_ahead=False, timeout_s=_BACKGROUND_S)

    @property
    def is_exact(self) -> bool:
        """Whether other requests at the servers leave the tokens unchanged. Correct only after an answer."""
        return all(server.is_exact for server in self.servers.all)

    @property
    def spent(self) -> LinkCost:
        """The cost of all texts of this process. The servers of a list share one budget."""
        return self.servers.all[0].budget.spent

    @property
    def kind(self) -> str:
        """The kind of server: "skydraft", a program such as "vllm", "chat", or "auto" while it is unknown."""
        return self.servers.all[0].kind

    @property
    def is_stock(self) -> bool:
        return self.kind != OURS

    def takes_drafts_of(self, draft: Engine | None) -> bool:
        return not self.is_stock or self.servers.all[0].drafts is not None

    def info(self) -> ServerInfo:
        """Return the description of skydraft servers. Retry until `timeout_s` is over. Raises CloudError."""
        wait_s = min(self.timeout_s, _ONE_OF_MANY_S) if self.servers.has_others else self.timeout_s

        async def ask(server: Server) -> ServerInfo:
            assert isinstance(server, OwnServer)
            info = await server.info(wait_s)
            self.servers.agree(server)
            return info

        return self._run(self._patiently(ask))

    def vocabulary(self) -> bytes:
        """Return the servers' vocabulary as a GGUF file without matrices; empty if there is none. Raises CloudError."""

        async def ask(server: Server) -> bytes:
            return await server.vocabulary(self.timeout_s) if isinstance(server, OwnServer) else b""

        return self._run(self._patiently(ask))

    def ping(self, timeout_s: float) -> float:
        return self._run(self.servers.ask(self._key, lambda server: server.ping(timeout_s)))

    def facts(self, wait_s: float | None) -> TargetFacts | None:
        """Return facts about a server, at most two minutes old; None if no server answers within `wait_s` seconds.
        0 returns known facts of any age, None waits for `timeout_s`. Raises CloudError if waiting cannot help."""
        known = [self.servers.facts.get(server.address) for server in self.servers.in_order(self._key)]
        for at, facts in filter(None, known):
            if time.monotonic() - at < _FACTS_S or wait_s == 0:
                return facts
        if wait_s is None:
            asking = self._patiently(lambda server: self.servers.learn(server, self.timeout_s))
            return self._run(asking, f"waiting for the cloud at {self.name}.")
        if wait_s == 0:
            return None
        wait_s = min(wait_s, self.timeout_s)
        try:
            return self._run(self.servers.ask(self._key, lambda server: self.servers.learn(server, wait_s)))
        except CloudError as error:
            if not error.is_outage:
                raise
            return None

    async def _patiently(self, ask: Callable[[Server], Awaitable[T]]) -> T:
        now = shared_loop().now
        began = now()
        while True:
            try:
                return await self.servers.ask(self._key, ask)
            except SkydraftError as error:
                if not error.retryable:
                    raise
                if now() - began + _PAUSE_S > self.timeout_s:
                    raise too_late(self.name, error, self.timeout_s) from error
            await asyncio.sleep(_PAUSE_S)
            await self.servers.renew()

    def _run(self, work: Coroutine[Any, Any, T], waits: str = "") -> T:
        return self._waits.run(work, SILENT_S if waits else None, lambda: self.notify(waits))

    def meet(self, vocab: Vocab) -> CloudError | None:
        """Make first contact with a cloud. Return its outage, or None if it can be used.

        Wait for a cloud that loads its model. Raises CloudErrors that waiting cannot cure: wrong credentials,
        certificates, protocols, vocabularies or answers.
        """
        limit_s = min(self.timeout_s, SILENT_S) if self.fallback == "start" else self.timeout_s
        until, pause_s, is_second, is_loading = time.monotonic() + limit_s, _PAUSE_S, False, False

        async def greet(server: Server) -> None:
            await server.greet(vocab, wait_s)
            self.servers.agree(server)

        while True:
            wait_s = min(max(until - time.monotonic(), _PAUSE_S), _FIRST_S)
            waits = "" if is_loading else f"waiting up to {wait_s:g} s for the cloud at {self.name}."
            try:
                self._run(self.servers.ask(self._key, greet), waits)
                return None
            except CloudError as error:
                if not error.is_outage or isinstance(error, CloudFailure):
                    raise
                gone = error
            if isinstance(gone, CloudLoading) and not is_loading:
                is_loading = True
                if limit_s > SILENT_S:
                    self.notify(f"the cloud at {self.name} is not ready; waiting up to {limit_s:g} s. {gone.message}")
            is_gone = is_second or isinstance(gone, CloudTimeout) or self.servers.is_reached
            left_s = until - time.monotonic()
            if left_s <= 0 or not isinstance(gone, CloudLost) or (is_gone and not is_loading):
                return gone
            if is_loading:
                self._run(asyncio.sleep(min(pause_s, left_s)))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            is_second = True
            self._run(self.servers.renew())  # gRPC may remember that a server was away a moment ago

    def meet_for(self, plan: Plan, vocab: Vocab) -> CloudError | None:
        """Return the outage with which a text starts on the draft model alone, or None. Raises CloudLost if `fallback`
        forbids such a start, and OptionError if the cloud cannot check drafts."""
        check_drafts(plan, self.kind)
        if not self.falls_back(plan):
            return None
        if self.servers.outage:
            self._run(self.servers.renew())  # gRPC may remember that a server was away a moment ago
            with suppress(SkydraftError):
                self.ping(_LOOK_S)  # an answer ends the outage
        if any(server.is_met for server in self.servers.all) or self.servers.outage:
            return self.servers.outage
        gone = self.meet(vocab)
        check_drafts(plan, self.kind)
        if not isinstance(gone, CloudLost) or (self.servers.is_reached and not isinstance(gone, CloudLoading)):
            return None  # the first verification reports the error
        if self.fallback == "start":
            return gone
        hint = "Check the address, or wait longer with --cloud-timeout. To start without it: --fallback=start."
        raise CloudLost(f"The cloud at {self.name} was not reached ({gone.message.rstrip('.')}).", hint=hint) from gone

    def plan_for(self, request: GenerateRequest) -> Plan:
        """Return the request's plan. A plan that drafts and checks every block streams at a server without skydraft.
        Raises OptionError for a block length there."""
        plan = request.plan
        if not self.is_stock or request.execution == "throughput" or plan.is_gated or not plan.may_go_alone:
            return plan
        if plan.k is not None:
            says = "A server without skydraft is not exact, so it streams where every block would be checked."
            hint = "To draft anyway: --gate always --execution throughput. To stream: --mode cloud."
            raise OptionError(says, hint=hint)
        return plan.streaming()

    def falls_back(self, plan: Plan) -> bool:
        return plan.may_go_alone and not self.require

    def verifier(
        self, context: Context, vocab: Vocab, request: Prepared, *, drafts_first: bool = True,
        outage: CloudError | None = None,
    ) -> RemoteVerifier:  # fmt: skip
        plan, falls_back = request.plan, self.falls_back(request.plan)
        waiting = waiting_for(self.timeout_s, falls_back=falls_back, has_others=self.servers.has_others)
        text = RemoteText(self.servers, context, vocab, request, waiting, falls_back=falls_back)
        verifier = RemoteVerifier(text, self.notify)
        if outage:
            verifier.go_alone(outage)
        if not outage and plan.drafts and drafts_first and (self.open_ahead or not plan.is_gated):
            verifier.open_ahead()
        return verifier

    def close(self) -> None:
        with suppress(OptionError):  # in a forked process the connections are the parent's
            shared_loop().begin(self.servers.close()).result()
