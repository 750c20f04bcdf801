"""Count each request to a server without skydraft, and its cost: answered or not, first try or retry."""

from __future__ import annotations

from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from skydraft.decoding.accounts.receipt import Sent
from skydraft.edge.budget import Budget
from skydraft.engines.vocab import TokenIds
from skydraft.types import LinkCost

UNTOLD = LinkCost()


class Ledger:
    """All requests of one text, or those outside any text. Only the event loop changes it; any thread may read it.
    Unless it `tells_cached`, `spent` hides cache hits; the budget counts them."""

    def __init__(self, budget: Budget, server: str = "", num_prompt_tokens: int = 0) -> None:
        self.spent = LinkCost()
        self.sent = Sent()
        self.tells_cached = True
        self.budget = budget
        self._server, self._num_prompt_tokens = server, num_prompt_tokens
        self._num_cached = 0  # what `take_cached` has returned in all
        self._num_told = 0  # committed tokens in the last call; each call sends them again
        self._first: Request | None = None  # the first answered call, or the last call if none was answered

    def take_cached(self) -> int:
        """Return the cached prompt tokens that the first answer reports, less those returned before."""
        known = self._first.usage.tokens_hit if self._first and self.tells_cached else 0
        before, self._num_cached = self._num_cached, max(self._num_cached, min(known, self._num_prompt_tokens))
        return self._num_cached - before

    def call(self, request: Request) -> None:
        """Count a call that is sent now. Raises BudgetSpent instead."""
        self.budget.take()
        sent, generated = self.sent, request.text[self._num_prompt_tokens :]
        sent.num_calls += 1
        sent.servers, sent.num_prompt_tokens = [self._server], self._num_prompt_tokens
        sent.blocks.append((self._num_told, [int(token_id) for token_id in generated[self._num_told :]]))
        self._num_told = request.num_committed
        if self._first is None or not self._first.is_answered:
            self._first = request

    def note(self, cost: LinkCost) -> None:
        told = cost if self.tells_cached else replace(cost, tokens_hit=0)
        self.budget.pay(cost, told)
        self.spent += told


@dataclass(eq=False, slots=True)
class Request:
    """One request and its answer. `is_new`: its connection was made after the server last described itself.

    A request with a `text` (prompt included) is a call: the server reads these tokens. The first `num_committed` after
    the prompt are final. Other requests cost nothing. An answer without a stream has `num_written` tokens. `usage` has
    the counts so far, the server's or ours.
    """

    ledger: Ledger
    path: str
    content: bytes | None
    text: TokenIds | Seq[int] = ()
    num_committed: int = 0
    num_written: int = 0
    usage: LinkCost = UNTOLD
    is_answered: bool = False
    is_new: bool = False

    async def going_out(self) -> AsyncIterator[bytes]:
        """Yield the body, after noting its cost. Raises BudgetSpent."""
        body, num_tokens = self.content or b"", len(self.text)
        if num_tokens:
            self.ledger.call(self)
        self.usage = LinkCost(tokens_in=num_tokens)
        self.ledger.note(LinkCost(bytes_up=len(body), num_requests=int(num_tokens > 0), tokens_in=num_tokens))
        yield body

    def came(self, num_bytes: int) -> None:
        self.ledger.note(LinkCost(bytes_down=num_bytes))

    def is_lost(self) -> None:
        """Note the tokens perhaps written for a lost answer. A request that was not sent costs nothing."""
        if self.usage.tokens_in:
            self.ledger.note(LinkCost(tokens_out=self.num_written))

    def says(self, told: LinkCost) -> None:
        """Note the answer's token counts so far, the larger of the server's count and ours."""
        before, self.is_answered = self.usage, True
        num_read = max(told.tokens_in, before.tokens_in)
        num_cached = min(max(told.tokens_hit, before.tokens_hit), num_read)
        num_written = max(told.tokens_out, before.tokens_out)
        self.usage = LinkCost(tokens_in=num_read, tokens_hit=num_cached, tokens_out=num_written)
        self.ledger.note(self.usage - before)
