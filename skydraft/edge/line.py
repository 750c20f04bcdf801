"""What a text needs of servers, whether they are ours or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from collections.abc import Sequence as Seq
from typing import Any, Protocol, TypeVar

from skydraft.decoding.context import Committed
from skydraft.decoding.prices import Prices
from skydraft.decoding.receipt import Sent
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import TargetFacts
from skydraft.edge.channel import EventLoop, Waiting
from skydraft.engines.vocab import Vocab
from skydraft.protocol.values import TargetId, Written
from skydraft.types import DraftBlock, LinkCost, Prompt, Verdict

T = TypeVar("T")


class ServerLine(Protocol):
    """The connection to one server, of ours or not. Its methods run on the event loop and raise a SkydraftError."""

    @property
    def target(self) -> str:
        """The server's address."""

    @property
    def heard_at(self) -> float:
        """Time of the server's last answer, by the loop's clock."""

    async def ping(self, timeout_s: float) -> float:
        """The round trip in milliseconds."""

    async def max_block(self, timeout_s: float) -> int:
        """The longest block that the server takes."""

    async def renew(self) -> None:
        """Make a new connection for what is asked next: the current one may be dead."""

    async def close(self) -> None:
        """Close the connection."""


class ServerList(Protocol):
    """The servers that a text may use: they run the same model. `facts` are by address, with the time."""

    has_others: bool
    is_exact: bool
    facts: dict[str, tuple[float, TargetFacts]]

    @property
    def prices(self) -> Prices | None:
        """What their tokens cost, if they are sold."""

    @property
    def uses_tls(self) -> bool:
        """Whether all connections are encrypted."""

    @property
    def name(self) -> str:
        """Their addresses."""

    @property
    def loop(self) -> EventLoop:
        """The event loop of their lines."""

    def in_order(self, number: int) -> Seq[ServerLine]:
        """The lines in the order in which a session of this number tries them."""

    def lost(self, channel: Any) -> None:
        """Note that a server did not answer."""

    def changed(self, channel: Any) -> bool:
        """Note that a server runs another target; whether a new text may begin with it."""

    async def ask(self, number: int, ask: Callable[[Any], Awaitable[T]]) -> T:
        """The answer of the first server that gives one, in order."""

    async def greet(self, number: int, vocab: Vocab, timeout_s: float) -> None:
        """Ask whether a server is there. Raises a SkydraftError, such as VocabularyMismatch."""

    async def learn(self, channel: Any, timeout_s: float) -> TargetFacts:
        """The facts about a server."""

    def session(self, context: Committed, prompt: Prompt, vocab: Vocab, request: GenerateRequest) -> TextSession:
        """A text at one of the servers. Raises OptionError for what they cannot follow."""

    async def close(self) -> None:
        """Close the connections."""

    def end(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run closing work on the loop."""


class TextSession(Protocol):
    """One text at one server. Its methods run on the event loop, one at a time; each tries once."""

    number: int
    sent: Sent

    @property
    def channel(self) -> ServerLine:
        """The line to its server."""

    @property
    def top(self) -> int:
        """Drafts among this many best tokens are accepted; 0: only the target's choice."""

    @property
    def is_writing(self) -> bool:
        """Whether the target is writing, so that `next_written` has an answer."""

    @property
    def spent(self) -> LinkCost:
        """The cost of the link so far. Any thread may call this."""

    def expect(self, target: TargetId | None) -> None:
        """Allow only this target to begin the text; None: any."""

    def reopen(self, channel: Any = None, *, renumber: bool = False) -> None:
        """Make the next call begin anew, perhaps elsewhere."""

    def break_off(self) -> None:
        """Drop what is under way."""

    async def renew(self) -> None:
        """Drop the connection, which may be dead."""

    def opening_message(self) -> bytes:
        """The message that opens the session."""

    async def open(self, message: bytes, waiting: Waiting) -> None:
        """Let the target read the prompt."""

    async def judge(
        self, block: DraftBlock, catch_up: tuple[int, ...], write: int, waiting: Waiting, ahead: tuple[int, ...] = ()
    ) -> Verdict:
        """The verdict on a block after the committed tokens and `ahead`; with `write`, the target writes on."""

    async def next_written(self, waiting: Waiting) -> Written:
        """The next tokens that the target wrote."""

    def stop(self) -> None:
        """Stop the target's writing; what it wrote until then is still read."""

    async def close(self) -> None:
        """End the session."""
