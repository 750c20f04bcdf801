"""What all interfaces of the gateway answer, whole and streamed; and what each of them has for itself."""

import json
import sys
from itertools import chain
from typing import Any
from unittest.mock import Mock

import httpx2 as httpx
import pydantic
import pytest

from skydraft.gateway.chats import ChatRequest
from skydraft.gateway.desk import Desk
from skydraft.gateway.pair import Pair
from skydraft.gateway.responses import ResponsesRequest

from .interfaces import ALL_WHOLE, COUNTS, ask, body_of, events_of, plain
from .running import PATIENCE_S, Running, gateway, written_by
from .scripted import byte_by_byte
from .test_openai_sdk import openai

QUESTION = "语速"
ATTACHED, RECORDING = "(an attachment, which cannot be read here)", "(a recording, which cannot be heard here)"
PARAMETERS: Any = {"type": "object", "properties": {"city": {"enum": ["上海", "北京"]}}, "required": ["city"]}
FUNCTION: Any = {"name": "天气", "description": "the weather of a city", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", **FUNCTION}
MESSAGES_TOOL: Any = {"name": "天气", "description": "the weather of a city", "input_schema": PARAMETERS}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}


def num_used(path: str, answer: Any) -> tuple[int, int]:
    used = answer["usage"]
    if path in ("responses", "messages"):
        return used["input_tokens"] + used.get("cache_read_input_tokens", 0), used["output_tokens"]
    return used["prompt_tokens"], used["completion_tokens"]


@pytest.mark.parametrize("path", ALL_WHOLE)
def test_a_stream_that_breaks_ends_with_an_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=RuntimeError("the model is on fire"))
    body = plain(path, limit=2000, stream=True, skydraft={"min_new_tokens": 1900})
    with gateway() as running, httpx.stream("POST", f"{running.v1}/{path}", json=body, timeout=PATIENCE_S) as reply:
        text = ""
        for part in reply.iter_text():
            monkeypatch.setattr(Desk, "_finish", broken)
            text += part
    last = events_of(text)[-1]
    error = last["response"]["error"] if path == "responses" else last["error"]
    assert error["message"] and "fire" not in text and not (path == "messages" and last["type"] != "error")
    assert path != "responses" or (last["type"], error["code"]) == ("response.failed", "server_error")


# Parts of a result, by the words that they are read as.
PARTS: dict[str, list[dict[str, Any]]] = {
    ATTACHED: [{"type": "image", "source": {}}, {"type": "input_file"}, {"type": "search_result", "content": []}],
    RECORDING: [{"type": "input_audio", "input_audio": {"data": "AAAA"}}],
}  # fmt: skip
# What no model here reads.
SKIPPED = ["reasoning", "web_search_call", "mcp_call", "mcp_approval_response", "compaction", "what_comes_next"]
# Requests of an interface, each with the chat that means the same.
SAME: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "messages with parts, calls and their results": (
        "responses", {"tools": [TOOL], "input": [
            {"role": "developer", "content": "慢"},
            {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "语"}, {"type": "input_text", "text": "速"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
                {"type": "output_text", "text": "快", "annotations": []}, {"type": "refusal", "refusal": "不"}]},
            *({"type": kind, "arguments": {}, "output": [], "thinking": None} for kind in SKIPPED),
            {"type": "function_call", "call_id": "1", "name": "天气", "arguments": '{"city": "上海"}'},
            {"type": "function_call", "call_id": "2", "name": "天气", "arguments": {"city": "北京"}},
            {"type": "function_call_output", "call_id": "1", "output": "晴"},
            {"type": "function_call_output", "call_id": "2", "output": [*chain(*PARTS.values())]},
            {"type": "web_search_call"}, {"role": "user", "content": "好"},
        ]},
        {"tools": [CHAT_TOOL], "messages": [
            {"role": "system", "content": "慢"}, {"role": "user", "content": "语\n速"},
            {"role": "assistant", "content": [{"type": "thinking"}, {"type": "text", "text": "快"}], "tool_calls": [
                {"id": number, "function": {"name": "天气", "arguments": json.dumps({"city": city})}}
                for number, city in (("1", "上海"), ("2", "北京"))]},
            {"role": "tool", "tool_call_id": "1", "content": "晴"},
            {"role": "tool", "tool_call_id": "2", "content": "\n".join(words for words in PARTS for _ in PARTS[words])},
            {"role": "user", "content": "好"},
        ]},
    ),
    "how tokens are chosen": (
        "responses",
        drawn := {"temperature": 0.9, "seed": 7, "top_k": 3, "stop": ["我"], "frequency_penalty": 0.5,
                  "logit_bias": {"5": -9}},
        {"messages": [{"role": "user", "content": QUESTION}], **drawn},
    ),
    "system messages after the user's": (
        "messages", {"system": "慢", "messages": [
            {"role": "user", "content": "快"}, {"role": "system", "content": [{"type": "text", "text": "低"}]},
            {"role": "assistant", "content": "高"}, {"role": "system", "content": "轻"},
            {"role": "user", "content": "重"}, {"role": "system", "content": "清"}]},
        {"messages": [
            {"role": "system", "content": "慢"}, {"role": "system", "content": "低"}, {"role": "user", "content": "快"},
            {"role": "assistant", "content": "高"}, {"role": "system", "content": "轻"},
            {"role": "system", "content": "清"}, {"role": "user", "content": "重"}]},
    ),
    "a system prompt, blocks, calls and their results": (
        "messages", {"system": [{"type": "text", "text": "慢", "cache_control": {"type": "ephemeral"}}],
         "tools": [MESSAGES_TOOL | {"cache_control": {"type": "ephemeral"}}], "messages": [
            {"role": "user", "content": [{"type": "text", "text": "语"}, {"type": "text", "text": "速"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "?", "signature": ""}, {"type": "text", "text": "我"},
                {"type": "tool_use", "id": "1", "name": "天气", "input": {"city": "上海"}}]},
            {"role": "user", "content": [
                {"type": "text", "text": "好"},
                {"type": "tool_result", "tool_use_id": "1", "content": [
                    {"type": "text", "text": "晴"}, {"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            {"role": "assistant", "content": [
                {"type": "server_tool_use", "id": "1", "input": {}}, {"type": "redacted_thinking", "data": ""},
                {"type": "web_search_tool_result", "tool_use_id": "1", "content": [{"type": "web_search_result"}]},
                {"type": "text", "text": "高"}]},
            {"role": "user", "content": "语速"},
        ]},
        {"tools": [CHAT_TOOL], "messages": [
            {"role": "system", "content": "慢"}, {"role": "user", "content": "语\n速"},
            {"role": "assistant", "content": "我", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "天气", "arguments": '{"city": "上海"}'}}]},
            {"role": "tool", "tool_call_id": "1", "content": f"晴\n{ATTACHED}"}, {"role": "user", "content": "好"},
            {"role": "assistant", "content": "高"}, {"role": "user", "content": "语速"},
        ]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_a_request_means_the_same_as_a_chat(served: Running, case: str) -> None:
    path, ours, chat = SAME[case]
    body = plain(path) | ours
    got, want = served.post(path, **body).json(), served.chat(model="skydraft-lossless", **chat).json()
    assert ALL_WHOLE[path](got).text == want["choices"][0]["message"]["content"]
    counted = served.post(COUNTS[path], **body).json()
    assert num_used(path, got)[0] == want["usage"]["prompt_tokens"] == counted["input_tokens"]


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_number_in_a_call_that_no_double_holds_is_the_largest(number: str) -> None:
    body = body_of("messages", schema={"properties": {"x": {"type": "number"}}, "required": ["x"]}, one=True)
    body |= {"model": "skydraft", "messages": [{"role": "user", "content": "a"}]}
    said = f'<tool_call>\n{{"name": "get_weather", "arguments": {{"x": {number}}}}}\n</tool_call>'
    with gateway(Pair(byte_by_byte(said))) as running:
        answer = running.post("messages", **body)
        assert [abs(each["input"]["x"]) for each in answer.json()["content"]] == [sys.float_info.max]


def test_each_thought_of_a_turn_goes_back_with_it() -> None:
    parts = [[{"type": "reasoning_text", "text": text}] for text in "快慢低"]
    thoughts: Any = [{"type": "reasoning", "summary": [], "content": part} for part in parts]
    call = {"type": "function_call", "call_id": "1", "name": "天气", "arguments": "{}"}
    said = [{"role": "user", "content": "语"}, *thoughts[:2], {"role": "assistant", "content": "速"}, thoughts[2], call]
    _, turn = ResponsesRequest.model_validate({"model": "a", "input": said}).to_ask().turns
    assert (turn.thought, "text='速'" in str(turn.content), len(turn.tool_calls)) == ("快\n慢\n低", True, 1)
    chat = {"role": "assistant", "content": [{"type": "thinking", "thinking": "快"}, thoughts[1]]}
    (turn,) = ChatRequest.model_validate({"model": "a", "messages": [chat]}).to_ask().turns
    assert turn.thought == "快\n慢"


SEES: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"type": "image_url", "image_url": {"url": "x"}}, ATTACHED),
    ("chat/completions", {"type": "input_audio", "input_audio": {"data": "AAAA"}}, RECORDING),
    ("messages", {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}, ATTACHED),
    ("responses", {"type": "input_image", "image_url": "x"}, ATTACHED),
]


@pytest.mark.parametrize(("path", "part", "words"), SEES)
def test_what_cannot_be_read_is_words_before_the_last_turn(served: Running, path: str, part: Any, words: str) -> None:
    """There it is refused, also while its tools are being called."""
    name, says = "input" if path == "responses" else "messages", {"role": "assistant", "content": "慢"}
    asks, said, told = ({"role": "user", "content": content} for content in ("快", [part], words))

    def count(*turns: Any) -> Any:
        return served.post(COUNTS[path], **plain(path) | {name: turns}).json()

    assert count(said, says, asks)["input_tokens"] == count(told, says, asks)["input_tokens"]
    for turns in ((said,), (asks, says, said, says)):
        message = count(*turns)["error"]["message"]
        assert message.startswith(name) and "takes only text: no audio, pictures or files" in message


def test_an_answer_goes_on_from_a_last_message_of_the_assistant() -> None:
    ends = "{% for m in messages %}{{ m.content }}。{% for c in m.tool_calls or [] %}<tool_call>{{ tools }}{% endfor %}"
    with written_by(ends + "{% endfor %}") as running:

        def text(**body: Any) -> str:
            return ask(running, "messages", plain("messages") | body).text

        for begun in ("语速较", "语速 \n", "，"):
            turns: Any = [{"role": "user", "content": "快"}, {"role": "assistant", "content": begun}]
            body, path = plain("chat/completions") | {"messages": turns}, "chat/completions"
            goes_on, anew = (ask(running, path, body | {"continue_final_message": on}).text for on in (True, False))
            assert text(messages=turns) == goes_on != anew == text(messages=turns, continue_final_message=False)
        use = {"type": "tool_use", "id": "1", "name": "天气", "input": {}}
        assert text(messages=[turns[0], {"role": "assistant", "content": [use]}], tools=[MESSAGES_TOOL])


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 300}])
def test_responses_have_all_fields_that_the_sdk_requires(served: Running, options: dict[str, Any]) -> None:
    """The SDK itself checks no answer, and other clients do."""
    bodies = [plain("responses", stream=stream) | options for stream in (False, True)]
    whole, streamed = (served.post("responses", **body) for body in bodies)
    pydantic.TypeAdapter(openai.types.responses.Response).validate_json(whole.content)
    assert whole.json()["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    event = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
    assert len([event.validate_python(each) for each in events_of(streamed.text)]) > 8


def test_the_first_events_hold_nothing_yet_and_the_last_what_was_used(served: Running) -> None:
    events = events_of(served.post("responses", **plain("responses", stream=True)).text)
    assert all(event["response"]["output"] == [] and event["response"]["usage"] is None for event in events[:2])
    first, *_, delta, last = events_of(served.post("messages", **plain("messages", stream=True)).text)
    assert first["message"]["content"] == [] and first["message"]["usage"]["input_tokens"] == 2
    assert delta["usage"]["output_tokens"] == 16 and last == {"type": "message_stop"}


def test_errors_of_messages_have_anthropics_shape(served: Running) -> None:
    for more, status, kind in (
        ({"model": "claude"}, 404, "not_found_error"), ({"temperature": 3}, 400, "invalid_request_error"),
    ):  # fmt: skip
        reply = served.post("messages", **plain("messages") | more)
        assert reply.status_code == status and reply.json()["type"] == "error"
        assert reply.json()["error"]["type"] == kind and "\n" not in reply.json()["error"]["message"]
