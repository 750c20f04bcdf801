"""Where a tool may be called and need not, an answer begins as a call only if that is likely enough."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from skydraft.engines.toy import ToyEngine
from skydraft.engines.vocab import Vocab
from skydraft.gateway.pair import Pair

from .running import Running, gateway

CALL = json.dumps({"name": "weather", "arguments": {"city": "上海", "days": 1}}, ensure_ascii=False)
PIECES = ["?", "!", CALL, "晴，", "25 度"]
PARAMETERS = {"properties": {"city": {}, "days": {}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def unsure_engine() -> ToyEngine:
    """A model that calls in 6 of 10 cases when it is told of tools, and says how the weather is otherwise."""
    ids = [*(piece.encode() for piece in PIECES), *(bytes([byte]) for byte in range(256)), b"<eos>"]
    end = len(ids) - 1
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '?' if tools else '!' }}{# <tool_call> #}"

    def encode(text: str) -> list[int]:
        return [{ord("?"): 0, ord("!"): 1}.get(byte, byte + len(PIECES)) for byte in text.encode()]

    vocab = Vocab(ids, encode, special_ids=[end], end_ids=[end], chat_template=template, eos_text="<eos>")
    by_last = np.zeros((vocab.size, vocab.size), np.float32)
    for before, after in ((1, 3), (3, 4), (2, end), (4, end)):
        by_last[before, after] = 100
    by_last[0] = -100
    by_last[0, 2:4] = np.log([0.6, 0.4])
    engine = ToyEngine(vocab, by_last, name="unsure")
    engine.max_sequences = 4
    return engine


@pytest.fixture(scope="module")
def unsure() -> Iterator[Running]:
    with gateway(Pair(unsure_engine(), unsure_engine())) as running:
        yield running


@pytest.mark.parametrize("mode", ["edge", "quality", "lossless", "cloud"])
@pytest.mark.parametrize(("body", "calls"), [
    ({}, False), ({"tool_choice": "auto"}, False), ({"skydraft": {"min_call_prob": 0.7}}, False),
    ({"skydraft": {"min_call_prob": 0.5}}, True), ({"skydraft": {"min_call_prob": 0}}, True),
    ({"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}, True), ({"tools": []}, False),
])  # fmt: skip
def test_an_unlikely_call_is_an_answer_in_words(unsure: Running, mode: str, body: Any, calls: bool) -> None:
    answer = unsure.chat([{"role": "user", "content": "天气"}], **{"model": f"skydraft-{mode}", "tools": TOOLS} | body)
    message = answer.json()["choices"][0]["message"]
    assert bool(message.get("tool_calls")) == calls and (calls or message["content"] == "晴，25 度")
