"""A pair that writes what a test says, as a model with tools would: an agent's loop is real, its words are not."""

import json
import re
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from skydraft.engines.toy import ToyEngine
from skydraft.engines.vocab import Vocab
from skydraft.gateway.pair import Pair

from .interfaces import call_text


def byte_by_byte(text: str) -> ToyEngine:
    """A model that writes this text, a byte at a time, after a prompt of one character; a grammar must agree."""
    data, template = text.encode(), "{% for m in messages %}{{ m['content'] }}{% endfor %}{# <tool_call> tools #}"
    pieces = [*(bytes([byte]) for byte in range(256)), b"<eos>"]
    vocab = Vocab(pieces, lambda said: list(said.encode()), special_ids=[256], end_ids=[256], chat_template=template)
    at = np.zeros((len(data) + 1, vocab.size), np.float32)
    at[range(len(data) + 1), [*data, 256]] = 100
    return ToyEngine(vocab, np.zeros((vocab.size, vocab.size), np.float32), by_position=at, name="bytes")


def calling_pair(name: str, arguments: Any) -> Pair:
    """A drafter that says "no" and a target that answers a question by one call, and what tools gave by "done"."""
    return scripted_pair([call_text(name, arguments), "done"])


def scripted_pair(steps: Seq[str], context_len: int = 4096, thought: str = "") -> Pair:
    """A target that writes the step for the number of results there are, with tools, and the last one without.

    It stands for a model that works with a coding agent: the agent's loop is real, and the words are written here.
    With a `thought` it is one that thinks, and writes that before each step.
    """
    return Pair(_scripted(steps, context_len, thought, ends=False), _scripted(steps, context_len, thought))


def _scripted(steps: Seq[str], context_len: int, thought: str, *, ends: bool = True) -> ToyEngine:
    """With `ends` False it writes "no" for the last step."""
    marks, num_bytes = [chr(0xE000 + number) for number in range(len(steps))], 256
    before = [f"<think>\n{thought}", "\n</think>\n\n"] if thought else []
    said = [part for step in steps for part in (*before, step)]
    pieces = [
        *(bytes([byte]) for byte in range(num_bytes)), *map(str.encode, marks), *map(str.encode, said), b"no", b"<eos>",
    ]  # fmt: skip
    first, end, num_parts = num_bytes + len(steps), len(pieces) - 1, len(before) + 1
    template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% set ns = namespace(last=0) %}"
        "{% for m in messages if m['role'] == 'tool' %}{% set ns.last = ns.last + 1 %}{% endfor %}"
        f"{{% set last = [ns.last, {len(steps) - 1}] | min if tools else {len(steps) - 1} %}}"
        f"{{{{ {json.dumps(marks)}[last] }}}}{{# <tool_call> {'</think>' if thought else ''} #}}"
    )

    def encode(text: str) -> list[int]:
        ids = list[int]()
        for part in re.split(f"([{''.join(marks)}])", text):
            ids += [num_bytes + marks.index(part)] if part in marks else part.encode()
        return ids

    vocab = Vocab(pieces, encode, special_ids=[end], end_ids=[end], chat_template=template, eos_text="<eos>")
    by_last = np.zeros((vocab.size, vocab.size), np.float32)
    for number in range(len(said)):
        is_last = (number + 1) % num_parts == 0
        by_last[first + number, end if is_last else first + number + 1] = 100
    for number in range(len(steps)):
        by_last[num_bytes + number, first + number * num_parts] = 100
    by_last[num_bytes + len(steps) - 1, end - 1] = 0 if ends else 200
    by_last[end - 1, end] = 100
    engine = ToyEngine(vocab, by_last, context_len=context_len, name="scripted")
    engine.max_sequences = 6
    return engine
