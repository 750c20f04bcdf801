"""A call that was cut is none: an agent finds nothing to run, and all interfaces say the same, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest

from .running import PATIENCE_S, Running
from .test_structured import forced

PARIS: Any = {"type": "object", "properties": {"city": {"const": "Paris"}}, "required": ["city"]}
QUESTION: Any = [{"role": "user", "content": "语速"}]
TEXT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ARGUMENTS = '{"city": "Paris"}'


@dataclass(frozen=True)
class Told:
    """What a client has of one answer: text and calls in their order, each call with its arguments; and the end.

    A call is whole where the interface says that it is. `is_for_calls` is the end at which agents run the calls.
    """

    parts: tuple[str | tuple[str, str, bool], ...]
    is_for_calls: bool
    ending: Any

    @property
    def calls(self) -> list[tuple[str, str, bool]]:
        return [part for part in self.parts if not isinstance(part, str)]

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


def is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def of_chat(message: Mapping[str, Any], finish: str) -> Told:
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls") or ()]
    told = [(*each, is_object(each[1])) for each in calls]
    return Told(tuple([message["content"]] if message["content"] else []) + tuple(told), finish == "tool_calls", finish)


def of_chat_stream(chunks: Seq[Mapping[str, Any]]) -> Told:
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta, finish = choice["delta"], choice["finish_reason"]
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"]) and call["function"]["arguments"]
                    message["tool_calls"].append({"function": dict(call["function"])})
                else:
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return of_chat(message, finish)


def of_messages(content: Seq[Mapping[str, Any]], ending: Mapping[str, Any]) -> Told:
    parts: list[Any] = []
    for block in content:
        is_text = block["type"] == "text"
        parts.append(block["text"] if is_text else (block["name"], json.dumps(block["input"]), True))
    reason = ending["stop_reason"]
    return Told(tuple(parts), reason == "tool_use", (reason, ending["stop_sequence"]))


def of_messages_stream(events: Seq[Mapping[str, Any]]) -> Told:
    content: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append({**event["content_block"], "partial_json": ""})
        elif event["type"] == "content_block_delta":
            key = "text" if "text" in event["delta"] else "partial_json"
            content[event["index"]][key] += event["delta"][key]
        elif event["type"] == "content_block_stop" and (given := content[event["index"]]["partial_json"]):
            content[event["index"]]["input"] = json.loads(given)
    starts = [event["type"] for event in events if event["type"].startswith("content_block_st")]
    assert starts == ["content_block_start", "content_block_stop"] * len(content)
    return of_messages(content, events[-2]["delta"])


def of_response(response: Mapping[str, Any]) -> Told:
    parts: list[Any] = []
    for item in response["output"]:
        if item["type"] == "message":
            parts += [item["content"][0]["text"]] if item["content"][0]["text"] else []
        else:
            parts.append((item["name"], item["arguments"], item["status"] == "completed"))
    calls = [part for part in parts if not isinstance(part, str)]
    is_for_calls = response["status"] == "completed" and bool(calls) and calls[-1][2]
    return Told(tuple(parts), is_for_calls, (response["status"], (response["incomplete_details"] or {}).get("reason")))


def of_response_stream(events: Seq[Mapping[str, Any]]) -> Told:
    items: dict[int, Any] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            items[event["output_index"]] = {**event["item"], "written": ""}
        elif event["type"].endswith(".delta"):
            items[event["output_index"]]["written"] += event["delta"]
        elif event["type"] == "response.function_call_arguments.done":
            assert event["arguments"] == items[event["output_index"]]["written"] and is_object(event["arguments"])
            items[event["output_index"]]["is_done"] = True
        elif event["type"] == "response.output_item.done":
            before, item = items[event["output_index"]], event["item"]
            assert before["written"] == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
            assert (item["status"] == "completed") == before.get("is_done", item["status"] == "completed")
            items[event["output_index"]] = item
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert [items[at] for at in sorted(items)] == response["output"]
    return of_response(response)


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line for block in text.split("\n\n") for line in block.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


WHOLE = {
    "chat/completions": lambda body: of_chat(body["choices"][0]["message"], body["choices"][0]["finish_reason"]),
    "messages": lambda body: of_messages(body["content"], body),
    "responses": of_response,
}
STREAM = {
    "chat/completions": of_chat_stream, "messages": of_messages_stream, "responses": of_response_stream,
}  # fmt: skip
ENDS: dict[str, dict[str, Any]] = {  # of an answer with calls, of one that a stop string cut, and of one by length
    "chat/completions": {"calls": "tool_calls", "stop": "stop", "length": "length"},
    "messages": {"calls": ("tool_use", None), "length": ("max_tokens", None)},
    "responses": {
        "calls": ("completed", None), "stop": ("completed", None), "length": ("incomplete", "max_output_tokens"),
    },
}  # fmt: skip


def body_of(
    path: str, choice: str = "required", schema: Any = PARIS, stop: Seq[str] = (), most: int = 900, one: bool = False
) -> dict[str, Any]:
    """A request with one tool, as this interface writes it."""
    name, model = "get_weather", {"model": "skydraft-quality"}
    if path == "chat/completions":
        tool: Any = {"type": "function", "function": {"name": name, "parameters": schema}}
        named: Any = {"type": "function", "function": {"name": name}} if choice == "named" else choice
        body = {"messages": QUESTION, "max_tokens": most, "stop": list(stop)}
        return {**model, **body, "tools": [tool], "tool_choice": named, "parallel_tool_calls": not one}
    if path == "messages":
        kinds: Any = {"required": {"type": "any"}, "named": {"type": "tool", "name": name}, "auto": {"type": "auto"}}
        body = {"messages": QUESTION, "max_tokens": most, "tools": [{"name": name, "input_schema": schema}]}
        choices = kinds[choice] | {"disable_parallel_tool_use": one}
        return {**model, **body, "tool_choice": choices, "stop_sequences": list(stop)}
    tool, named = {"type": "function", "name": name, "parameters": schema}, {"type": "function", "name": name}
    body = {"input": QUESTION, "max_output_tokens": most, "stop": list(stop), "tools": [tool]}
    return {**model, **body, "tool_choice": named if choice == "named" else choice, "parallel_tool_calls": not one}


def ask(served: Running, path: str, body: dict[str, Any]) -> Told:
    """What comes whole, which is what comes as a stream."""
    replies = [
        httpx.post(f"{served.v1}/{path}", json=body | {"stream": stream}, timeout=PATIENCE_S)
        for stream in (False, True)
    ]
    assert all(reply.status_code == 200 for reply in replies), replies[0].text
    whole, streamed = WHOLE[path](replies[0].json()), STREAM[path](events_of(replies[1].text))
    assert whole == streamed
    return whole


@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize("stop", ["</tool_call>", "\n</tool_call>", "}\n<"])
def test_a_call_that_ends_with_the_stop_string_is_whole(served: Running, path: str, stop: str) -> None:
    for choice in ("required", "named"):
        told = ask(served, path, body_of(path, choice, stop=[stop], one=True))
        assert told == Told((("get_weather", ARGUMENTS, True),), True, ENDS[path]["calls"])
    options = body_of(path, "auto", stop=[stop.replace("}\n<", "\n<")], one=True) | forced(TEXT)
    assert ask(served, path, options) == Told((("get_weather", ARGUMENTS, True),), True, ENDS[path]["calls"])


@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize(("stop", "left"), [("}", '{"city": "Paris"'), ("Paris", '{"city": "'), ("{", ""), ("ar", "")])
def test_a_call_that_a_stop_string_cut_is_none(served: Running, path: str, stop: str, left: str) -> None:
    told = ask(served, path, body_of(path, stop=[stop], one=True))
    cut = (("get_weather", left, False),) if left and path != "messages" else ()
    ending = ENDS[path].get("stop", ("stop_sequence", stop))
    assert told == Told(cut, False, ending)


@pytest.mark.parametrize("path", WHOLE)
def test_the_length_cuts_no_call_into_another(served: Running, path: str) -> None:
    end = TEXT.index(ARGUMENTS) + len(ARGUMENTS)
    for most in (8, 30, TEXT.index("Paris"), end - 1, end, end + 1, end + 4, len(TEXT), len(TEXT) + 1):
        told = ask(served, path, body_of(path, most=most, one=True))
        if most >= end:
            assert told == Told((("get_weather", ARGUMENTS, True),), True, ENDS[path]["calls"])
            continue
        assert told.ending == ENDS[path]["length"] and not told.is_for_calls and not told.text
        assert all(ARGUMENTS.startswith(each) and not whole for _, each, whole in told.calls)


@pytest.mark.parametrize("path", ["messages", "responses"])
def test_text_and_calls_come_in_the_order_in_which_they_were_written(served: Running, path: str) -> None:
    text = f"好。\n{TEXT}\n{TEXT}\n晴。\n{TEXT}云"
    call = ("get_weather", ARGUMENTS, True)
    for most, parts in ((900, ("好。", call, call, "\n晴。", call, "云")), (5, ("好。\n<t",))):
        told = ask(served, path, body_of(path, "auto", most=most) | forced(text))
        assert told.parts == parts


@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize("mode", ["edge", "lossless", "cloud"])
def test_where_one_call_is_allowed_the_text_ends_with_it(served: Running, path: str, mode: str) -> None:
    for text in (
        f"好。\n{TEXT}\n{TEXT}\n云",
        f"好。\n{TEXT}云",
        json.dumps({"name": "get_weather", "arguments": {}}) * 2,
    ):
        body = body_of(path, "auto", one=True) | forced(text) | {"model": f"skydraft-{mode}"}
        told, usage = ask(served, path, body), httpx.post(f"{served.v1}/{path}", json=body).json()["usage"]
        assert told.is_for_calls and len(told.calls) == 1 and isinstance(told.parts[-1], tuple)
        num_tokens = usage["completion_tokens" if path == "chat/completions" else "output_tokens"]
        assert num_tokens == text.index("}}") + 2
    told = ask(served, path, body_of(path, "auto", one=True) | forced("好。云"))
    assert told.text == "好。云" and not told.calls


@pytest.mark.parametrize("stops", [["zz", "天", "Paris"], ["arr", "Paris", "Par"], ["<", "ris"]])
def test_the_stop_sequence_that_matched_is_named(served: Running, stops: list[str]) -> None:
    text = "London, Paris, Rome"
    at = {stop: text.find(stop) for stop in stops if stop in text}
    first = min(at, key=lambda stop: (at[stop], len(stop)))
    body = {"model": "skydraft-quality", "messages": QUESTION, "max_tokens": 99, "stop_sequences": stops}
    told = ask(served, "messages", body | forced(text))
    assert told == Told((text[: at[first]],), False, ("stop_sequence", first))
    assert ask(served, "messages", body | forced("Rome")).ending == ("end_turn", None)
