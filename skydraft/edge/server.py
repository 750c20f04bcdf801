"""The interfaces of a server, with skydraft or without, and of a text there."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from skydraft.decoding.accounts.receipt import Sent
from skydraft.decoding.context import Context
from skydraft.decoding.plan import Plan
from skydraft.decoding.request import Prepared
from skydraft.decoding.target import TargetFacts
from skydraft.edge.budget import Budget
from skydraft.edge.channel import Waiting
from skydraft.edge.stock.drafts import DraftPort
from skydraft.engines.vocab import Vocab
from skydraft.errors import OptionError
from skydraft.protocol.values import TargetId
from skydraft.types import Draft, DraftBlock, LinkCost, Verdict

OURS, CHAT = "skydraft", "chat"


def check_drafts(plan: Plan, kind: str) -> None:
    """Raise OptionError if a server of this kind cannot check the drafts of a plan."""
    if kind == CHAT and plan.drafts and not plan.streams:
        message = "A chat server cannot check drafts. This needs skydraft serve, vLLM, SGLang or llama-server."
        raise OptionError(message, hint="Choose --mode lossless or cloud, without --gate.")


class Server(Protocol):
    """One server. Its asynchronous methods run on the event loop, and raise a SkydraftError.

    `kind` is OURS, another kind, or "auto" while unknown. `heard_at` is the loop's time of its last answer, 0 before
    the first. It `is_met` once it could take a text. `runs` is its target, if it reports one. If it `is_exact`, other
    requests leave its tokens unchanged. `budget` has the costs and prices. `drafts` is the port for drafts beside a
    server without skydraft.
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
        """Ask the server for its model."""

    async def greet(self, vocab: Vocab, timeout_s: float) -> None:
        """Make first contact. Raises a SkydraftError, VocabularyMismatch where the server reports its vocabulary."""

    async def renew(self) -> None:
        """Make a new connection for later requests: the current one may be dead."""

    async def close(self) -> None: ...

    def begin(self, context: Context, vocab: Vocab, request: Prepared) -> ServerText:
        """Begin a text here. Raises OptionError for options that the server cannot follow."""


class ServerText(Protocol):
    """One text at one server. Its asynchronous methods run on the event loop, one at a time. Each tries once.

    Only `target` may continue the text; it is None before the first answer. While the target `is_writing`,
    `next_written` has an answer. Any thread may read `spent`. A text that `resumes` can continue at the server after
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
        """Let the target read the prompt. The message is fixed when this is called, before it is awaited."""

    async def verify(self, block: DraftBlock, catch_up: tuple[int, ...], write: int, waiting: Waiting) -> Verdict:
        """Return the verdict on a block after the committed tokens and `catch_up`. Then the target may write `write`
        tokens."""

    async def next_written(self, waiting: Waiting) -> Verdict | None:
        """Return the target's next tokens as a verdict; None at the end."""

    def draft(self, draft: Draft) -> None:
        """Send drafts while the target writes. Never called for a server that takes none."""

    def stop(self) -> None:
        """Stop the target's writing. The tokens written before are still read."""

    def break_off(self) -> None: ...

    def reopen(self, server: Any = None, *, renumber: bool = False) -> None:
        """Make the next call open the text again: at `server`, if given; with `renumber`, under a new number."""

    async def renew(self) -> None:
        """Drop the connection: it may be dead."""

    async def close(self) -> None: ...
