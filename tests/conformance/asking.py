"""What the clients are asked, over which pair, and what the Python interface answers to the same."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Seq
from typing import Any, Literal

import numpy as np

from skydraft import DecodingParams, api, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.engines.vocab import Vocab
from skydraft.gateway.pair import Pair
from skydraft.prompts.messages import conversation
from tests.gateway.interfaces import Voice as Voice
from tests.gateway.interfaces import call_text
from tests.gateway.interfaces import forced as forced

# Unlike the toy's own it shows roles and tools, so that what a client drops on the way changes the text.
_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }};{% endfor %}"
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>{% endfor %}"
    "{% endfor %}"
)
_MAX_SEQUENCES = 6
QUESTION = "语速"
ASKED: Any = [{"role": "user", "content": QUESTION}]
_SAID = [("system", "慢"), ("user", "语速"), ("assistant", "快"), ("user", "音调")]
CONVERSATION: Any = [{"role": role, "content": content} for role, content in _SAID]
MODEL = "skydraft-quality"
MAX_TOKENS = 24
SEED = 5
ENOUGH = 900  # characters of eight calls
NOTHING_FITS: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}
TOO_LONG = "语" * 5000  # the toy's context holds 4096


def speaking(spec: str) -> ToyEngine:
    """A toy whose template tells roles apart."""
    engine = open_toy(spec, 4096, _MAX_SEQUENCES)
    engine.vocab.chat_template = _TEMPLATE
    return engine


def calling_pair(name: str, arguments: Any) -> Pair:
    """A drafter that says "no" and a target that answers a question by one call, and what tools gave by "done"."""
    return scripted_pair([call_text(name, arguments), "done"])


def scripted_pair(steps: Seq[str], context_len: int = 4096) -> Pair:
    """A target that writes the step for the number of results there are, with tools, and the last one without.

    It stands for a model that works with a coding agent: the agent's loop is real, and the words are written here.
    """
    return Pair(_scripted(steps, context_len, ends=False), _scripted(steps, context_len))


def _scripted(steps: Seq[str], context_len: int, *, ends: bool = True) -> ToyEngine:
    """With `ends` False it writes "no" for the last step."""
    marks, num_bytes = [chr(0xE000 + number) for number in range(len(steps))], 256
    pieces = [
        *(bytes([byte]) for byte in range(num_bytes)),
        *map(str.encode, marks),
        *map(str.encode, steps),
        b"no",
        b"<eos>",
    ]
    first, end = num_bytes + len(steps), len(pieces) - 1
    template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% set ns = namespace(last=0) %}"
        "{% for m in messages if m['role'] == 'tool' %}{% set ns.last = ns.last + 1 %}{% endfor %}"
        f"{{% set last = [ns.last, {len(steps) - 1}] | min if tools else {len(steps) - 1} %}}"
        f"{{{{ {json.dumps(marks)}[last] }}}}{{# <tool_call> #}}"
    )

    def encode(text: str) -> list[int]:
        ids = list[int]()
        for part in re.split(f"([{''.join(marks)}])", text):
            ids += [num_bytes + marks.index(part)] if part in marks else part.encode()
        return ids

    vocab = Vocab(pieces, encode, special_ids=[end], end_ids=[end], chat_template=template, eos_text="<eos>")
    by_last = np.zeros((vocab.size, vocab.size), np.float32)
    for number in range(len(steps)):
        by_last[num_bytes + number, first + number] = 100
    by_last[num_bytes + len(steps) - 1, end - 1] = 0 if ends else 200
    by_last[first:end, end] = 100
    engine = ToyEngine(vocab, by_last, context_len=context_len, name="scripted")
    engine.max_sequences = _MAX_SEQUENCES
    return engine


def speaking_pair() -> Pair:
    """A poor drafter and its target."""
    return Pair(speaking("toy:drift=0.2"), speaking("toy"))


def expected(messages: Any = ASKED) -> Any:
    """What the Python interface generates."""
    params = DecodingParams(max_new_tokens=MAX_TOKENS, seed=SEED)
    request = GenerateRequest(conversation(messages), make_plan("quality"), params)
    with api.start(request, edge=speaking("toy:drift=0.2"), cloud=speaking("toy")) as generation:
        return generation.run()


def pick_city(city: Literal["上海", "北京"], days: Literal[1, 2, 3]) -> str:
    """Pick a city for some days."""
    return f"{city}{days}"


PICK_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "pick_city",
        "description": "Pick a city for some days.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["上海", "北京"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
        },
    },
}
