"""What was sent to a server without skydraft, and what it cost: each request, answered or not, first and again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace

from skydraft.decoding.accounts.receipt import Sent
from skydraft.edge.budget import Budget
from skydraft.engines.vocab import TokenIds
from skydraft.errors import BudgetSpent
from skydraft.types import LinkCost

UNTOLD = LinkCost()
_COARSE = 4096  # bytes


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

    @property
    def told(self) -> LinkCost:
        """What is told of `spent`: bytes that came are rounded up where a hit, which makes an answer shorter, is not
        told."""
        spent, coarse = self.spent, 1 if self.tells_cached else _COARSE
        return replace(spent, bytes_down=-(-spent.bytes_down // coarse) * coarse)

    def call(self, request: Request, generated: TokenIds | Seq[int]) -> None:
        sent = self.sent
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

    def settle(self) -> None:
        """Bring all costs into the sum of the day, if it can be kept; `allow` finds out."""
        with suppress(BudgetSpent):
            self.budget.settle()


@dataclass(eq=False, slots=True)
class Request:
    """One request and its answer, which came over the connection of this number (0: none came). It may go out twice;
    the answer is that of the last time.

    The server has to read `num_tokens` of prompts; 0 for a request that costs nothing. A request that carries a text is
    a call: `generated` are the text's tokens after its prompt, of which the first `num_committed` stay. An answer in
    one piece has `num_written` tokens. `usage` are the counts so far, by the server or by us.
    """

    ledger: Ledger
    path: str
    content: bytes | None
    num_tokens: int = 0
    generated: TokenIds | Seq[int] | None = None
    num_committed: int = 0
    num_written: int = 0
    usage: LinkCost = UNTOLD  # of the last time that it went out
    is_answered: bool = False
    connection: int = 0
    _taken_on: int | None = None  # the day of a call that may go out

    def allow(self) -> None:
        budget = self.ledger.budget
        if self.generated is not None:
            self._taken_on = budget.take()
        elif self.num_tokens:
            budget.check()

    async def going_out(self) -> AsyncIterator[bytes]:
        """Its body. It is noted before the first byte leaves: whatever becomes of this process, it is in the sum."""
        body, num_tokens = self.content or b"", self.num_tokens
        self.usage, self._taken_on = LinkCost(tokens_in=num_tokens), None
        self.ledger.note(LinkCost(bytes_up=len(body), num_requests=int(num_tokens > 0), tokens_in=num_tokens))
        if self.generated is not None:
            self.ledger.call(self, self.generated)
        if num_tokens:
            self.ledger.settle()
        yield body

    def end(self) -> None:
        """Take it back if it did not go out though it was allowed."""
        if self._taken_on is not None:
            self.ledger.budget.give_back(self._taken_on)
            self._taken_on = None

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
