"""What the edge needs of a server, of ours or not, and of a text there."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from skydraft.decoding.accounts.receipt import Sent
from skydraft.decoding.context import Context
from skydraft.decoding.plan import Plan
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import TargetFacts
from skydraft.edge.budget import Budget
from skydraft.edge.channel import Waiting
from skydraft.edge.stock.drafts import DraftPort
from skydraft.engines.vocab import Vocab
from skydraft.errors import OptionError
from skydraft.protocol.values import TargetId
from skydraft.types import Draft, DraftBlock, LinkCost, Prompt, Verdict

OURS, CHAT = "skydraft", "chat"


def check_drafts(plan: Plan, kind: str) -> None:
    """Raise OptionError where a server of this kind cannot check the drafts of a plan."""
    if kind == CHAT and plan.drafts and not plan.streams:
        message = "A chat server cannot check a draft: that needs skydraft serve, vLLM, SGLang or llama-server."
        raise OptionError(message, hint="Choose --mode lossless or cloud, without --gate.")


class Server(Protocol):
    """One server. Its asynchronous methods run on the event loop, and raise a SkydraftError.

    `kind` is OURS, or what else it runs as far as that is known. `heard_at` is the time of its last answer by the
    loop's clock, 0 before the first; it `is_met` once it could take a text. `runs` is its target, if it says which one;
    the tokens of one that `is_exact` do not depend on what else it computes. `budget` has what was spent, and the
    prices, if its tokens are sold. A server that is not ours takes drafts at a port beside it, if it has one.
    """

    address: str
    uses_tls: bool
    is_exact: bool
    runs: TargetId | None
    budget: Budget
    drafts: DraftPort | None

    @property
    def heard_at(self) -> float: ...

    @property
    def is_met(self) -> bool: ...

    @property
    def kind(self) -> str: ...

    async def ping(self, timeout_s: float) -> float: ...

    async def learn(self, timeout_s: float) -> TargetFacts:
        """Its model and its costs."""

    async def greet(self, vocab: Vocab, timeout_s: float) -> None:
        """Ask whether it is there. Raises a SkydraftError: VocabularyMismatch, too, where that is easy to see."""

    async def renew(self) -> None:
        """Make a new connection for what is asked next: the current one may be dead."""

    async def close(self) -> None: ...

    def begin(self, context: Context, prompt: Prompt, vocab: Vocab, request: GenerateRequest) -> ServerText:
        """A text here. Raises OptionError for what the server cannot follow."""


class ServerText(Protocol):
    """One text at one server. Its asynchronous methods run on the event loop, one at a time, and each tries once.

    Only `target` may go on with it, None before one has begun it. `is_writing` says that the target writes, so that
    `next_written` has an answer. Any thread may read what it has `spent`. One that `resumes` can be gone on with after
    tokens of the draft model.
    """

    target: TargetId | None
    sent: Sent

    @property
    def resumes(self) -> bool: ...

    @property
    def is_writing(self) -> bool: ...

    @property
    def spent(self) -> LinkCost: ...

    def open(self, waiting: Waiting) -> Coroutine[Any, Any, None]:
        """Let the target read the prompt. What is sent is settled by the call, in the caller's thread."""

    async def verify(self, block: DraftBlock, catch_up: tuple[int, ...], write: int, waiting: Waiting) -> Verdict:
        """The verdict on a block after the committed tokens and `catch_up`; with `write`, the target writes on."""

    async def next_written(self, waiting: Waiting) -> Verdict | None:
        """What the target wrote next; None at its end."""

    def draft(self, draft: Draft) -> None:
        """Send drafts beside what the target writes. A server that takes none is not asked for it."""

    def stop(self) -> None:
        """Stop the target's writing; what it wrote until then is still read."""

    def break_off(self) -> None: ...

    def reopen(self, server: Any = None, *, renumber: bool = False) -> None:
        """Make the next call begin anew, perhaps at another server of this kind, or under another number."""

    async def renew(self) -> None:
        """Drop the connection, which may be dead."""

    async def close(self) -> None: ...
