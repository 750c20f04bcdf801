"""What left this device of one text, and the receipt for it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, groupby

from skydraft.types import LinkCost, Origin, Token

_ITS_OWN: tuple[Origin, ...] = ("recovered", "bonus", "cloud")  # tokens that the target wrote


class Sent:
    """What was sent of one text. What a lost connection may have carried counts as sent.

    The session of the text adds to it; other threads may read it.
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0  # all of the prompt, or 0
        self.num_calls = 0
        self.servers: tuple[str, ...] = ()
        self.tokens: set[tuple[int, int]] = set()  # (place in the text, token id)

    def add(self, server: str, *, num_prompt_tokens: int = 0, tokens: Iterable[tuple[int, int]] = ()) -> None:
        """Note a message: the whole prompt or nothing of it, and tokens of the text or of drafts."""
        self.servers = tuple(dict.fromkeys((*self.servers, server)))
        self.num_prompt_tokens = num_prompt_tokens or self.num_prompt_tokens
        self.tokens.update(tokens)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the answer: tokens and characters, each from the first one to the one after the last."""

    tokens: tuple[int, int]
    chars: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A drafted token that was sent and is not in the answer; `at` is the place for which it was drafted."""

    at: int
    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """What servers have seen of one text, and what that cost.

    `prompt_tokens` is the length of the prompt that they got; 0: none of it. `seen` are the parts of the answer that
    they got or wrote. `calls` is the number of times that the target was asked. `bytes_up` and `bytes_down` are of all
    messages, `shared_bytes` the part for features of speech; `cost` is the price, if prices are known.
    """

    servers: tuple[str, ...]
    prompt_tokens: int
    seen: tuple[Span, ...]
    rejected: tuple[Rejected, ...]
    calls: int
    bytes_up: int
    bytes_down: int
    shared_bytes: int
    cost: float | None


def receipt_of(
    sent: Sent, tokens: Seq[Token], pieces: Seq[bytes], link: LinkCost, cost: float | None = None
) -> Receipt:
    """The receipt for an answer of these tokens; `pieces` are the bytes of each token id."""
    told = sent.tokens.copy()  # at once: a lost exchange may still add to it
    places = {(at, token.token_id) for at, token in enumerate(tokens)}
    its_own = _ITS_OWN if sent.servers else ()
    known = [(at, token.token_id) in told or token.origin in its_own for at, token in enumerate(tokens)]
    ends = [0, *accumulate(len(token.text) for token in tokens)]
    runs = [[at for at, _ in run] for is_seen, run in groupby(enumerate(known), lambda each: each[1]) if is_seen]
    return Receipt(
        sent.servers,
        sent.num_prompt_tokens,
        tuple(Span((run[0], run[-1] + 1), (ends[run[0]], ends[run[-1] + 1])) for run in runs),
        tuple(
            Rejected(at, token_id, pieces[token_id].decode(errors="replace")) for at, token_id in sorted(told - places)
        ),
        sent.num_calls,
        link.bytes_up,
        link.bytes_down,
        link.shared_bytes,
        cost,
    )
