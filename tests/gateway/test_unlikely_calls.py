"""Where a tool may be called and need not, an answer begins as a call only if that is likely enough."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from skydraft.engines.toy import ToyEngine
from skydraft.gateway.pair import Pair

from .running import Running, gateway
from .test_repeated_calls import CALL, PIECES, QUESTION, TOOLS, repeating

CHANCE = 0.6  # of a call: the likeliest token, and not likely enough


def unsure() -> ToyEngine:
    """A model that would sooner call than say any one thing, and says something with a chance of 0.4."""
    engine = repeating()
    engine._by_last[0] = -100.0
    engine._by_last[0, PIECES.index(CALL)] = math.log(CHANCE)
    engine._by_last[0, PIECES.index("晴，")] = math.log(1 - CHANCE)
    assert np.isclose(np.exp(engine._by_last[0]).sum(), 1)
    return engine


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with gateway(Pair(unsure(), unsure())) as running:
        yield running


@pytest.mark.parametrize("mode", ["edge", "quality", "lossless", "cloud"])
@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ({}, False), ({"tool_choice": "auto"}, False), ({"skydraft": {"min_call_prob": 0.7}}, False),
        ({"skydraft": {"min_call_prob": 0.5}}, True), ({"skydraft": {"min_call_prob": 0}}, True),
        ({"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}, True),
    ],
)  # fmt: skip
def test_an_unlikely_call_is_an_answer_in_words(served: Running, mode: str, body: Any, calls: bool) -> None:
    answer = served.chat([QUESTION], model=f"skydraft-{mode}", tools=TOOLS, **body)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert bool(message.get("tool_calls")) == calls
    assert calls or message["content"] == "晴，25 度"


def test_answers_without_tools_may_begin_as_they_like(served: Running) -> None:
    """The engine's prompt ends the same with no tools to call; its first token is then no call to be careful about."""
    answer = served.chat([QUESTION]).json()
    assert answer["choices"][0]["message"]["content"] == "晴，25 度"
    wrong = served.chat([QUESTION], tools=TOOLS, skydraft={"min_call_prob": 1.5})
    assert wrong.status_code == 400 and "min" in wrong.json()["error"]["message"]
