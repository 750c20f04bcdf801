"""What was sent to a server without skydraft, and what it cost: each request, answered or not, first and again."""

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
    """All requests of one text, or of none. Only the event loop changes it; other threads may read it. Unless it
    `tells_cached`, all tokens count as read anew in `spent`; the budget knows better."""

    def __init__(self, budget: Budget, server: str = "", num_prompt_tokens: int = 0) -> None:
        self.spent = LinkCost()
        self.sent = Sent()
        self.tells_cached = True
        self.budget = budget
        self._server, self._num_prompt_tokens = server, num_prompt_tokens
        self._num_cached = 0  # what `take_cached` has returned in all
        self._num_told = 0  # committed tokens of the last call: each call tells them again
        self._first: Request | None = None  # the first call that was answered, or the last one so far

    def take_cached(self) -> int:
        """Tokens of the prompt that were in the server's cache, as its first answer says, and not at the last call."""
        known = self._first.usage.tokens_hit if self._first and self.tells_cached else 0
        before, self._num_cached = self._num_cached, max(self._num_cached, min(known, self._num_prompt_tokens))
        return self._num_cached - before

    def call(self, request: Request) -> None:
        """Count a call that goes out now. Raises BudgetSpent instead."""
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
    """One request and its answer, over a connection that `is_new` if it carried none before.

    One that carries a `text`, prompt included, is a call: the server reads these tokens, of which the first
    `num_committed` after the prompt stay. Any other costs nothing. An answer in one piece has `num_written` tokens.
    `usage` are the counts so far, by the server or by us.
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
        """Its body. It is noted before the first byte leaves. Raises BudgetSpent."""
        body, num_tokens = self.content or b"", len(self.text)
        if num_tokens:
            self.ledger.call(self)
        self.usage = LinkCost(tokens_in=num_tokens)
        self.ledger.note(LinkCost(bytes_up=len(body), num_requests=int(num_tokens > 0), tokens_in=num_tokens))
        yield body

    def came(self, num_bytes: int) -> None:
        self.ledger.note(LinkCost(bytes_down=num_bytes))

    def is_lost(self) -> None:
        """Note what was written, perhaps, for an answer that did not come. It costs nothing if it did not go out."""
        if self.usage.tokens_in:
            self.ledger.note(LinkCost(tokens_out=self.num_written))

    def says(self, told: LinkCost) -> None:
        """Note what the answer says of its tokens so far: of each count the larger one, by the server or by us."""
        before, self.is_answered = self.usage, True
        num_read = max(told.tokens_in, before.tokens_in)
        num_cached = min(max(told.tokens_hit, before.tokens_hit), num_read)
        num_written = max(told.tokens_out, before.tokens_out)
        self.usage = LinkCost(tokens_in=num_read, tokens_hit=num_cached, tokens_out=num_written)
        self.ledger.note(self.usage - before)
