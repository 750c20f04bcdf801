from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, groupby

from skydraft.types import LinkCost, Origin, Token

ITS_OWN: tuple[Origin, ...] = ("recovered", "bonus", "cloud")  # tokens that the target wrote


@dataclass(slots=True)
class Sent:
    """The parts of one text that were sent, or may have been. `blocks` are tokens of the text or of drafts, with their
    places. Only the text's session changes it; other threads may read it."""

    servers: list[str] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_calls: int = 0
    blocks: list[tuple[int, Seq[int]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Seen:
    """A part of the answer: a range of tokens and one of characters, each as (first, last + 1)."""

    tokens: tuple[int, int]
    chars: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A drafted token that was sent but is not in the answer; `at` is its place."""

    at: int
    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """The parts of one text that servers have seen: the prompt (all or 0 tokens), and the parts of the answer that they
    got or wrote. `shared_bytes` is the part of `bytes_up` for features of speech. `cost` is the price, if known. With
    `audited` a server reads the whole answer later."""

    servers: tuple[str, ...]
    prompt_tokens: int
    seen: tuple[Seen, ...]
    rejected: tuple[Rejected, ...]
    calls: int
    bytes_up: int
    bytes_down: int
    shared_bytes: int
    cost: float | None
    audited: bool = False


def receipt_of(
    sent: Sent, tokens: Seq[Token], pieces: Seq[bytes], link: LinkCost, cost: float | None = None
) -> Receipt:
    """Return the receipt for an answer of these tokens; `pieces` are the bytes of each token id."""
    told = {(at, token_id) for base, block in sent.blocks.copy() for at, token_id in enumerate(block, base)}
    places = {(at, token.token_id) for at, token in enumerate(tokens)}
    its_own = ITS_OWN if sent.servers else ()
    known = [(at, token.token_id) in told or token.origin in its_own for at, token in enumerate(tokens)]
    ends = [0, *accumulate(len(token.text) for token in tokens)]
    runs = [[at for at, _ in run] for is_seen, run in groupby(enumerate(known), lambda each: each[1]) if is_seen]
    seen = tuple(Seen((run[0], run[-1] + 1), (ends[run[0]], ends[run[-1] + 1])) for run in runs)
    rejected = (Rejected(at, each, pieces[each].decode(errors="replace")) for at, each in sorted(told - places))
    return Receipt(
        tuple(dict.fromkeys(sent.servers)), sent.num_prompt_tokens, seen, tuple(rejected),
        sent.num_calls, link.bytes_up, link.bytes_down, link.shared_bytes, cost,
    )  # fmt: skip
