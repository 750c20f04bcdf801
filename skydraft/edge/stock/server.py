"""A server without skydraft."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from skydraft.decoding.context import Context
from skydraft.decoding.prices import Prices
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import TargetFacts
from skydraft.edge.channel import shared_loop
from skydraft.edge.stock.connection import StockConnection
from skydraft.edge.stock.text import StockText
from skydraft.engines.vocab import Vocab
from skydraft.errors import CloudError, CloudTimeout
from skydraft.protocol.values import TargetId
from skydraft.types import Prompt, named_weights

# Of a written token, until rounds have shown what it takes: a model of 7B to 70B takes 10 to 40 on a GPU.
_WRITE_MS = 30.0
_FIRST_LOOK_S = 1.0  # at a server of which nothing is known, if a text cannot begin without that


class StockServer(StockConnection):
    """`Server` over HTTP. It tells neither the weights of its model nor what its forwards take."""

    is_exact = False  # rows may differ from batch to batch
    runs: TargetId | None = None

    @property
    def prices(self) -> Prices | None:
        return self.budget.prices

    async def greet(self, vocab: Vocab, timeout_s: float) -> None:
        await self.ping(timeout_s)

    async def learn(self, timeout_s: float) -> TargetFacts:
        try:
            async with asyncio.timeout(timeout_s):
                info = await self.info(timeout_s, self.wire)
        except TimeoutError as error:
            raise CloudTimeout(f"no answer in {timeout_s:g} s.") from error
        for _ in range(2):
            await self.ping(timeout_s)
        return TargetFacts(info.model, named_weights(info.model), (_WRITE_MS,), 1, wire_ms=self.rtt_ms, streams=True)

    def begin(self, context: Context, prompt: Prompt, vocab: Vocab, request: GenerateRequest) -> StockText:
        params = request.params
        if self.kind == "auto" and (params.top_k or params.min_p or request.plan.top):
            with suppress(CloudError):  # it says so later
                shared_loop().begin(self.info(_FIRST_LOOK_S, self.wire)).result()
        return StockText(self, context, prompt, vocab, request)
