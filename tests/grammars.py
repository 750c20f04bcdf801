"""Regular grammars over bytes, followed by derivatives (Brzozowski 1964): an oracle that is not llguidance."""

from collections.abc import Sequence as Seq
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np

from skydraft.engines.vocab import Vocab
from skydraft.grammars import json_schema, lark, regex

Node: TypeAlias = tuple[Any, ...]
NONE, EMPTY = ("none",), ("empty",)


def cat(*nodes: Node) -> Node:
    if not nodes:
        return EMPTY
    first, rest = nodes[0], cat(*nodes[1:])
    if NONE in (first, rest):
        return NONE
    return rest if first == EMPTY else first if rest == EMPTY else ("cat", first, rest)


def alt(*nodes: Node) -> Node:
    kept = [node for node in dict.fromkeys(nodes) if node != NONE]
    return NONE if not kept else kept[0] if len(kept) == 1 else ("alt", *kept)


def text(written: str) -> Node:
    return cat(*(("byte", byte) for byte in written.encode()))


def star(node: Node) -> Node:
    return ("star", node)


@lru_cache(maxsize=100_000)
def is_done(node: Node) -> bool:
    kind, *inner = node
    if kind == "alt":
        return any(map(is_done, inner))
    return all(map(is_done, inner)) if kind == "cat" else kind in ("empty", "star")


@lru_cache(maxsize=100_000)
def after(node: Node, byte: int) -> Node:
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
HAS_LIBRARY = find_spec("llguidance") is not None  # without it grammars are drawn nowhere


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


# Every byte, so that any text can be spelled, and tokens that hold several marks at once, as real vocabularies have.
_MERGED = ['{"', '":', '": "', '",', '"}', "name", "age", "na", "true", "false", "null", "  ", '"', "我们", "12", "\n"]
_PIECES = [bytes([byte]) for byte in range(256)] + [text.encode() for text in _MERGED if len(text.encode()) > 1]
_PIECES += ["我".encode()[:2], b"<end>", b"<eot>"]
ENDS = (len(_PIECES) - 2, len(_PIECES) - 1)


def spelled(text: str) -> list[int]:
    data, found = text.encode(), []
    while data:
        fitting = (i for i, piece in enumerate(_PIECES) if data.startswith(piece))
        found.append(max(fitting, key=lambda i: len(_PIECES[i])))
        data = data[len(_PIECES[found[-1]]) :]
    return found


BYTES = Vocab(_PIECES, spelled, special_ids=ENDS, end_ids=ENDS)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_ITSELF = {"$ref": "#/$defs/n"}
NESTED = {**_ITSELF, "$defs": {"n": {"anyOf": [{"type": "null"}, {"type": "array", "items": _ITSELF}]}}}
JSONS = [
    "json_object:",
    json_schema(PERSON),
    json_schema({"type": "array", "items": {"enum": ["name", "我们", 12, None]}, "maxItems": 3}),
    json_schema(NESTED),
    regex(r"(我们|\d{2,4}|name)+"),
    lark('start: "{" pair ("," pair)* "}"\npair: "name" ":" /[a-c]+/ | "age" ":" /[0-9]{1,3}/'),
]  # fmt: skip
