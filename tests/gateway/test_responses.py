"""`/v1/responses` through OpenAI's own SDK: the same answers as of chat completions, in items and their events."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pydantic
import pytest

import skydraft.gateway.desk as desk

from ..later import later
from .running import PATIENCE_S, Running, gateway
from .test_openai_sdk import expected
from .test_structured import Voice, forced

openai = later("openai")

QUESTION = "语速"
TOOL: Any = {
    "type": "function", "name": "天气", "description": "the weather of a city", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"enum": ["上海", "北京"]}}, "required": ["city"]},
}  # fmt: skip
CHAT_TOOL = {"type": "function", "function": {key: TOOL[key] for key in TOOL if key != "type"}}


@pytest.fixture
def client(served: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0, timeout=PATIENCE_S)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.responses.create(
        **{"model": "skydraft-quality", "input": QUESTION, "max_output_tokens": 24} | options
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_is_that_of_the_python_interface(client: openai.OpenAI, temperature: float) -> None:
    got = ask(client, temperature=temperature, extra_body={"skydraft": {"token_ids": True, "seed": 5}})
    want = expected("quality", max_new_tokens=24, temperature=temperature, seed=5)
    assert got.output_text == want.text and got.model_extra["skydraft"]["token_ids"] == list(want.token_ids)
    assert (got.usage.input_tokens, got.usage.output_tokens) == (want.num_prompt_tokens, 24)
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert got.id.startswith("resp_") and got.output[0].id.startswith("msg_") and got.store is False


def events_of(client: openai.OpenAI, **options: Any) -> list[Any]:
    events = list(ask(client, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all(event.response.output == [] and event.response.usage is None for event in events[:2])
    return events


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 300}])
def test_whole_and_streamed_have_all_fields_that_the_sdk_requires(served: Running, options: dict[str, Any]) -> None:
    """The SDK itself checks no answer, and other clients do."""
    body = {"model": "skydraft-quality", "input": QUESTION, "max_output_tokens": 24} | options
    whole, streamed = (
        httpx.post(f"{served.v1}/responses", json=body | {"stream": stream}, timeout=PATIENCE_S)
        for stream in (False, True)
    )
    pydantic.TypeAdapter(openai.types.responses.Response).validate_json(whole.content)
    assert whole.json()["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    event = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
    events = [line for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert len([event.validate_json(line.removeprefix("data: ")) for line in events]) > 8


def test_a_stream_of_text_is_the_same_answer(client: openai.OpenAI) -> None:
    whole, events = ask(client), events_of(client)
    names = [event.type.removeprefix("response.") for event in events]
    deltas = names.count("output_text.delta")
    assert deltas > 1 and names[2:] == [
        "output_item.added", "content_part.added", *["output_text.delta"] * deltas, "output_text.done",
        "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    added, part, *texts, done, part_done, item_done, last = events[2:]
    assert added.item.content == [] and added.item.status == "in_progress" and part.part.text == ""
    assert "".join(event.delta for event in texts) == done.text == part_done.part.text == whole.output_text
    assert last.response.output == [item_done.item] and last.response.usage == whole.usage
    assert {event.item_id for event in (part, *texts, done, part_done)} == {added.item.id, item_done.item.id} == {
        item_done.item.id
    }  # fmt: skip


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "天气"}])
def test_calls_are_items_and_a_stream_has_the_same(client: openai.OpenAI, choice: Any) -> None:
    pytest.importorskip("llguidance")
    options = {"tools": [TOOL], "tool_choice": choice, "max_output_tokens": 900}
    whole, events = ask(client, **options), events_of(client, **options)
    assert whole.status == "completed" and all(item.type == "function_call" for item in whole.output)
    for index, item in enumerate(whole.output):
        assert item.name == "天气" and json.loads(item.arguments)["city"] in ("上海", "北京")
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        assert mine[0].type == "response.output_item.added" and mine[0].item.call_id
        pieces = "".join(each.delta for each in mine if each.type == "response.function_call_arguments.delta")
        assert pieces == mine[-2].arguments == mine[-1].item.arguments == item.arguments
        assert mine[-2].type == "response.function_call_arguments.done" and mine[-1].item.status == "completed"
    assert len(events[-1].response.output) == len(whole.output)


def test_a_text_before_a_call_is_an_item_of_its_own(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    text = '快<tool_call>\n{"name": "天气", "arguments": {"city": "上海"}}\n</tool_call>'
    options = {"tools": [TOOL], "max_output_tokens": 200, "extra_body": forced(text)}
    assert [(item.type, item.status) for item in ask(client, **options).output] == [
        ("message", "completed"), ("function_call", "completed"),
    ]  # fmt: skip
    events = events_of(client, **options)
    ends = [event.output_index for event in events if event.type == "response.output_item.done"]
    assert ends == [0, 1] and events[-1].response.output[0].content[0].text == "快"


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "instructions and a text": (
        {"instructions": "慢", "input": "快"},
        {"messages": [{"role": "system", "content": "慢"}, {"role": "user", "content": "快"}]},
    ),
    "messages with parts": (
        {"input": [
            {"role": "developer", "content": "慢"},
            {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "语"}, {"type": "input_text", "text": "速"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
                {"type": "output_text", "text": "快", "annotations": []}, {"type": "refusal", "refusal": "不"}]},
            {"role": "user", "content": "我"},
        ]},
        {"messages": [
            {"role": "system", "content": "慢"}, {"role": "user", "content": "语\n速"},
            {"role": "assistant", "content": "快\n不"}, {"role": "user", "content": "我"},
        ]},
    ),
    "calls and their results": (
        {"tools": [TOOL], "input": [
            {"role": "user", "content": "快"}, {"type": "reasoning", "id": "rs_1", "summary": []},
            {"role": "assistant", "content": "我"},
            {"type": "function_call", "call_id": "1", "name": "天气", "arguments": '{"city": "上海"}'},
            {"type": "function_call", "call_id": "2", "name": "天气", "arguments": '{"city": "北京"}'},
            {"type": "function_call_output", "call_id": "1", "output": "晴"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "雨"}]},
        ]},
        {"tools": [CHAT_TOOL], "messages": [
            {"role": "user", "content": "快"},
            {"role": "assistant", "content": "我", "tool_calls": [
                {"id": number, "function": {"name": "天气", "arguments": json.dumps({"city": city})}}
                for number, city in (("1", "上海"), ("2", "北京"))]},
            {"role": "tool", "tool_call_id": "1", "content": "晴"},
            {"role": "tool", "tool_call_id": "2", "content": "雨"},
        ]},
    ),
    "how tokens are chosen": (
        drawn := {"temperature": 0.9, "seed": 7, "top_k": 3, "stop": ["我"], "frequency_penalty": 0.5,
                  "logit_bias": {"5": -9}},
        {"messages": [{"role": "user", "content": QUESTION}], **drawn},
    ),
    "a schema": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["快", "慢"]}, "strict": True}}},
        {"messages": [{"role": "user", "content": QUESTION}],
         "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["快", "慢"]}}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_a_request_means_the_same_as_a_chat(served: Running, case: str) -> None:
    ours, chat = SAME[case]
    got = httpx.post(
        f"{served.v1}/responses", json={"model": "skydraft-lossless", "input": QUESTION, "max_output_tokens": 16} | ours
    ).json()
    want = served.chat(model="skydraft-lossless", **chat).json()
    assert got["usage"]["input_tokens"] == want["usage"]["prompt_tokens"]
    assert got["output"][0]["content"][0]["text"] == want["choices"][0]["message"]["content"]
    counted = httpx.post(f"{served.v1}/responses/input_tokens", json={"model": "skydraft", "input": QUESTION} | ours)
    assert counted.json()["input_tokens"] == want["usage"]["prompt_tokens"]


def test_the_sdk_parses_an_answer_into_a_pydantic_model(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    got = client.responses.parse(model="skydraft", input=QUESTION, text_format=Voice, max_output_tokens=200)
    assert isinstance(got.output_parsed, Voice) and got.status == "completed"


def test_log_probabilities_stand_beside_the_text(client: openai.OpenAI) -> None:
    options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = ask(client, **options).output[0].content[0]
    assert "".join(token.token for token in part.logprobs) == part.text
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in part.logprobs)
    deltas = [event for event in events_of(client, **options) if event.type == "response.output_text.delta"]
    streamed = [(token.token, token.logprob) for event in deltas for token in event.logprobs]
    assert streamed == [(token.token, token.logprob) for token in part.logprobs]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"), ({"input": []}, "input"), ({"tools": [{"type": "function"}]}, "tools"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"), ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0"),
        ({"extra_body": {"n": 2}}, "n"), ({"extra_body": {"continue_final_message": True}}, "input"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_with_the_name_of_the_field(
    client: openai.OpenAI, options: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **options)
    assert (raised.value.param or "").startswith(param) and "\n" not in raised.value.message


def test_a_stream_that_breaks_ends_with_a_failed_response(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("the model is on fire")

    with gateway() as running, openai.OpenAI(base_url=running.v1, api_key="none", max_retries=0) as client:
        stream = ask(client, stream=True, max_output_tokens=2000, extra_body={"skydraft": {"min_new_tokens": 1900}})
        events = [next(stream)]
        monkeypatch.setattr(desk.Desk, "_finish", broken)
        events += list(stream)
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error" and "fire" not in events[-1].response.error.message


def test_without_text_there_is_an_empty_message(served: Running) -> None:
    pytest.importorskip("llguidance")
    body = {"model": "skydraft", "input": QUESTION} | {"skydraft": {"grammar": "regex:(){0,1}"}}
    got = httpx.post(f"{served.v1}/responses", json=body).json()
    assert [item["content"][0]["text"] for item in got["output"]] == [""]
