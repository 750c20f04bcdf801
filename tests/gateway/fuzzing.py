"""Requests that begin as the gateway's own schema has them, and are then changed in structure, size and bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from pydantic import BaseModel

from skydraft.gateway.messages import MessagesRequest
from skydraft.gateway.responses import ResponsesRequest
from skydraft.gateway.schema import ChatRequest, TextRequest
from skydraft.gateway.tokens import DetokenizeRequest, TokenizeRequest

KINDS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest, "/v1/completions": TextRequest, "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest, "/v1/responses/input_tokens": ResponsesRequest, "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}  # fmt: skip
MODELS = ["skydraft", *(f"skydraft-{mode}" for mode in ("edge", "cloud", "lossless", "fluency", "quality", "answers"))]
# Where any text of the schema would be refused, one that is not; the rest of the schema says enough.
USUAL: dict[str, list[Any]] = {
    "model": MODELS, "max_tokens": [1, 4, 9], "max_completion_tokens": [1, 4, None], "n": [1, 2, None],
    "logprobs": [None, False, True, 2], "gate": [None, "entropy:1", "always"], "accept": [None, "exact", "top:2"],
    "mode": [None, "edge", "cloud", "quality"], "hand_back": [None, 8, "agree:2"], "stop": [None, "a", ["a", "b"]],
    "grammar": [None, None, None, "regex:[0-9]+", "json_object:", 'lark:start: "a"+'], "functions": [None],
    "role": ["user", "user", "assistant", "system", "tool"], "name": ["f", "g", "get_weather"],
    "parameters": [None, {"type": "object", "properties": {"a": {"type": "integer"}}}], "suffix": [None, ""],
    "data": ["", "AAAA", "UklGRiQAAABXQVZFZm10IBAAAAABAAEAgD4AAAB9AAACABAAZGF0YQAAAAA=", "recording 0"],
    "prompt": ["语速", ["a", "b"], [5, 6], [[5, 6], "a"]],
    "previous_response_id": [None], "conversation": [None], "max_output_tokens": [1, 4], "tokens": [[1, 2], [5]],
    "schema": [{"type": "object"}, {"enum": ["a", "b"]}, {"type": "string"}],
    "arguments": ["", "{}", '{"a": "\\ud800"}', '{"a": [1, {"b": null}]}', {"a": 1}, "[" * 500],
}  # fmt: skip
TEXTS = [
    "a", "语速", "a b\n", "b", "我 们", "c", "", "\0", "\x7f", "\u2028", "\udfff\ud800", "😀", "e\u0301", "\u202e",
    "<tool_call>", "</tool_call>", "{{ 7 }}", "{% for", "<|im_end|>", "%s%n", "../../etc/passwd", "null", "\\ud800",
]  # fmt: skip
NUMBERS: list[float] = [0, -1, 1, 2, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, math.nan, math.inf]
ANY = [None, True, False, *TEXTS[:4], *NUMBERS[:4], [], {}, [[]], [None], {"a": 1}, {"type": "text"}, [{}]]


class Fuzzer:
    """Endless requests, (path, body), by a seed. `most` bounds what is repeated or lengthened."""

    def __init__(self, seed: int, most: int) -> None:
        self._random = Random(seed)
        self._most = most
        self._schemas = {path: kind.model_json_schema() for path, kind in KINDS.items()}

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        choose = self._random
        while True:
            path = choose.choice(list(KINDS))
            self._definitions = self._schemas[path].get("$defs", {})
            body = self._made(self._schemas[path])
            for _ in range(choose.choice([0, 1, 1, 1, 2, 5])):
                body = self._changed(body)
            data = json.dumps(body, ensure_ascii=choose.random() < 0.7).encode("utf-8", "surrogatepass")
            yield path, self._spoilt(data) if choose.random() < 0.1 else data

    def _made(self, schema: dict[str, Any], name: str = "") -> Any:
        """A value that fits the schema, mostly."""
        choose = self._random
        if name in USUAL and choose.random() < 0.95:
            return choose.choice(USUAL[name])
        if "$ref" in schema:
            return self._made(self._definitions[schema["$ref"].rpartition("/")[2]], name)
        if either := schema.get("anyOf") or schema.get("oneOf"):
            return self._made(choose.choice(either), name)
        if "enum" in schema or "const" in schema:
            return choose.choice(schema.get("enum") or [schema["const"]])
        least, most = schema.get("minimum", -3), schema.get("maximum", 9)
        make: dict[str, Callable[[], Any]] = {
            "object": lambda: self._object(schema),
            "array": lambda: [self._made(schema.get("items", {}), name) for _ in range(choose.randint(1, 3))],
            "string": lambda: choose.choice(TEXTS[:6]),
            "integer": lambda: choose.randint(int(least), int(min(most, 99))),
            "number": lambda: choose.uniform(least, most),
            "boolean": lambda: choose.random() < 0.5,
            "null": lambda: None,
        }
        return make.get(schema.get("type", ""), lambda: choose.choice(ANY))()

    def _object(self, schema: dict[str, Any]) -> dict[str, Any]:
        needed = set(schema.get("required", ()))
        fields = schema.get("properties", {}).items()
        return {name: self._made(each, name) for name, each in fields if name in needed or self._random.random() < 0.15}

    def _changed(self, body: Any) -> Any:
        """The body with a change at any place of it."""
        body = json.loads(json.dumps(body))  # whose parts are shared with nothing
        places = [place for place in _places(body) if place[1] != "model" or self._random.random() < 0.1]
        if not places:
            return self._random.choice(ANY)
        holder, key = self._random.choice(places)
        match self._random.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[self._random.choice([*USUAL, *TEXTS])] = holder[key]
            case 1:
                holder *= self._times(holder)
            case _:
                holder[key] = self._other(holder[key])
        return body

    def _other(self, value: Any) -> Any:
        choose = self._random
        if isinstance(value, str) and choose.random() < 0.5:
            return choose.choice(
                [value + choose.choice(TEXTS), choose.choice(TEXTS), (value or "a") * self._times(value)]
            )
        match choose.randrange(5):
            case 0:
                return [value] * self._times(value)
            case 1:
                return {f"{choose.choice(TEXTS)}{number}": value for number in range(self._times(value))}
            case 2:
                return choose.choice(NUMBERS)
            case 3:
                for _ in range(choose.choice([1, 20, 90])):
                    value = choose.choice([[value], {"a": value}])
                return value
        return choose.choice([*ANY, *TEXTS])

    def _times(self, value: Any = "") -> int:
        """How often to repeat a value: often a few times, and never so that it has more than ten times `most` bytes."""
        return min(int(self._most ** self._random.random()), 10 * self._most // len(json.dumps(value)) + 1)

    def _spoilt(self, data: bytes) -> bytes:
        """The bytes with a mistake."""
        choose = self._random
        at = choose.randrange(len(data))
        match choose.randrange(6):
            case 0:
                return data[:at]
            case 1:
                return data[:at] + choose.randbytes(choose.randint(1, 9)) + data[at:]
            case 2:
                return data.decode("utf-8", "surrogatepass").encode("utf-16", "surrogatepass")
            case 3:
                return b"\xef\xbb\xbf" + data
            case 4:
                return data[:at] + choose.choice([b"[", b"{", b'"', b"\\", b",", b"9"]) * self._times() + data[at:]
        return data + data


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each list and object in the value with each of its keys; of long ones, the first."""
    if isinstance(value, dict | list):
        for key in list(value)[:20] if isinstance(value, dict) else range(min(len(value), 20)):
            yield value, key
            yield from _places(value[key])
