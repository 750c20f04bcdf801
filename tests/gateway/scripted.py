"""A pair that writes what a test says, as a model with tools would: an agent's loop is real, its words are not."""

import json
import re
from collections.abc import Sequence as Seq

import numpy as np

from skydraft.engines.toy import ToyEngine
from skydraft.engines.vocab import Vocab
from skydraft.gateway.pair import Pair


def scripted_pair(steps: Seq[str], context_len: int = 4096, thought: str = "") -> Pair:
    """Models that write the step for the number of results there are, with tools, and the last one without.

    They stand for models that work with a coding agent: the agent's loop is real, and the words are written here.
    With a `thought` they think, and write that before each step.
    """
    return Pair(_scripted(steps, context_len, thought), _scripted(steps, context_len, thought))


def _scripted(steps: Seq[str], context_len: int, thought: str) -> ToyEngine:
    marks, num_bytes = [chr(0xE000 + number) for number in range(len(steps))], 256
    before = [f"<think>\n{thought}", "\n</think>\n\n"] if thought else []
    said = [part for step in steps for part in (*before, step)]
    pieces = [*(bytes([byte]) for byte in range(num_bytes)), *map(str.encode, [*marks, *said]), b"<eos>"]
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
    engine = ToyEngine(vocab, by_last, context_len=context_len, name="scripted")
    engine.max_sequences = 6
    return engine
