"""The interfaces of the gateway, so that one test asks all of them: how each writes a request and says an answer."""

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

import pydantic

from skydraft.gateway.answers import Answer
from skydraft.gateway.chats import ChatAnswer
from skydraft.gateway.completions import TextAnswer
from skydraft.gateway.messages import MessagesAnswer
from skydraft.gateway.responses import ResponsesAnswer

from .running import Running


class Voice(pydantic.BaseModel):
    speed: Literal["快", "慢"]
    pitch: int = pydantic.Field(ge=0, le=99)
    tags: list[Literal["轻", "重"]] = pydantic.Field(max_length=2)


def forced(text: str) -> dict[str, Any]:
    """What makes a model that knows no language write this text."""
    return {"skydraft": {"grammar": f"lark:start: {json.dumps(text)}"}}


def call_text(name: str, arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


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
    thought: str = ""

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
    parts, thought = [message["content"]] if message["content"] else [], message.get("reasoning_content", "")
    assert thought == message.get("reasoning", "")
    return Told((*parts, *told), finish == "tool_calls", finish, thought)


def of_chat_stream(chunks: Seq[Mapping[str, Any]]) -> Told:
    message: dict[str, Any] = {"content": "", "tool_calls": [], "reasoning_content": "", "reasoning": ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta, finish = choice["delta"], choice["finish_reason"]
            for name in ("content", "reasoning_content", "reasoning"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"]) and call["function"]["arguments"]
                    message["tool_calls"].append({"function": dict(call["function"])})
                else:
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return of_chat(message, finish)


def of_messages(content: Seq[Mapping[str, Any]], ending: Mapping[str, Any]) -> Told:
    parts, thought = list[Any](), ""
    for block in content:
        if block["type"] == "thinking":
            assert block["signature"]
            thought += block["thinking"]
        else:
            is_text = block["type"] == "text"
            parts.append(block["text"] if is_text else (block["name"], json.dumps(block["input"]), True))
    reason = ending["stop_reason"]
    return Told(tuple(parts), reason == "tool_use", (reason, ending["stop_sequence"]), thought)


def of_messages_stream(events: Seq[Mapping[str, Any]]) -> Told:
    content: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append({**event["content_block"], "partial_json": ""})
        elif event["type"] == "content_block_delta":
            (key,) = event["delta"].keys() - {"type"}
            content[event["index"]][key] += event["delta"][key]
        elif event["type"] == "content_block_stop" and (given := content[event["index"]]["partial_json"]):
            content[event["index"]]["input"] = json.loads(given)
    starts = [event["type"] for event in events if event["type"].startswith("content_block_st")]
    assert starts == ["content_block_start", "content_block_stop"] * len(content)
    return of_messages(content, events[-2]["delta"])


def of_response(response: Mapping[str, Any]) -> Told:
    parts, thought = list[Any](), ""
    for item in response["output"]:
        if item["type"] == "reasoning":
            thought += item["content"][0]["text"]
        elif item["type"] == "message":
            parts += [item["content"][0]["text"]] if item["content"][0]["text"] else []
        else:
            parts.append((item["name"], item["arguments"], item["status"] == "completed"))
    calls = [part for part in parts if not isinstance(part, str)]
    is_for_calls = response["status"] == "completed" and bool(calls) and calls[-1][2]
    ending = response["status"], (response["incomplete_details"] or {}).get("reason")
    return Told(tuple(parts), is_for_calls, ending, thought)


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


def of_text(choice: Mapping[str, Any]) -> Told:
    return Told((choice["text"],) if choice["text"] else (), False, choice["finish_reason"])


def of_text_stream(chunks: Seq[Mapping[str, Any]]) -> Told:
    choices = [chunk["choices"][0] for chunk in chunks]
    return of_text(choices[-1] | {"text": "".join(choice["text"] for choice in choices)})


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which has the name of its type, if it has one."""
    found = []
    for block in text.split("\n\n"):
        *name, data = block.split("\n")
        if data.startswith("data: {"):
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == ([f"event: {found[-1]['type']}"] if "type" in found[-1] else [])
            assert found[-1].get("sequence_number", len(found) - 1) == len(found) - 1
    return found


ALL_WHOLE = {
    "chat/completions": lambda body: of_chat(body["choices"][0]["message"], body["choices"][0]["finish_reason"]),
    "completions": lambda body: of_text(body["choices"][0]),
    "messages": lambda body: of_messages(body["content"], body),
    "responses": of_response,
}
STREAM = {
    "chat/completions": of_chat_stream, "completions": of_text_stream, "messages": of_messages_stream,
    "responses": of_response_stream,
}  # fmt: skip
COUNTS = {
    "chat/completions": "chat/completions/input_tokens", "messages": "messages/count_tokens",
    "responses": "responses/input_tokens",
}  # fmt: skip
KINDS: dict[str, type[Answer]] = {
    "chat/completions": ChatAnswer, "completions": TextAnswer, "messages": MessagesAnswer, "responses": ResponsesAnswer,
}  # fmt: skip
WHOLE = {path: read for path, read in ALL_WHOLE.items() if path != "completions"}  # those that have calls
ENDS: dict[str, dict[str, Any]] = {  # of an answer with calls, of one that a stop string cut, and of one by length
    "chat/completions": {"calls": "tool_calls", "stop": "stop", "length": "length", "filter": "content_filter"},
    "completions": {"length": "length", "filter": "content_filter"},
    "messages": {"calls": ("tool_use", None), "length": ("max_tokens", None), "filter": ("refusal", None)},
    "responses": {
        "calls": ("completed", None), "stop": ("completed", None), "length": ("incomplete", "max_output_tokens"),
        "filter": ("incomplete", "content_filter"),
    },
}  # fmt: skip


def tool_of(path: str, name: str = "get_weather", schema: Any = PARIS, **more: Any) -> dict[str, Any]:
    """A function as this interface lists it."""
    if path == "messages":
        return {"name": name, "input_schema": schema, **more}
    function = {"name": name, "parameters": schema, **more}
    return {"type": "function", **({"function": function} if path == "chat/completions" else function)}


def body_of(
    path: str, choice: str = "required", schema: Any = PARIS, stop: Seq[str] = (), most: int = 900, one: bool = False
) -> dict[str, Any]:
    """A request with one tool; `one` call is allowed, or several."""
    name, tools = {"name": "get_weather"}, [tool_of(path, schema=schema)]
    if path == "messages":
        kinds: Any = {"required": {"type": "any"}, "named": {"type": "tool", **name}, "auto": {"type": "auto"}}
        more = {"tool_choice": kinds[choice] | {"disable_parallel_tool_use": one}, "stop_sequences": list(stop)}
    else:
        named = {"type": "function", **({"function": name} if path == "chat/completions" else name)}
        more = {"tool_choice": named if choice == "named" else choice, "parallel_tool_calls": not one}
        more["stop"] = list(stop)
    return plain(path, limit=most, tools=tools, **more)


def plain(path: str, text: str = "语速", limit: int = 16, **more: Any) -> dict[str, Any]:
    """A request for an answer to a text, as this interface writes it."""
    messages = {"messages": [{"role": "user", "content": text}]}
    said: dict[str, Any] = {"responses": {"input": text}, "completions": {"prompt": text}}.get(path, messages)
    length = {"max_output_tokens" if path == "responses" else "max_tokens": limit}
    return {"model": "skydraft-lossless"} | length | said | more


def num_used(path: str, answer: Any) -> tuple[int, int]:
    """Tokens of the prompt and of the answer."""
    used = answer["usage"]
    if path in ("responses", "messages"):
        return used["input_tokens"] + used.get("cache_read_input_tokens", 0), used["output_tokens"]
    return used["prompt_tokens"], used["completion_tokens"]


def num_read(served: Running, path: str, body: dict[str, Any]) -> int:
    """Tokens of its prompt, which is not answered."""
    answer = served.post(COUNTS[path], **body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["input_tokens"])


def ask(served: Running, path: str, body: dict[str, Any]) -> Told:
    """What comes whole, which is what comes as a stream."""
    replies = [served.post(path, **body | {"stream": stream}) for stream in (False, True)]
    assert all(reply.status_code == 200 for reply in replies), replies[0].text
    whole, streamed = ALL_WHOLE[path](replies[0].json()), STREAM[path](events_of(replies[1].text))
    assert whole == streamed
    return whole
