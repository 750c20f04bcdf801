"""`/v1/messages`: Anthropic's requests and answers over the same chat completions. And what every interface refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import pytest

from skydraft.engines.toy import open_toy
from skydraft.engines.vocab import Vocab
from skydraft.gateway.messages import MessagesRequest
from skydraft.gateway.pair import Pair

from .running import Running, gateway
from .test_structured import ASKED, OTHERS, forced

TOOL: Any = {
    "name": "天气", "description": "the weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["上海", "北京"]}}, "required": ["city"]},
}  # fmt: skip
CHAT_TOOL = {"name": "天气", "description": "the weather of a city", "parameters": TOOL["input_schema"]}


def post(served: Running, path: str = "messages", **more: Any) -> Any:
    body = {"model": "skydraft-lossless", "messages": [{"role": "user", "content": "语速"}], "max_tokens": 16} | more
    return httpx.post(f"{served.v1}/{path}", json=body, timeout=30)


def events_of(reply: Any) -> list[dict[str, Any]]:
    events = []
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


SAME: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "a question": ({}, [{"role": "user", "content": "语速"}]),
    "a system prompt and blocks": (
        {"system": [{"type": "text", "text": "慢", "cache_control": {"type": "ephemeral"}}],
         "messages": [{"role": "user", "content": [{"type": "text", "text": "语"}, {"type": "text", "text": "速"}]}]},
        [{"role": "system", "content": "慢"}, {"role": "user", "content": "语\n速"}],
    ),
    "system messages after the user's": (
        {"system": "慢", "messages": [
            {"role": "user", "content": "快"}, {"role": "system", "content": [{"type": "text", "text": "低"}]},
            {"role": "assistant", "content": "高"}, {"role": "system", "content": "轻"},
            {"role": "user", "content": "重"}, {"role": "system", "content": "清"}]},
        [{"role": "system", "content": "慢"}, {"role": "system", "content": "低"}, {"role": "user", "content": "快"},
         {"role": "assistant", "content": "高"}, {"role": "system", "content": "轻"},
         {"role": "system", "content": "清"}, {"role": "user", "content": "重"}],
    ),
    "calls and their results": (
        {"tools": [TOOL], "messages": [
            {"role": "user", "content": "快"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "?", "signature": ""}, {"type": "text", "text": "我"},
                {"type": "tool_use", "id": "1", "name": "天气", "input": {"city": "上海"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "晴"}, {"type": "text", "text": "好"}]},
        ]},
        [
            {"role": "user", "content": "快"},
            {"role": "assistant", "content": "我", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "天气", "arguments": '{"city": "上海"}'}}]},
            {"role": "tool", "tool_call_id": "1", "content": "晴"}, {"role": "user", "content": "好"},
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_a_message_means_the_same_as_a_chat(served: Running, case: str) -> None:
    ours, messages = SAME[case]
    tools = {"tools": [{"type": "function", "function": CHAT_TOOL}]} if "tools" in ours else {}
    want, got = served.chat(messages, model="skydraft-lossless", **tools).json(), post(served, **ours).json()
    assert (got["type"], got["role"], got["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert got["content"] == [{"type": "text", "text": want["choices"][0]["message"]["content"]}]
    read = got["usage"]["input_tokens"] + got["usage"]["cache_read_input_tokens"]
    assert (
        read == want["usage"]["prompt_tokens"] == post(served, "messages/count_tokens", **ours).json()["input_tokens"]
    )
    assert got["usage"]["output_tokens"] == 16


def test_a_stream_has_the_same_text(served: Running) -> None:
    first, start, *deltas, stop, delta, last = events_of(post(served, stream=True))
    assert first["message"]["content"] == [] and first["message"]["usage"]["input_tokens"] == 2
    assert start == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert "".join(event["delta"]["text"] for event in deltas) == post(served).json()["content"][0]["text"]
    assert stop == {"type": "content_block_stop", "index": 0} and last == {"type": "message_stop"}
    assert delta["delta"]["stop_reason"] == "max_tokens" and delta["usage"]["output_tokens"] == 16


@contextmanager
def written_by(template: str) -> Iterator[tuple[Running, Vocab]]:
    """A gateway over toys with another chat template."""
    edge, cloud = open_toy("toy:drift=0.2", 512, 2), open_toy("toy", 512, 2)
    for engine in (edge, cloud):
        engine.vocab.chat_template = template
    with gateway(Pair(edge, cloud)) as running:
        yield running, edge.vocab


def test_an_answer_goes_on_from_a_last_message_of_the_assistant() -> None:
    ends = "{% for m in messages %}{{ m.content }}。{% for c in m.tool_calls or [] %}<tool_call>{{ tools }}{% endfor %}"
    with written_by(ends + "{% endfor %}") as (running, _):

        def text(**body: Any) -> str:
            (block,) = post(running, **body).json()["content"]
            events = events_of(post(running, stream=True, **body))
            pieces = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
            assert "".join(pieces) == block["text"]
            return str(block["text"])

        for begun in ("语速较", "语速 \n", "，"):
            turns: Any = [{"role": "user", "content": "快"}, {"role": "assistant", "content": begun}]
            chat = {"model": "skydraft-lossless", "continue_final_message": True}
            goes_on = running.chat(turns, **chat).json()["choices"][0]["message"]["content"]
            anew = running.chat(turns, model="skydraft-lossless").json()["choices"][0]["message"]["content"]
            blocks = [{"type": "thinking", "thinking": "?", "signature": ""}, {"type": "text", "text": begun}]
            assert text(messages=turns) == goes_on != anew
            assert text(messages=[turns[0], {"role": "assistant", "content": blocks}]) == goes_on
            assert text(messages=turns, continue_final_message=False) == anew
            assert text(messages=turns, add_generation_prompt=True) == anew
        use = {"type": "tool_use", "id": "1", "name": "天气", "input": {}}
        assert text(messages=[turns[0], {"role": "assistant", "content": [use]}], tools=[TOOL])


def test_a_system_message_is_read_where_the_template_takes_only_a_first_one() -> None:
    strict = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}"
    turns = [("user", "快"), ("assistant", "高"), ("system", "轻"), ("user", "重"), ("system", "清")]
    said: Any = [{"role": role, "content": text} for role, text in turns]
    codex: Any = [{"role": "developer", "content": "轻"}, {"role": "user", "content": "重"}]
    with written_by("{% for m in messages %}" + strict + "{{ m.content }}{% endfor %}") as (running, vocab):
        reply = post(running, messages=said, system="慢").json()
        assert reply["usage"]["input_tokens"] == len(vocab.encode("慢快高轻\n\n清\n\n重"))
        chat = running.chat(said, model="skydraft-lossless").json()
        assert chat["usage"]["prompt_tokens"] == len(vocab.encode("快高轻\n\n重\n\n清"))
        answer = post(running, "responses", instructions="慢", input=codex, messages=None, max_tokens=None).json()
        assert answer["usage"]["input_tokens"] == len(vocab.encode("慢\n\n轻重"))


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "天气"}]
)
def test_a_call_is_a_block(served: Running, choice: Any) -> None:
    pytest.importorskip("llguidance")
    options = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
    got = post(served, **options).json()
    (block,) = got["content"]
    assert got["stop_reason"] == "tool_use" and block["type"] == "tool_use" and block["name"] == "天气"
    events = events_of(post(served, stream=True, **options))
    assert events[1]["content_block"]["name"] == "天气" and events[1]["content_block"]["input"] == {}
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == block["input"] and block["input"]["city"] in ("上海", "北京")
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_text_before_a_call_is_a_block_of_its_own(served: Running) -> None:
    pytest.importorskip("llguidance")
    text = '快<tool_call>\n{"name": "天气", "arguments": {"city": "上海"}}\n</tool_call>'
    options = {"tools": [TOOL], "max_tokens": 200} | forced(text)
    assert [block["type"] for block in post(served, **options).json()["content"]] == ["text", "tool_use"]
    events = events_of(post(served, stream=True, **options))
    ends = [
        (event["type"], event["index"])
        for event in events
        if event["type"] in ("content_block_start", "content_block_stop")
    ]
    assert ends == [(f"content_block_{what}", index) for index in (0, 1) for what in ("start", "stop")]


def test_a_stop_sequence_is_told(served: Running) -> None:
    stop = post(served).json()["content"][0]["text"][4]
    got = post(served, stop_sequences=[stop]).json()
    assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", stop)


@pytest.mark.parametrize(
    ("more", "status", "kind"),
    [
        ({"model": "claude"}, 404, "not_found_error"), ({"messages": []}, 400, "invalid_request_error"),
        ({"temperature": 3}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_shape(served: Running, more: Any, status: int, kind: str) -> None:
    reply = post(served, **more)
    assert reply.status_code == status and reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == kind and "\n" not in reply.json()["error"]["message"]


BODIES: dict[str, Any] = {
    "chat/completions": {"messages": ASKED}, "completions": {"prompt": "语速"}, "responses": {"input": "语速"},
    "messages": {"messages": ASKED}, "responses/input_tokens": {"input": "语速"},
}  # fmt: skip
# What one interface has, sent to another.
FORMAT: Any = {"response_format": {"type": "json_object"}}
STRAYED: dict[str, Any] = {
    "completions": FORMAT,
    "responses": {**FORMAT, "max_tokens": 9, "max_completion_tokens": 9, "prompt": {"id": "p"}},
    "messages": {
        **FORMAT, "output_format": {"type": "json_schema", "schema": {}}, "stop": ["a"], "max_completion_tokens": 9,
        "output_config": {"format": {"type": "json_schema"}},
    },
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_every_interface_refuses_what_it_would_miss_and_says_what_to_use(served: Running, path: str) -> None:
    body = {"model": "skydraft", **BODIES[path]}
    for name, value in (OTHERS | STRAYED.get(path, {})).items():
        reply = httpx.post(f"{served.v1}/{path}", json=body | {name: value})
        message = reply.json().get("error", {}).get("message", "")
        assert reply.status_code == 400 and message.startswith(name), (name, reply.text)
        assert "Use " in message or "as skydraft.grammar" in message, message
    empty = {name: type(value)() for name, value in OTHERS.items()}
    assert httpx.post(f"{served.v1}/{path}", json=body | empty).status_code == 200


def test_fields_that_are_null_are_as_if_they_were_left_out() -> None:
    def fields(result: Any, choice: Any) -> Any:
        use = {"type": "tool_use", "id": "1", "name": "天气", "input": {}}
        told = {"type": "tool_result", "tool_use_id": "1"} | result
        messages = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [told]}]
        body = {"model": "skydraft", "messages": messages, "tools": [TOOL], "tool_choice": {"type": "auto"} | choice}
        return MessagesRequest.model_validate(body).chat_fields()

    assert fields({"content": None}, {"disable_parallel_tool_use": None}) == fields({}, {})
