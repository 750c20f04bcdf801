"""One server without skydraft: which kind it is, which model it runs, and what its answers cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from skydraft.characters import one_line
from skydraft.config import DecodingParams
from skydraft.decoding.context import Committed
from skydraft.decoding.cost_model import expected_tokens
from skydraft.decoding.prices import Prices
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import TargetFacts
from skydraft.edge.channel import EventLoop, Waiting, shared_loop
from skydraft.edge.stock.chat import Asked, Chat, Completions, TextDialect
from skydraft.edge.stock.dialect import Described, Dialect, name
from skydraft.edge.stock.llama_server import LlamaServer
from skydraft.edge.stock.session import StockSession
from skydraft.edge.stock.sglang import Sglang
from skydraft.edge.stock.vllm import Vllm
from skydraft.edge.stock.wire import Events, Wire, as_json
from skydraft.edge.tls import check_certificates
from skydraft.engines.vocab import Vocab
from skydraft.errors import BudgetSpent, CloudFailure, OptionError, UnknownModel, VocabularyMismatch
from skydraft.protocol.address import is_loopback
from skydraft.types import LinkCost, Prompt

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
# Chinese, code, a special token, and characters of several bytes: other tokenizers differ here.
_SAMPLE = "<|im_start|>user\n用一句话介绍北京的春天。def f(x):\n    return x ** 2  # 😀 naïve 12345\n"
_PROMPT_LEN, _NUM_WRITTEN, _NUM_CHECKED = 64, 6, 6  # tokens of the measurement
_ALPHA = 0.75  # acceptance that is assumed where a draft may be checked in two ways
_META_S = 10.0  # timeout of questions about the model


@dataclass(frozen=True, slots=True)
class Met:
    """A server's model: what to call it, and milliseconds of a written token and of a check of n rows."""

    dialect: Dialect | TextDialect
    model: str
    context_len: int
    write_ms: float = 0.0
    check_ms: tuple[float, ...] = ()

    def is_same(self, other: Met) -> bool:
        """Whether a text may go on at the other one."""
        return self.model == other.model and self.dialect.name == other.dialect.name

    def checks(self, num_draft: int) -> bool:
        """Whether a draft is checked in one request rather than written again: it takes less time."""
        if not self.check_ms or not num_draft:
            return False
        return self._check_ms(num_draft + 1) < expected_tokens(_ALPHA, num_draft) * self.write_ms

    def _check_ms(self, num_rows: int) -> float:
        known = len(self.check_ms)
        return self.check_ms[num_rows - 1] if num_rows <= known else self.check_ms[-1] * num_rows / known

    @property
    def forward_ms(self) -> tuple[float, ...]:
        """Milliseconds of judging n rows; a single one if each is written in turn."""
        return self.check_ms if self.checks(_NUM_CHECKED) else (self.write_ms,)


@dataclass(frozen=True, slots=True)
class Examined:
    """A server's model and costs, and how many tokens of a prompt of `num_sent` it had in its cache the second time."""

    met: Met
    rtt_ms: float
    num_sent: int
    num_cached: int


@dataclass(slots=True)
class _Known:
    """What was found out about the server; forgotten when a connection is lost."""

    met: Met | None = None
    vocabularies: set[str] = field(default_factory=set)  # fingerprints that agree with its tokenizer


class StockServer:
    """A server without skydraft, for all generations that use it.

    It is both the list of servers, with itself as the only one, and the connection to it: `Servers` and `Channel` of
    the texts. `api` names the dialect, or "auto"; `model` names one of several models. Once the
    requests of a day have cost `max_cost`, texts go on without it. Raises OptionError.
    """

    has_others = False
    is_exact = False  # rows may differ from batch to batch

    def __init__(
        self, url: str, *, api: str = "auto", model: str | None = None, key: str | None = None,
        tls_ca: bytes | None = None, insecure: bool = False, prices: Prices | None = None,
        max_cost: float | None = None,
    ) -> None:  # fmt: skip
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise OptionError(f"'{one_line(url)}' is not the address of a server.", hint="Write http://HOST:PORT/v1.")
        if max_cost is not None and (prices is None or not max_cost > 0):
            raise OptionError("--max-cost must be above 0, and needs --price HIT,MISS,OUT.")
        if api != "auto" and api not in DIALECTS:
            raise OptionError(f"--cloud-api {api} is unknown.", hint=f"Choose one of: auto, {', '.join(DIALECTS)}.")
        if tls_ca and parts.scheme == "http":
            raise OptionError("--tls-ca does not apply to http://, which is not encrypted.")
        if tls_ca:
            check_certificates(tls_ca)
        is_here = is_loopback(parts.hostname)
        if key and parts.scheme == "http" and not (is_here or insecure):
            raise OptionError(
                "The key would cross the network unencrypted.", hint="Use https://, or allow that with --insecure."
            )
        self.target = self.name = url.rstrip("/")
        self.uses_tls = parts.scheme == "https"
        self.wire = Wire(self.target.removesuffix("/v1"), key, tls_ca, is_here=is_here)
        self.facts: dict[str, tuple[float, TargetFacts]] = {}
        self.rtt_ms = 0.0  # the shortest seen
        self.prices = prices
        self._max_cost = max_cost
        self._spent = (0, 0.0)  # the day, and what its requests cost
        self._api = api
        self._wanted = model
        self._known = _Known()
        self._costs: dict[str, tuple[float, tuple[float, ...]]] = {}  # by model
        self._names: set[str] = set()  # of the model, in answers; the first answer decides
        self._meeting = asyncio.Lock()

    @property
    def loop(self) -> EventLoop:
        """The event loop of the process."""
        return shared_loop()

    @property
    def heard_at(self) -> float:
        """Time of the server's last answer, by the loop's clock."""
        return self.wire.heard_at

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

    def pay(self, link: LinkCost) -> None:
        """Note the price of a request."""
        if self.prices is not None:
            self._spent = (_today(), self._spent_today() + self.prices.of(link))

    def check_budget(self) -> None:
        """Raise BudgetSpent if the requests of today (UTC) have cost as much as they may."""
        if self._max_cost is not None and (spent := self._spent_today()) >= self._max_cost:
            raise BudgetSpent(f"The requests of today cost {spent:.4g}, and {self._max_cost:g} is what they may cost.")

    def _spent_today(self) -> float:
        day, spent = self._spent
        return spent if day == _today() else 0.0

    async def ask(self, number: int, ask: Callable[[StockServer], Awaitable[T]]) -> T:
        """The server's answer."""
        return await ask(self)

    async def ping(self, timeout_s: float) -> float:
        """The round trip in milliseconds. Raises CloudLost."""
        dialect = self._known.met.dialect if self._known.met else None
        ms = await self.wire.look(dialect.life if dialect else "/v1/models", timeout_s)
        self.rtt_ms = min(ms, self.rtt_ms or ms)
        return ms

    async def max_block(self, timeout_s: float) -> int:
        """The longest draft that it takes: any."""
        return 2**31 - 1

    async def learn(self, channel: object, timeout_s: float) -> TargetFacts:
        """The model and its costs."""
        met = await self._meet(timeout_s, measures=True)
        for _ in range(2):
            await self.ping(timeout_s)
        facts = TargetFacts(
            met.model, "", met.forward_ms, len(met.forward_ms), wire_ms=self.rtt_ms, streams=True
        )  # fmt: skip
        self.facts[self.target] = time.monotonic(), facts
        return facts

    async def meet(self, vocab: Vocab, waiting: Waiting) -> Met:
        """Its model, whose tokens are those of `vocab`. Raises VocabularyMismatch, UnknownModel or CloudError."""
        met = self._known.met or await self._meet(min(waiting.timeout_s, _META_S))
        if vocab.fingerprint not in self._known.vocabularies:
            ids = await met.dialect.tokenize(self.wire, met.model, _SAMPLE, min(waiting.timeout_s, _META_S))
            if ids is not None and ids != vocab.encode(_SAMPLE):
                raise VocabularyMismatch(
                    f"{met.model} at {self.target} reads a text as other tokens than the draft model.",
                    hint="Choose two models of one family.",
                )
            self._known.vocabularies.add(vocab.fingerprint)
        return met

    async def _meet(self, timeout_s: float, *, measures: bool = False) -> Met:
        """Its model. Costs are measured if asked for, or if drafts may be checked in two ways: once for each model."""
        async with self._meeting:
            met = self._known.met
            if met is None:
                dialect = await self._dialect(timeout_s)
                described = await self._described(dialect, timeout_s)
                met = self._known.met = Met(dialect, described.model, described.context_len)
            if not met.write_ms and (measures or met.dialect.checks):
                costs = self._costs.get(met.model) or await self._measure(met, timeout_s)
                self._costs[met.model] = costs
                met = self._known.met = replace(met, write_ms=costs[0], check_ms=costs[1])
            return met

    async def _dialect(self, timeout_s: float) -> Dialect | TextDialect:
        if self._api != "auto":
            return DIALECTS[self._api](self.wire)
        answer = await self.wire.get("/v1/models", timeout_s)
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
        return DIALECTS[_OWNERS[owner]](self.wire)

    async def _described(self, dialect: Dialect | TextDialect, timeout_s: float) -> Described:
        known = await dialect.describe(self.wire, self._wanted, timeout_s)
        if len(known) == 1:
            return known[0]
        if not known:
            raise UnknownModel(f"The server at {self.target} has no model {self._wanted or 'at all'}.")
        names = ", ".join(one_line(each.model) for each in known[:10])
        raise OptionError(f"The server at {self.target} has several models: {names}.", hint="Choose: --cloud-model M.")

    async def _measure(self, met: Met, timeout_s: float) -> tuple[float, tuple[float, ...]]:
        """Milliseconds of a token written in a row after a short prompt, and of checks of n rows."""
        ids, times, dialect = [at % 16 for at in range(_PROMPT_LEN)], [0.0], met.dialect
        async for num_tokens, _ in self._written(met, ids, _NUM_WRITTEN, timeout_s):
            times += [time.perf_counter()] * num_tokens
        if len(times) < 3:
            raise CloudFailure("The server wrote no tokens.")
        write_ms, check_ms = (times[-1] - times[1]) * 1e3 / (len(times) - 2), list[float]()
        for num_drafts in (1, _NUM_CHECKED) if dialect.checks else ():
            assert not isinstance(dialect, TextDialect)
            began = time.perf_counter()
            path, body = dialect.checking(met.model, ids, [at % 7 for at in range(num_drafts)], 0)
            dialect.checked(await self.wire.post(path, body, timeout_s), num_drafts + 1)
            check_ms.append((time.perf_counter() - began) * 1e3)
        return max(write_ms, 1e-3), _between(*check_ms) if check_ms else ()

    async def _written(
        self, met: Met, ids: Seq[int], num_tokens: int, timeout_s: float
    ) -> AsyncIterator[tuple[int, int]]:
        """(tokens, cached tokens of the prompt) of each event of a short text."""
        waiting, dialect = Waiting(timeout_s, timeout_s, timeout_s), met.dialect
        if isinstance(dialect, TextDialect):
            asked = Asked(({"role": "user", "content": _SAMPLE * (len(ids) // 32)},), _SAMPLE * (len(ids) // 32), "")
            path, body = dialect.going_on(met.model, asked, num_tokens, DecodingParams())
        else:
            path, body = dialect.writing(met.model, ids, num_tokens, 0)
        events = Events(self.wire, path, as_json(body), dialect.life)
        try:
            while (event := await events.next(waiting)) is not None:
                if isinstance(dialect, TextDialect):
                    said = dialect.said(event)
                    yield bool(said.text), said.num_cached
                else:
                    read = dialect.written(event)
                    yield len(read.rows), read.num_cached
        finally:
            events.close()

    async def examine(self, vocab: Vocab, timeout_s: float) -> Examined:
        """Who it is, its costs and its prefix cache. Raises VocabularyMismatch or another SkydraftError."""
        await self.learn(self, timeout_s)
        met, num_cached = await self.meet(vocab, Waiting(timeout_s, timeout_s, timeout_s)), 0
        ids = (vocab.encode(_SAMPLE) * 8)[: 4 * _PROMPT_LEN]
        for _ in range(2):
            async for _, cached in self._written(met, ids, 1, timeout_s):
                num_cached = cached or num_cached
        return Examined(met, self.rtt_ms, len(ids), num_cached)

    def session(self, context: Committed, prompt: Prompt, vocab: Vocab, request: GenerateRequest) -> StockSession:
        """A text at this server. Raises OptionError for what it cannot follow."""
        return StockSession(self, context, prompt, vocab, request)

    def end(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run closing work on the loop. Never waits."""
        self.loop.post(lambda: asyncio.ensure_future(work()))

    async def close(self) -> None:
        """Drop the connections."""
        await self.wire.close()


def _today() -> int:
    return int(time.time() // 86400)


def _between(two: float, seven: float) -> tuple[float, ...]:
    """Milliseconds of checks of 1 to 7 rows, from those of 2 and 7: a line between them."""
    first = min(two, seven)
    step = (seven - first) / (_NUM_CHECKED - 1)
    return tuple(max(first + (rows - 2) * step, 1e-3) for rows in range(1, _NUM_CHECKED + 2))
