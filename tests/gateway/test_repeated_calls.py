"""Where a tool may be called and need not: an answer begins as a call only if that is likely enough, and a call that a
tool has answered is not given out again: the answer is written anew, and all of it counts."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import skydraft
from skydraft.engines.toy import ToyEngine
from skydraft.engines.vocab import Vocab
from skydraft.gateway.pair import Pair

from ..serving import serving
from .running import Running, gateway

CALL = json.dumps({"name": "weather", "arguments": {"city": "上海", "days": 1}}, ensure_ascii=False)
PIECES = ["?", "!", CALL, "晴，", "25 度"]
QUESTION: Any = {"role": "user", "content": "天气"}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}, "days": {}}}}}
]


def repeating(chance: float = 1.0) -> ToyEngine:
    """A model that mostly calls when it is told of tools, with this chance, and says how the weather is otherwise."""
    ids = [*(piece.encode() for piece in PIECES), *(bytes([byte]) for byte in range(256)), b"<eos>"]
    end = len(ids) - 1
    template = (
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}<tool_call>"
        "{{ c['function'] | tojson }}{% endfor %}{% endfor %}{{ '?' if tools else '!' }}"
    )

    def encode(text: str) -> list[int]:
        return [{ord("?"): 0, ord("!"): 1}.get(byte, byte + len(PIECES)) for byte in text.encode()]

    vocab = Vocab(ids, encode, special_ids=[end], end_ids=[end], chat_template=template, eos_text="<eos>")
    by_last = np.zeros((vocab.size, vocab.size), np.float32)
    for before, after in ((1, 3), (3, 4), (2, end), (4, end)):
        by_last[before, after] = 100
    by_last[0] = -100
    by_last[0, 2:4] = np.log([chance, 1 - chance + 1e-30])
    engine = ToyEngine(vocab, by_last, name="repeats")
    engine.max_sequences = 4
    return engine


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with gateway(Pair(repeating(), repeating())) as running:
        yield running


def after(arguments: Any, *more: Any) -> list[Any]:
    function = {"name": "weather", "arguments": json.dumps(arguments)}
    call = {"id": "a", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "a", "content": "晴"}
    return [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, result, *more]


ANSWERED = after({"days": 1, "city": "上海"})


def ask(served: Running, messages: Any = ANSWERED, **body: Any) -> Any:
    answer = served.chat(messages, tools=TOOLS, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("mode", ["edge", "quality", "lossless", "cloud"])
def test_the_answer_is_that_of_none_and_what_was_written_before_it_counts(served: Running, mode: str) -> None:
    whole = ask(served, model=f"skydraft-{mode}", skydraft={"token_ids": True, "logprobs": 0})
    none = ask(served, model=f"skydraft-{mode}", tool_choice="none")
    call = ask(served, [QUESTION], model=f"skydraft-{mode}")
    assert whole["choices"][0] == none["choices"][0]
    assert whole["choices"][0]["message"]["content"] == "晴，25 度"
    ours, first = whole["skydraft"], call["skydraft"]
    assert call["choices"][0]["message"]["tool_calls"]
    assert whole["usage"]["completion_tokens"] == len(ours["token_ids"]) == len(ours["origins"]) == 5
    assert ours["token_ids"][:2] == [2, 261] and ours["token_ids"][2:] == [3, 4, 261]
    scored = list(zip(*ours["logprobs"].values(), strict=True))  # by the draft model and by the target
    assert [{each["id"] for each in both if each} for both in scored] == [{each} for each in ours["token_ids"]]
    assert ours["stats"]["num_tokens"] == 5 and ours["stats"]["num_rounds"] >= first["stats"]["num_rounds"]
    tools = served.chat(ANSWERED, tools=TOOLS, skydraft={"repeat_calls": True}).json()
    assert tools["choices"][0]["finish_reason"] == "tool_calls"
    prompts = tools["usage"]["prompt_tokens"] + none["usage"]["prompt_tokens"]
    assert whole["usage"]["prompt_tokens"] == prompts


@pytest.mark.parametrize(
    ("messages", "body"),
    [
        (ANSWERED, {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}),
        (ANSWERED, {"skydraft": {"repeat_calls": True}}),
        (after({"city": "北京", "days": 1}), {}),
        (after({"city": "上海", "days": 1}, {"role": "assistant", "content": "晴"}, QUESTION), {}),
        (ANSWERED[:2], {}),
        ([QUESTION], {}),
    ],
)
def test_other_calls_are_given_out(served: Running, messages: Any, body: Any) -> None:
    choice = ask(served, messages, **body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"]


def test_both_texts_share_the_tokens_that_were_asked_for(served: Running) -> None:
    for max_tokens, said in ((1, ""), (2, ""), (3, "晴，"), (4, "晴，25 度")):
        answer = ask(served, max_tokens=max_tokens)
        assert answer["choices"][0]["finish_reason"] == ("length" if max_tokens < 5 else "stop")
        assert (answer["choices"][0]["message"]["content"] or "") == said
        assert answer["usage"]["completion_tokens"] == max_tokens


def test_the_receipt_and_the_figures_are_of_both_texts() -> None:
    with (
        serving(repeating()) as server,
        closing(skydraft.connect(server.address)) as cloud,
        gateway(Pair(repeating(), cloud)) as running,
    ):
        model = {"model": "skydraft-cloud"}
        whole, none = ask(running, **model), ask(running, tool_choice="none", **model)
        first = ask(running, skydraft={"repeat_calls": True}, **model)
    parts = [part["skydraft"] for part in (first, none)]
    for name in ("bytes_up", "bytes_down", "calls", "prompt_tokens"):
        told = whole["skydraft"]["receipt"][name]
        total = sum(part["receipt"][name] for part in parts)
        assert told == total or (name.startswith("bytes") and abs(told - total) <= 16), name
    assert whole["skydraft"]["receipt"]["seen"] == [
        {"tokens": [0, 2], "chars": [0, len(CALL)]},
        {"tokens": [2, 5], "chars": [len(CALL), len(CALL) + 6]},
    ]
    assert whole["skydraft"]["stats"]["target_rows_per_token"] is not None


def test_several_choices_and_a_schema(served: Running) -> None:
    answer = ask(served, n=3)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["晴，25 度"] * 3
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["是"]}}}
    answer = ask(served, response_format=schema, max_tokens=200)
    assert json.loads(answer["choices"][0]["message"]["content"]) == "是"


def test_the_other_interfaces_do_the_same(served: Running) -> None:
    function = TOOLS[0]["function"]
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "上海", "days": 1}'}
    result = {"type": "function_call_output", "call_id": "a", "output": "晴"}
    body: Any = {"model": "skydraft", "input": [QUESTION, call, result], "tools": [{"type": "function", **function}]}
    answer = served.post("responses", **body).json()
    (item,) = answer["output"]
    assert item["content"][0]["text"] == "晴，25 度" and answer["usage"]["output_tokens"] == 5
    uses = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "上海", "days": 1}}
    results = [{"type": "tool_result", "tool_use_id": "a", "content": "晴"}]
    turns: Any = [QUESTION, {"role": "assistant", "content": [uses]}, {"role": "user", "content": results}]
    tools = [{"name": "weather", "input_schema": function["parameters"]}]
    body = {"model": "skydraft", "max_tokens": 16, "messages": turns, "tools": tools}
    answer = served.post("messages", **body).json()
    assert answer["content"] == [{"type": "text", "text": "晴，25 度"}] and answer["stop_reason"] == "end_turn"


@pytest.fixture(scope="module")
def unsure() -> Iterator[Running]:
    """Over a model that would sooner call than say any one thing."""
    with gateway(Pair(repeating(0.6), repeating(0.6))) as running:
        yield running


@pytest.mark.parametrize("mode", ["edge", "quality", "lossless", "cloud"])
@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ({}, False), ({"tool_choice": "auto"}, False), ({"skydraft": {"min_call_prob": 0.7}}, False),
        ({"skydraft": {"min_call_prob": 0.5}}, True), ({"skydraft": {"min_call_prob": 0}}, True),
        ({"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}, True), ({"tools": []}, False),
    ],
)  # fmt: skip
def test_an_unlikely_call_is_an_answer_in_words(unsure: Running, mode: str, body: Any, calls: bool) -> None:
    answer = unsure.chat([QUESTION], **{"model": f"skydraft-{mode}", "tools": TOOLS} | body)
    message = answer.json()["choices"][0]["message"]
    assert bool(message.get("tool_calls")) == calls and (calls or message["content"] == "晴，25 度")
