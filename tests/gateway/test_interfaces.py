"""What all interfaces of the gateway answer, whole and streamed; and what each of them has for itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import httpx2 as httpx
import pydantic
import pytest

import skydraft
from skydraft.engines.toy import open_toy
from skydraft.engines.vocab import Vocab
from skydraft.gateway.desk import Desk
from skydraft.gateway.messages import MessagesRequest
from skydraft.gateway.pair import Pair
from tests.hostile.texts import DRAFT, TARGET
from tests.hostile.texts import TEXT as HOSTED_TEXT
from tests.stock.fakes import GENERATING, Fake, fake
from tests.stock.test_endings import FILTERS, REFUSED

from ..later import later
from .interfaces import ALL_WHOLE, ENDS, Voice, ask, events_of, plain, post
from .running import PATIENCE_S, Running, gateway
from .test_openai_sdk import expected

openai = later("openai")

QUESTION = "语速"
PARAMETERS: Any = {"type": "object", "properties": {"city": {"enum": ["上海", "北京"]}}, "required": ["city"]}
FUNCTION: Any = {"name": "天气", "description": "the weather of a city", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", **FUNCTION}
MESSAGES_TOOL: Any = {"name": "天气", "description": "the weather of a city", "input_schema": PARAMETERS}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}


def num_used(path: str, answer: Any) -> tuple[int, int]:
    """Tokens of the prompt and of the answer."""
    used = answer["usage"]
    if path in ("responses", "messages"):
        return used["input_tokens"] + used.get("cache_read_input_tokens", 0), used["output_tokens"]
    return used["prompt_tokens"], used["completion_tokens"]


@pytest.mark.parametrize("path", ALL_WHOLE)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_is_that_of_the_python_interface(served: Running, path: str, temperature: float) -> None:
    body = plain(path, limit=24, temperature=temperature, seed=5)
    want = expected("lossless", max_new_tokens=24, temperature=temperature, seed=5)  # the toy's template is bare text
    told = ask(served, path, body)
    assert told.parts == (want.text,) and told.ending == ENDS[path]["length"]
    assert num_used(path, post(served, path, **body).json()) == (want.num_prompt_tokens, 24)


@pytest.fixture(scope="module")
def hosted() -> Iterator[dict[str, tuple[Running, Fake]]]:
    """A gateway over a hosted model that takes chats, and one for bare texts, which a chat server is not given."""
    with ExitStack() as stack:
        served: dict[str, tuple[Running, Fake]] = {}
        for kind, api in (("vllm", "chat"), ("completions", "completions")):
            server = stack.enter_context(fake(kind, TARGET))
            how: Any = {"api": api, "model": "toy", "timeout_s": 20}
            cloud = stack.enter_context(closing(skydraft.connect(server.url, **how)))
            served[api] = stack.enter_context(gateway(Pair(DRAFT, cloud))), server
            path = "messages" if api == "chat" else api  # so that all is known of it
            post(served[api][0], path, **plain(path, HOSTED_TEXT, model="skydraft-cloud"))
        yield served


@pytest.mark.parametrize("path", ALL_WHOLE)
@pytest.mark.parametrize("model", ["skydraft-cloud", "skydraft-lossless"])
@pytest.mark.parametrize("has_text", [True, False])
def test_a_text_that_a_filter_ended_says_so(
    hosted: dict[str, tuple[Running, Fake]], path: str, model: str, has_text: bool
) -> None:
    running, server = hosted["completions" if path == "completions" else "chat"]
    fault = FILTERS["Zhipu: sensitive"] if has_text else REFUSED["Azure"]
    server.fault_of = lambda path: fault if path in GENERATING else None
    try:
        told = ask(running, path, plain(path, HOSTED_TEXT, 40, model=model, temperature=0))
    finally:
        server.fault_of = lambda path: None
    assert told.ending == ENDS[path]["filter"] and bool(told.text) == has_text and not told.is_for_calls


@pytest.mark.parametrize("path", ALL_WHOLE)
def test_a_stream_that_breaks_ends_with_an_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("the model is on fire")

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


RESPONSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
MESSAGES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
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
        {"tools": [MESSAGES_TOOL], "messages": [
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


@pytest.mark.parametrize(
    ("path", "case"), [("responses", case) for case in RESPONSES] + [("messages", case) for case in MESSAGES]
)
def test_a_request_means_the_same_as_a_chat(served: Running, path: str, case: str) -> None:
    if path == "responses":
        ours, chat = RESPONSES[case]
    else:
        ours, messages = MESSAGES[case]
        chat = {"messages": messages} | ({"tools": [CHAT_TOOL]} if "tools" in ours else {})
    body = plain(path) | ours
    got, want = post(served, path, **body).json(), served.chat(model="skydraft-lossless", **chat).json()
    assert ALL_WHOLE[path](got).text == want["choices"][0]["message"]["content"]
    counted = post(served, f"{path}/{'input' if path == 'responses' else 'count'}_tokens", **body).json()
    assert num_used(path, got)[0] == want["usage"]["prompt_tokens"] == counted["input_tokens"]


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
            (block,) = post(running, "messages", **plain("messages") | body).json()["content"]
            events = events_of(post(running, "messages", **plain("messages", stream=True) | body).text)
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
        assert text(messages=[turns[0], {"role": "assistant", "content": [use]}], tools=[MESSAGES_TOOL])


def test_a_system_message_is_read_where_the_template_takes_only_a_first_one() -> None:
    strict = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}"
    turns = [("user", "快"), ("assistant", "高"), ("system", "轻"), ("user", "重"), ("system", "清")]
    said: Any = [{"role": role, "content": text} for role, text in turns]
    codex: Any = [{"role": "developer", "content": "轻"}, {"role": "user", "content": "重"}]
    with written_by("{% for m in messages %}" + strict + "{{ m.content }}{% endfor %}") as (running, vocab):
        reply = post(running, "messages", max_tokens=16, messages=said, system="慢").json()
        assert reply["usage"]["input_tokens"] == len(vocab.encode("慢快高轻\n\n清\n\n重"))
        chat = running.chat(said, model="skydraft-lossless").json()
        assert chat["usage"]["prompt_tokens"] == len(vocab.encode("快高轻\n\n重\n\n清"))
        answer = post(running, "responses", instructions="慢", input=codex, max_output_tokens=16).json()
        assert answer["usage"]["input_tokens"] == len(vocab.encode("慢\n\n轻重"))


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 300}])
def test_responses_have_all_fields_that_the_sdk_requires(served: Running, options: dict[str, Any]) -> None:
    """The SDK itself checks no answer, and other clients do."""
    whole, streamed = (
        post(served, "responses", **plain("responses", stream=stream) | options) for stream in (False, True)
    )
    pydantic.TypeAdapter(openai.types.responses.Response).validate_json(whole.content)
    assert whole.json()["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    event = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
    assert len([event.validate_python(each) for each in events_of(streamed.text)]) > 8


def test_the_events_of_a_text_come_in_their_order(served: Running) -> None:
    events = events_of(post(served, "responses", **plain("responses", stream=True)).text)
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = ["output_text.delta"] * names.count("output_text.delta")
    assert len(deltas) > 1 and names == [
        "created", "in_progress", "output_item.added", "content_part.added", *deltas, "output_text.done",
        "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert all(event["response"]["output"] == [] and event["response"]["usage"] is None for event in events[:2])
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1
    first, start, *_, stop, delta, last = events_of(post(served, "messages", **plain("messages", stream=True)).text)
    assert first["message"]["content"] == [] and first["message"]["usage"]["input_tokens"] == 2
    assert start == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert stop == {"type": "content_block_stop", "index": 0} and last == {"type": "message_stop"}
    assert delta["usage"]["output_tokens"] == 16


def test_the_sdk_parses_a_response_into_a_pydantic_model(client: openai.OpenAI) -> None:
    got = client.responses.parse(model="skydraft", input=QUESTION, text_format=Voice, max_output_tokens=200)
    assert isinstance(got.output_parsed, Voice) and got.status == "completed" and got.store is False


def test_log_probabilities_of_a_response_stand_beside_its_text(served: Running) -> None:
    more: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = post(served, "responses", **plain("responses", **more)).json()["output"][0]["content"][0]
    assert "".join(token["token"] for token in part["logprobs"]) == part["text"]
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in part["logprobs"])
    events = events_of(post(served, "responses", **plain("responses", stream=True, **more)).text)
    assert [each for event in events if event["type"].endswith("text.delta") for each in event["logprobs"]] == part[
        "logprobs"
    ]


def test_a_response_without_text_has_an_empty_message(served: Running) -> None:
    got = post(served, "responses", **plain("responses", skydraft={"grammar": "regex:(){0,1}"})).json()
    assert [item["content"][0]["text"] for item in got["output"]] == [""]


def test_errors_of_messages_have_anthropics_shape(served: Running) -> None:
    for more, status, kind in (
        ({"model": "claude"}, 404, "not_found_error"), ({"temperature": 3}, 400, "invalid_request_error"),
    ):  # fmt: skip
        reply = post(served, "messages", **plain("messages") | more)
        assert reply.status_code == status and reply.json()["type"] == "error"
        assert reply.json()["error"]["type"] == kind and "\n" not in reply.json()["error"]["message"]


def test_fields_that_are_null_are_as_if_they_were_left_out() -> None:
    def fields(result: Any, choice: Any) -> Any:
        use = {"type": "tool_use", "id": "1", "name": "天气", "input": {}}
        told = {"type": "tool_result", "tool_use_id": "1"} | result
        messages = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [told]}]
        body = {
            "model": "skydraft",
            "messages": messages,
            "tools": [MESSAGES_TOOL],
            "tool_choice": {"type": "auto"} | choice,
        }
        return MessagesRequest.model_validate(body).chat_fields()

    assert fields({"content": None}, {"disable_parallel_tool_use": None}) == fields({}, {})
