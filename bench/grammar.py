"""What a grammar costs over a real vocabulary: compiling a schema, and each token that follows it.

    python -m bench.grammar [MODEL]

Each schema is compiled in the way of a request (checked in a process of its own, then over the vocabulary), again
without the check, and followed along an example that fits it. No model runs: the vocabulary is all that is
used. Times of tokens are processor times; of compiling both are given, that of the check's process included.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import skydraft
from skydraft.choosing import grammar
from skydraft.engines.vocab import Vocab

_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


_NODES = {"type": "array", "items": {"$ref": "#/$defs/n"}}
_PERSON = _object(name=_TEXT, age=_COUNT, tags={"type": "array", "items": _TEXT})
# An ordinary schema, and what fits it.
SCHEMAS: dict[str, tuple[dict[str, Any], Any]] = {
    "any object": ({"type": "object"}, {"a": [1, 2.5, None, {"b": "我们"}], "c": True}),
    "person": (_PERSON, {"name": "张伟", "age": 31, "tags": ["a", "b"]}),
    "list of persons": ({"type": "array", "items": _PERSON}, [{"name": "Li", "age": 3, "tags": []}] * 3),
    "sentiment": (
        _object(label={"enum": ["positive", "negative", "neutral"]}, score={"type": "number"}),
        {"label": "neutral", "score": 0.25},
    ),
    "tool call": (
        {"anyOf": [_object(tool={"const": "search"}, query=_TEXT), _object(tool={"const": "read"}, path=_TEXT)]},
        {"tool": "read", "path": "docs/cli.md"},
    ),
    "date and time": (
        _object(day={"type": "string", "format": "date"}, at={"type": "string", "format": "date-time"}),
        {"day": "2026-11-21", "at": "2026-11-21T16:25:29Z"},
    ),
    "pattern": (
        _object(phone={"type": "string", "pattern": r"^\+?[0-9]{2,4}-[0-9]{6,8}$"}),
        {"phone": "+86-12345678"},
    ),
    "lengths": (
        _object(title={"type": "string", "minLength": 3, "maxLength": 80}, items={"type": "array", "maxItems": 20}),
        {"title": "A title", "items": [1, "two"]},
    ),
    "tree": (
        {"$ref": "#/$defs/n", "$defs": {"n": _object(value=_COUNT, children=_NODES)}},
        {"value": 1, "children": [{"value": 2, "children": []}]},
    ),
    "40 optional fields": (
        {"type": "object", "properties": {f"field_{number}": _TEXT for number in range(40)}},
        {"field_3": "x", "field_20": "y"},
    ),
}  # fmt: skip


def _ms(began: float) -> float:
    return (time.perf_counter() - began) * 1e3


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return _ms(began)


def _processor_ms() -> float:
    """Processor time so far, of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) * 1e3


def _follow(text: str, vocab: Vocab, example: Any) -> list[float]:
    """Milliseconds of this thread for each token of the example: taking it up, and the mask after it."""
    along = grammar.GrammarAlong(grammar.compile_grammar(text, vocab), vocab, 0)
    token_ids = np.array(vocab.encode(json.dumps(example, ensure_ascii=False)), np.int32)
    found = []
    for length in range(len(token_ids) + 1):
        began = time.thread_time()
        mask = along.allowed(token_ids[:length])
        found.append((time.thread_time() - began) * 1e3)
    if not mask[sorted(vocab.end_ids)].all():
        raise SystemExit(f"{text[:60]} does not take its example")
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-0.5b")
    model = parser.parse_args().model
    vocab = skydraft.load(model).vocab
    began = time.perf_counter()
    grammar.compile_grammar("regex:a", vocab)
    print(f"{model}: {vocab.size} tokens; the first grammar takes {_ms(began):.0f} ms, the vocabulary included")
    first, again, steps, kept = [], [], [], grammar._known[vocab]
    processor: list[float] = []
    for name, (schema, example) in SCHEMAS.items():
        text = skydraft.json_schema(schema)
        before = _processor_ms()
        first.append(_timed(lambda text=text: grammar.compile_grammar(text, vocab)))
        processor.append(_processor_ms() - before)
        again.append(_timed(lambda text=text: kept.compiled.__wrapped__(text)))  # what was checked is remembered
        mine = [each for _ in range(5) for each in _follow(text, vocab, example)]
        steps += mine
        print(
            f"{name:20} compile {first[-1]:6.1f} ms ({processor[-1]:.0f} of a processor), "
            f"without the check {again[-1]:6.1f}; "
            f"a token p50 {np.median(mine):.3f} p99 {np.percentile(mine, 99):.3f} ms"
        )
    print(
        f"all: compile p50 {np.median(first):.1f} ms ({np.median(processor):.0f} of a processor), "
        f"without the check {np.median(again):.1f} ms; mask and advance "
        f"p50 {np.median(steps):.3f}, p99 {np.percentile(steps, 99):.3f}, worst {max(steps):.3f} ms"
    )
    row, along = np.zeros(vocab.size, np.float32), grammar.GrammarAlong(kept.compiled("json_object:"), vocab, 0)
    on_row = [_timed(lambda: grammar.masked(row, along.allowed(np.zeros(0, np.int32)))) for _ in range(200)]
    print(f"putting a known mask on a row: p50 {np.median(on_row):.3f} ms")


if __name__ == "__main__":
    main()
