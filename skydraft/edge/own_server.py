"""A server that runs `skydraft serve`."""

from __future__ import annotations

from dataclasses import replace

from skydraft.characters import one_line
from skydraft.decoding.context import Context
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import TargetFacts
from skydraft.edge.budget import Budget
from skydraft.edge.channel import Channel
from skydraft.edge.server import OURS
from skydraft.edge.session import Session
from skydraft.edge.tls import ServerOptions
from skydraft.engines.vocab import Vocab
from skydraft.errors import CloudFailure, ProtocolError, VocabularyMismatch
from skydraft.protocol.codec import decode_info, short_fingerprint, target_id
from skydraft.protocol.values import SERVICE, Opening, ServerInfo, TargetId
from skydraft.types import Prompt

_NUM_PINGS = 2  # the shorter one counts
_ONE_FAMILY = "Choose two models of one family."


class OwnServer(Channel):
    """`Server` over gRPC. `budget` bounds the calls of all its texts."""

    kind, prices = OURS, None

    def __init__(self, options: ServerOptions, budget: Budget | None = None) -> None:
        super().__init__(options)
        self.uses_tls = options.uses_tls
        self.is_exact = True  # unless it says that it is not
        self.runs: TargetId | None = None
        self._budget = budget

    async def info(self, timeout_s: float) -> ServerInfo:
        """The server's description. Names are one line without control characters, since they are shown."""
        try:
            info = decode_info(await self.call(f"/{SERVICE}/GetInfo", timeout_s))
        except ProtocolError as error:
            raise CloudFailure(f"The cloud at {self.address} sent an invalid description: {error.message}") from error
        self.runs = target_id(info.weights, info.execution, info.context_len)
        self.is_exact = info.execution == "exact"
        return replace(info, model=one_line(info.model)[:200], version=one_line(info.version)[:200])

    async def greet(self, vocab: Vocab, timeout_s: float) -> None:
        info = await self.info(timeout_s)
        if info.fingerprint != short_fingerprint(vocab.fingerprint):
            raise VocabularyMismatch(f"{info.model} there reads other tokens than the draft model.", hint=_ONE_FAMILY)

    async def learn(self, timeout_s: float) -> TargetFacts:
        info = await self.info(timeout_s)
        wire_ms = min([await self.ping(timeout_s) for _ in range(_NUM_PINGS)])
        return TargetFacts(
            info.model, info.weights, info.forward_ms, info.max_rows, wire_ms=wire_ms, streams=True,
            max_block=info.max_block,
        )  # fmt: skip

    def begin(self, context: Context, prompt: Prompt, vocab: Vocab, request: GenerateRequest) -> Session:
        opening = Opening(
            short_fingerprint(vocab.fingerprint), prompt,
            params=request.params, top=request.plan.top, cache_scope=request.cache_scope,
        )  # fmt: skip
        return Session(context, opening, vocab.size, self, traceparent=request.traceparent, budget=self._budget)
