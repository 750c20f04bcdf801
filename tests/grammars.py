"""Regular grammars over bytes, followed by derivatives (Brzozowski 1964): an oracle that is not llguidance."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from skydraft.engines.vocab import Vocab

Node: TypeAlias = tuple[Any, ...]
NONE, EMPTY = ("none",), ("empty",)


def cat(*nodes: Node) -> Node:
    """One after another."""
    if not nodes:
        return EMPTY
    first, rest = nodes[0], cat(*nodes[1:])
    if NONE in (first, rest):
        return NONE
    return rest if first == EMPTY else first if rest == EMPTY else ("cat", first, rest)


def alt(*nodes: Node) -> Node:
    """One of them."""
    kept = [node for node in dict.fromkeys(nodes) if node != NONE]
    return NONE if not kept else kept[0] if len(kept) == 1 else ("alt", *kept)


def text(written: str) -> Node:
    """This text."""
    return cat(*(("byte", byte) for byte in written.encode()))


def star(node: Node) -> Node:
    """Any number of it."""
    return ("star", node)


@lru_cache(maxsize=100_000)
def is_done(node: Node) -> bool:
    """Whether nothing more is needed."""
    kind, *inner = node
    if kind == "alt":
        return any(map(is_done, inner))
    return all(map(is_done, inner)) if kind == "cat" else kind in ("empty", "star")


@lru_cache(maxsize=100_000)
def after(node: Node, byte: int) -> Node:
    """What may follow a byte."""
    kind, *inner = node
    if kind == "byte":
        return EMPTY if inner == [byte] else NONE
    if kind == "alt":
        return alt(*(after(each, byte) for each in inner))
    if kind == "star":
        return cat(after(inner[0], byte), node)
    if kind == "cat":
        begun = cat(after(inner[0], byte), inner[1])
        return alt(begun, after(inner[1], byte)) if is_done(inner[0]) else begun
    return NONE


def after_piece(node: Node, piece: bytes) -> Node:
    """What may follow a token; nothing follows one without bytes."""
    if not piece:
        return NONE
    for byte in piece:
        node = after(node, byte)
    return node


# As a pattern, and the same as nodes.
_A, _B, _WORD = text("a"), text("b"), alt(*map(text, ("我们", "员", "ab")))
NODES: dict[str, Node] = {
    "regex:(我们|员|ab)+。": cat(_WORD, star(_WORD), text("。")),
    "regex:a*(b|3)*": cat(star(_A), star(alt(_B, text("3")))),
    "regex:你在说(高兴|大的|一)?人": cat(text("你在说"), alt(*map(text, ("高兴", "大的", "一")), EMPTY), text("人")),
    "regex:员员员员": text("员员员员"),
    "regex:([ab35]|在){5}": cat(*[alt(*map(text, "ab35在"))] * 5),
    "regex:(a|b)*abb": cat(star(alt(_A, _B)), text("abb")),
    "regex:人们(a|b)": cat(text("人们"), alt(_A, _B)),  # no token has the second character: a dead end
}
GRAMMARS = sorted(NODES)


def allowed(grammar: str, generated: Seq[int], vocab: Vocab) -> Any:
    """Which tokens may come next, [vocab]: those whose bytes can go on, and an end where all is said.

    Where nothing else may, the end.
    """
    node = NODES[grammar]
    for token_id in generated:
        node = NONE if int(token_id) in vocab.end_ids else after_piece(node, vocab.pieces[int(token_id)])
    mask = np.array([after_piece(node, piece) != NONE for piece in vocab.pieces])
    mask[list(vocab.end_ids)] = is_done(node)
    if not mask.any():
        mask[list(vocab.end_ids)] = True
    return mask
