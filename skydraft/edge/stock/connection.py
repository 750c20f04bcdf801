"""The connection to one server without skydraft. It finds out the server's kind and model."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

from skydraft.characters import one_line
from skydraft.decoding.target import TargetFacts
from skydraft.edge.budget import Budget
from skydraft.edge.channel import Waiting
from skydraft.edge.stock.chat import Chat
from skydraft.edge.stock.dialect import About, Dialect, name
from skydraft.edge.stock.drafts import DraftPort
from skydraft.edge.stock.ids import LlamaServer, Sglang, Vllm
from skydraft.edge.stock.ledger import Ledger
from skydraft.edge.stock.wire import Pool, Wire
from skydraft.edge.tls import ServerOptions, check_credentials
from skydraft.engines.vocab import Vocab
from skydraft.errors import OptionError, UnknownModel, VocabularyMismatch, WrongServer
from skydraft.protocol.address import DRAFTS_PORT, is_loopback, parse_address, without_password
from skydraft.protocol.values import TargetId
from skydraft.types import named_weights

# Chinese, code, a special token and multi-byte characters: a different tokenizer gives different ids here.
SAMPLE = "<|im_start|>user\n用一句话介绍北京的春天。def f(x):\n    return x ** 2  # 😀 naïve 12345\n"
DIALECTS: dict[str, type[Dialect]] = {each.name: each for each in (Vllm, Sglang, LlamaServer, Chat)}
APIS = tuple(DIALECTS)
_OWNERS = {"vllm": Vllm, "sglang": Sglang, "llamacpp": LlamaServer}
_UNSENDABLE = re.compile(r"[\0-\x20\x7f\ud800-\udfff]|.{2000}")  # in an address
_LIFE = "/v1/models"  # the ping path of a server of unknown kind
_QUESTION_S = 10.0  # timeout of requests about the model
_LOOK_HERE_S = 3.0  # ping timeout on this machine: a stopped server refuses at once, so a slow one is busy


@dataclass(frozen=True, slots=True)
class StockOptions:
    """Address and credentials of a server without skydraft. `api` is one of APIS, or "auto" to ask the server. `model`
    selects one of several. `drafts` is the address of a vLLM's port for drafts, which takes the same key."""

    url: str
    api: str = "auto"
    model: str | None = None
    key: str | None = None
    tls_ca: bytes | None = None
    insecure: bool = False
    drafts: str | None = None

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            hint = "Write one address like http://HOST:PORT/v1. Give a key with --cloud-key-file."
            raise OptionError(f"'{one_line(without_password(self.url))}' is not the address of a server.", hint=hint)
        if self.api not in ("auto", *APIS):
            raise OptionError(f"--cloud-api {self.api} is unknown.", hint=f"Choose one of: auto, {', '.join(APIS)}.")
        check_credentials(self.key, self.tls_ca)
        if not (self.uses_tls or self.is_here or self.insecure):
            what = "The key, prompts and texts" if self.key else "Prompts and texts"
            hint = "Use https://, or allow that with --insecure."
            raise OptionError(f"{what} would cross the network unencrypted.", hint=hint)

    @property
    def port_for_drafts(self) -> ServerOptions:
        """Options for the port for drafts. Raises OptionError for an invalid address."""
        try:
            host, port = parse_address(self.drafts or "", DRAFTS_PORT)
        except OptionError as error:
            raise OptionError(
                f"--drafts: {error.args[0]}", hint="Write HOST:PORT, for example gpu-box:7374."
            ) from error
        return ServerOptions(f"{host}:{port}", self.key, self.tls_ca, insecure=self.insecure)

    @property
    def _parts(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def address(self) -> str:
        return f"{self._parts.scheme}://{self._parts.netloc}{self._parts.path.rstrip('/')}"

    @property
    def uses_tls(self) -> bool:
        return self._parts.scheme == "https"

    @property
    def is_here(self) -> bool:
        return is_loopback(self._parts.hostname or "")

    @property
    def roots(self) -> tuple[str, str]:
        """The base URLs of (the server's own API, its OpenAI API). An address with a version, like /api/v3 or
        /v1beta/openai, is the OpenAI base as it is; for a chat any path is."""
        url, path = self.address, self._parts.path.rstrip("/")
        if re.search(r"/v\d+\w*(/|$)", path):
            return url.rpartition("/")[0], url
        return url, url if path and self.api == Chat.name else f"{url}/v1"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if invalid
    except ValueError:
        return False
    others = parts.username or "," in parts.netloc or "?" in url or "#" in url or _UNSENDABLE.search(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not others


@dataclass(eq=False, slots=True)
class StockInfo:
    """A server's kind, its model's name, and the server's data about the model."""

    dialect: Dialect
    model: str
    card: About
    vocabularies: set[str] = field(default_factory=set)  # fingerprints known to match its tokenizer

    def is_of(self, info: "StockInfo") -> bool:
        """Return whether both describe the same model, as far as the server's data shows."""
        return (self.model, self.card.origin, type(self.dialect)) == (info.model, info.card.origin, type(info.dialect))


class StockConnection:
    """The connection, shared by all generations. Once `budget` is spent, texts go on without the server. The server
    does not report its model's weights, nor the times of its forwards."""

    is_exact = False  # logits may change with the batch
    runs: TargetId | None = None  # texts compare the server's StockInfo instead

    def __init__(
        self, options: StockOptions, budget: Budget | None = None, notify: Callable[[str], None] = lambda line: None
    ) -> None:
        self.address, self.uses_tls = options.address, options.uses_tls
        self.budget = budget or Budget()
        self.rtt_ms = 0.0  # the shortest so far
        self._options = options
        self._pool = Pool(self.address, options.key, options.tls_ca, is_here=options.is_here)
        look_s = _LOOK_HERE_S if options.is_here else 0.0
        self.wire = Wire(*options.roots, self._pool, Ledger(self.budget), look_s)  # for requests outside any text
        self.drafts = None if options.drafts is None else DraftPort(options.port_for_drafts, notify, self.wire.ledger)
        self.known: StockInfo | None = None  # the last description
        self._is_old = False  # another server may have taken its place
        self.refused: set[str] = set()  # request fields that a chat rejects
        self._asking = asyncio.Lock()
        self.is_met = False

    @property
    def heard_at(self) -> float:
        return self._pool.heard_at

    @property
    def kind(self) -> str:
        return self.known.dialect.name if self.known else self._options.api

    def forget(self) -> None:
        """Ask the server again what it runs, before the next text."""
        self._is_old = True

    async def ping(self, timeout_s: float) -> float:
        ms = await self.wire.look(self.known.dialect.life if self.known else _LIFE, timeout_s)
        self.rtt_ms = min(ms, self.rtt_ms or ms)
        return ms

    async def greet(self, vocab: Vocab, timeout_s: float) -> None:
        await self.info_for(vocab, Waiting(timeout_s, timeout_s, timeout_s), self.wire)
        self.is_met = True

    async def learn(self, timeout_s: float) -> TargetFacts:
        await self.ping(timeout_s)
        if self.drafts:
            await self.drafts.meet(timeout_s)
        self.forget()
        asking = self._ask(timeout_s, self.wire)
        info = await self.wire.patiently(asking, _LIFE, Waiting(timeout_s, timeout_s, timeout_s))
        return TargetFacts(info.model, named_weights(info.model))

    async def renew(self) -> None:
        """Make new connections for later requests; texts under way keep theirs."""
        self.forget()
        await self._pool.renew()

    async def close(self) -> None:
        if self.drafts:
            await self.drafts.close()
        await self._pool.close()

    async def info_for(self, vocab: Vocab, waiting: Waiting, wire: Wire) -> StockInfo:
        """Return the server's kind and model; ask over `wire` if unknown. Raises OptionError or CloudError."""
        timeout_s, info = min(waiting.timeout_s, _QUESTION_S), self.known
        if info is None or self._is_old:
            info = await wire.patiently(self._ask(timeout_s, wire), _LIFE, waiting)
        if vocab.fingerprint not in info.vocabularies:
            asking = info.dialect.tokenize(wire, info.model, SAMPLE, timeout_s)
            ids = await wire.patiently(asking, info.dialect.life, waiting)
            if ids is not None and ids != vocab.encode(SAMPLE):
                message = f"{info.model} at {self.address} encodes a text as other tokens than the draft model."
                raise VocabularyMismatch(message, hint="Choose two models of one family.")
            info.vocabularies.add(vocab.fingerprint)
        return info

    async def _ask(self, timeout_s: float, wire: Wire) -> StockInfo:
        async with self._asking:
            if (known := self.known) is not None and not self._is_old:
                return known
            # Open two connections: one for the text, one for pings meanwhile.
            dialect, _ = await asyncio.gather(self._dialect(timeout_s, wire), wire.look(_LIFE, timeout_s))
            if self.drafts and not dialect.takes_drafts:
                says = f"--drafts is for vLLM, but the server at {self.address} is {dialect.name}."
                raise OptionError(says, hint="Leave it out.")
            self.known, self._is_old = await self._described(dialect, timeout_s, wire), False
            self._pool.asked()
            return self.known

    async def _dialect(self, timeout_s: float, wire: Wire) -> Dialect:
        if self._options.api != "auto":
            return DIALECTS[self._options.api]()
        answer = await wire.ask("/v1/models", timeout_s)
        listed = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(listed, list):
            hint = f"Name it with --cloud-api {'|'.join(APIS)}."
            raise WrongServer(f"The server at {self.address} does not list its models.", hint=hint)
        first = listed[0] if listed else None
        return _OWNERS.get(name(first.get("owned_by")) if isinstance(first, dict) else "", Chat)()

    async def _described(self, dialect: Dialect, timeout_s: float, wire: Wire) -> StockInfo:
        wanted = self._options.model
        known = await dialect.describe(wire, wanted, timeout_s)
        if len(known) == 1:
            return StockInfo(dialect, *known.popitem())
        if not known:
            raise UnknownModel(f"The server at {self.address} has no model {wanted or 'at all'}.")
        names = ", ".join(one_line(each) for each in [*known][:10])
        raise WrongServer(f"The server at {self.address} has several models: {names}.", hint="Give --cloud-model.")
