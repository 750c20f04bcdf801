"""One server without skydraft: which kind it is, which model it runs, and what its answers cost."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from skydraft.characters import one_line
from skydraft.decoding.context import Committed
from skydraft.decoding.prices import Prices
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import TargetFacts
from skydraft.edge.budget import Budget, DaySum
from skydraft.edge.channel import EventLoop, Waiting, shared_loop
from skydraft.edge.stock.chat import Chat, Completions, TextDialect
from skydraft.edge.stock.costs import Costs, recalled, remember
from skydraft.edge.stock.dialect import Described, Dialect, name
from skydraft.edge.stock.ledger import Ledger
from skydraft.edge.stock.llama_server import LlamaServer
from skydraft.edge.stock.load import Examined, Steps, measure_steps
from skydraft.edge.stock.meeting import PROMPT_LEN, SAMPLE, Met, check_that_it_goes_on, measure, written
from skydraft.edge.stock.pool import Pool
from skydraft.edge.stock.session import StockSession
from skydraft.edge.stock.sglang import Sglang
from skydraft.edge.stock.vllm import Vllm
from skydraft.edge.stock.wire import Wire
from skydraft.edge.tls import check_certificates, check_token
from skydraft.engines.vocab import Vocab
from skydraft.errors import CloudError, CloudTimeout, OptionError, UnknownModel, VocabularyMismatch
from skydraft.protocol.address import is_loopback, without_password
from skydraft.types import Prompt, named_weights

T = TypeVar("T")
DIALECTS: dict[str, Callable[[Wire], Dialect | TextDialect]] = {
    "vllm": lambda wire: Vllm(), "sglang": lambda wire: Sglang(), "llama-server": lambda wire: LlamaServer(),
    "completions": Completions, "chat": Chat,
}  # fmt: skip
_OWNERS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama-server",
    "skydraft": "completions",
}  # "owned_by" in /v1/models
_LIFE = "/v1/models"  # of a server that is not known yet
_META_S = 10.0  # timeout of questions about the model
_FIRST_LOOK_S = 1.0  # of the first one, if a text cannot begin without its answer


@dataclass(slots=True)
class _Known:
    """What was found out about the server; forgotten when a connection is lost."""

    met: Met | None = None
    vocabularies: set[str] = field(default_factory=set)  # fingerprints that agree with its tokenizer


class StockServer:
    """A server without skydraft, for all generations that use it.

    It is both the list of servers, with itself as the only one, and the connection to it: `Servers` and `Channel` of
    the texts. `api` names the dialect, or "auto"; `model` names one of several models. Once `budget` is spent, texts go
    on without it. Its costs are remembered in the file `memory`, and the sum of the day beside it. Raises OptionError.
    """

    has_others = False
    is_exact = False  # rows may differ from batch to batch

    def __init__(
        self, url: str, *, api: str = "auto", model: str | None = None, key: str | None = None,
        tls_ca: bytes | None = None, insecure: bool = False, budget: Budget | None = None,
        memory: Path | None = None,
    ) -> None:  # fmt: skip
        try:
            parts = urlsplit(url)
            _ = parts.port  # raises for one that is none
        except ValueError as error:
            raise _no_address(url) from error
        rest = (parts.username, parts.query, parts.fragment, "," in parts.netloc, "?" in url, "#" in url)
        if parts.scheme not in ("http", "https") or not parts.hostname or any(rest):
            raise _no_address(url)
        if api != "auto" and api not in DIALECTS:
            raise OptionError(f"--cloud-api {api} is unknown.", hint=f"Choose one of: auto, {', '.join(DIALECTS)}.")
        if tls_ca and parts.scheme == "http":
            raise OptionError("--tls-ca does not apply to http://, which is not encrypted.")
        if tls_ca:
            check_certificates(tls_ca)
        check_token(key)
        is_here = is_loopback(parts.hostname)
        if key and parts.scheme == "http" and not (is_here or insecure):
            raise OptionError(
                "The key would cross the network unencrypted.", hint="Use https://, or allow that with --insecure."
            )
        self.target = self.name = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self.uses_tls = parts.scheme == "https"
        self.budget = budget or Budget()
        if memory:
            self.budget.day_sum = DaySum(memory.with_name("spent.json"), parts.netloc.lower())
        self._pool = Pool(self.target, key, tls_ca, is_here=is_here)
        roots = _roots(self.target, parts.path.rstrip("/"), api)
        self.wire = Wire(*roots, self._pool, Ledger(self.budget))  # for what belongs to no text
        self.facts: dict[str, tuple[float, TargetFacts]] = {}
        self.rtt_ms = 0.0  # the shortest seen
        self._api = api
        self._wanted = model
        self._known = _Known()
        self._memory = memory
        self._costs: dict[str, Costs] = recalled(memory) if memory else {}
        self._measured: set[str] = set()  # models that were measured, or could not be
        self._goes_on: set[str] = set()  # models that go on from the assistant's last message
        self._names: set[str] = set()  # of the model, in answers; the first answer decides
        self._meeting = asyncio.Lock()
        self._learning: asyncio.Future[TargetFacts] | None = None

    @property
    def loop(self) -> EventLoop:
        """The event loop of the process."""
        return shared_loop()

    @property
    def prices(self) -> Prices | None:
        """What its tokens cost, if they are sold."""
        return self.budget.prices

    @property
    def heard_at(self) -> float:
        """Time of the server's last answer, by the loop's clock."""
        return self._pool.heard_at

    def in_order(self, number: int) -> list[StockServer]:
        """This server."""
        return [self]

    def lost(self, channel: object) -> None:
        """Ask again who it is, before the next text goes on."""
        self.forget()

    def changed(self, channel: object) -> bool:
        """False: a text that has begun cannot go on at another model."""
        return False

    def forget(self) -> None:
        """Ask again which model this is before the next request."""
        self._known = _Known()
        self._names.clear()

    def is_named(self, model: str) -> bool:
        """Whether the server's answers come from the same model as before."""
        self._names = self._names or {model}
        return model in self._names

    async def ask(self, number: int, ask: Callable[[StockServer], Awaitable[T]]) -> T:
        """The server's answer."""
        return await ask(self)

    async def ping(self, timeout_s: float) -> float:
        """The round trip in milliseconds. Raises CloudLost."""
        dialect = self._known.met.dialect if self._known.met else None
        ms = await self.wire.look(dialect.life if dialect else "/v1/models", timeout_s)
        self.rtt_ms = min(ms, self.rtt_ms or ms)
        return ms

    async def greet(self, number: int, vocab: Vocab, timeout_s: float) -> None:
        """Ask whether it is there. Raises CloudLost or TlsFailure."""
        await self.ping(timeout_s)

    async def max_block(self, timeout_s: float) -> int:
        """The longest draft that it takes: any."""
        return 2**31 - 1

    async def learn(self, channel: object, timeout_s: float) -> TargetFacts:
        """The model and its costs. What takes longer goes on in the background, for the next text."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._begin_to_learn())
        except TimeoutError as error:
            raise CloudTimeout(f"no answer in {timeout_s:g} s.") from error

    def _begin_to_learn(self) -> asyncio.Future[TargetFacts]:
        if self._learning is None or self._learning.done():
            self._learning = asyncio.ensure_future(self._learn(_META_S))
            self._learning.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._learning

    async def _learn(self, timeout_s: float) -> TargetFacts:
        known, met = self._known, await self._meet(timeout_s, self.wire)
        self._measured.add(met.model)
        if met.costs is None:
            costs = Costs(*await measure(self.wire, met, timeout_s), time.time())
            self._costs[self._key(met.model)] = costs
            met = known.met = replace(met, costs=costs)
            if self._memory:
                await asyncio.to_thread(remember, self._memory, self._key(met.model), costs)
        for _ in range(2):
            await self.ping(timeout_s)
        facts = TargetFacts(
            met.model, named_weights(met.model), met.forward_ms, len(met.forward_ms), wire_ms=self.rtt_ms, streams=True
        )  # fmt: skip
        self.facts[self.target] = time.monotonic(), facts
        return facts

    async def meet(self, vocab: Vocab, waiting: Waiting, wire: Wire) -> Met:
        """Its model, whose tokens are those of `vocab`, asked for at `wire`.

        Raises VocabularyMismatch, UnknownModel or CloudError.
        """
        timeout_s, known = min(waiting.timeout_s, _META_S), self._known
        met = known.met
        if met is None:
            met = await wire.patiently(self._meet(timeout_s, wire), _LIFE, waiting)
        if met.costs is None and met.dialect.checks and met.model not in self._measured:
            self._begin_to_learn()  # until then drafts are checked by writing
        if vocab.fingerprint not in known.vocabularies:
            asking = met.dialect.tokenize(wire, met.model, SAMPLE, timeout_s)
            ids = await wire.patiently(asking, met.dialect.life, waiting)
            if ids is not None and ids != vocab.encode(SAMPLE):
                raise VocabularyMismatch(
                    f"{met.model} at {self.target} reads a text as other tokens than the draft model.",
                    hint="Choose two models of one family.",
                )
            known.vocabularies.add(vocab.fingerprint)
        return met

    def _key(self, model: str) -> str:
        return f"{self.target} {model}"

    async def _meet(self, timeout_s: float, wire: Wire) -> Met:
        """Its model, asked for once; with its costs, once they are known."""
        async with self._meeting:
            known, met = self._known, self._known.met
            if met is None:
                # Two connections: while one carries a text, the other carries signs of life.
                dialect, _ = await asyncio.gather(self._dialect(timeout_s, wire), wire.look(_LIFE, timeout_s))
                described = await self._described(dialect, timeout_s, wire)
                met = Met(dialect, described.model, described.context_len, self._costs.get(self._key(described.model)))
                if isinstance(dialect, Chat) and met.model not in self._goes_on:
                    await check_that_it_goes_on(wire, met, dialect, timeout_s)
                    self._goes_on.add(met.model)
                known.met = met
            return met

    async def _dialect(self, timeout_s: float, wire: Wire) -> Dialect | TextDialect:
        if self._api != "auto":
            return DIALECTS[self._api](wire)
        answer = await wire.get("/v1/models", timeout_s)
        listed = answer.get("data") if isinstance(answer, dict) else None
        owner = (
            name(listed[0].get("owned_by"))
            if isinstance(listed, list) and listed and isinstance(listed[0], dict)
            else ""
        )
        if owner not in _OWNERS:
            raise OptionError(
                f"The server at {self.target} does not say what it is ({one_line(owner) or 'no owner of its models'}).",
                hint=f"Name it with --cloud-api {'|'.join(DIALECTS)}.",
            )
        return DIALECTS[_OWNERS[owner]](wire)

    async def _described(self, dialect: Dialect | TextDialect, timeout_s: float, wire: Wire) -> Described:
        known = await dialect.describe(wire, self._wanted, timeout_s)
        if len(known) == 1:
            return known[0]
        if not known:
            raise UnknownModel(f"The server at {self.target} has no model {self._wanted or 'at all'}.")
        names = ", ".join(one_line(each.model) for each in known[:10])
        raise OptionError(f"The server at {self.target} has several models: {names}.", hint="Choose: --cloud-model M.")

    async def examine(self, vocab: Vocab, timeout_s: float) -> Examined:
        """Who it is, its costs as they are now, its prefix cache. Raises VocabularyMismatch or the like."""
        self._costs.clear()
        self.forget()
        await self.learn(self, timeout_s)
        met, num_cached = await self.meet(vocab, Waiting(timeout_s, timeout_s, timeout_s), self.wire), 0
        ids = (vocab.encode(SAMPLE) * 8)[: 4 * PROMPT_LEN]
        for _ in range(2):
            async for _, cached in written(self.wire, met, ids, 1, timeout_s):
                num_cached = cached or num_cached
        assert met.costs is not None
        return Examined(met, met.costs, self.rtt_ms, len(ids), num_cached)

    async def steps(self, num_texts: int, timeout_s: float) -> Steps:
        """What its steps take while it writes so many texts at once. Raises a SkydraftError."""
        return await measure_steps(self.wire, await self._meet(timeout_s, self.wire), num_texts, self.rtt_ms, timeout_s)

    def session(self, context: Committed, prompt: Prompt, vocab: Vocab, request: GenerateRequest) -> StockSession:
        """A text at this server, which may first be asked what it is. Raises OptionError for what it cannot follow."""
        params = request.params
        if self._known.met is None and self._api == "auto" and (params.top_k or params.min_p or request.plan.top):
            with suppress(CloudError):  # it says so later
                self.loop.begin(self._meet(_FIRST_LOOK_S, self.wire)).result()
        return StockSession(self, context, prompt, vocab, request)

    @property
    def gives_text(self) -> bool:
        """Whether it is known to give text, not token ids."""
        met = self._known.met
        return isinstance(met.dialect, TextDialect) if met else self._api in ("completions", "chat")

    def end(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run closing work on the loop. Never waits."""
        self.loop.post(lambda: asyncio.ensure_future(work()))

    async def renew(self) -> None:
        """Make new connections for what is asked next; texts under way keep theirs."""
        await self._pool.renew()

    async def close(self) -> None:
        """Drop the connections."""
        await self._pool.close()
        await self.wire.ledger.close()


def _roots(url: str, path: str, api: str) -> tuple[str, str]:
    """Where a server's own interface begins, and where that of OpenAI's kind does; both without a slash at the end.

    An address that ends in a version, such as /api/v3, is the latter as it stands, and so is any path of a server of
    text.
    """
    if re.search(r"/v\d+\w*$", path):
        return url.rpartition("/")[0], url
    return url, url if path and api in ("completions", "chat") else f"{url}/v1"


def _no_address(url: str) -> OptionError:
    hint = "Write one address, for example http://HOST:PORT/v1."
    return OptionError(
        f"'{one_line(without_password(url))}' is not the address of a server.",
        hint="Give a key with --cloud-key-file FILE, not in the address." if "@" in url else hint,
    )
