"""What `/v1/responses` has for itself: namespaces, items of other clients, events as the SDK knows them."""

import json
from typing import Any

import pydantic
import pytest

from .interfaces import QUESTION, call_text, events_of, forced, num_read, plain, tool_of
from .running import Running
from .test_openai_sdk import openai

pytest.importorskip("llguidance")
SPAWN = tool_of(
    "responses", "spawn_agent", {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]},
    description="begin an agent", strict=False,
)  # fmt: skip
EXEC = tool_of("responses", "exec_command", {"type": "object", "properties": {}})
AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [SPAWN, {**EXEC, "strict": True}]}


def count(served: Running, *items: Any, tools: Any = ()) -> int:
    return num_read(served, "responses", plain("responses", tools=tools) | {"input": [*QUESTION, *items]})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("written", "name", "namespace"), [
    ("agents.spawn_agent", "spawn_agent", "agents"), ("exec_command", "exec_command", None),
    ("agents.exec_command", "exec_command", "agents"),
])  # fmt: skip
def test_functions_of_a_namespace_are_called_by_both_names_and_come_back_so(
    served: Running, stream: bool, written: str, name: str, namespace: str | None
) -> None:
    """Clients look a call up by namespace and name; the two joined are an unknown tool to them."""
    script = forced(call_text(written, {"task": "a"}))
    answer = served.post("responses", **plain("responses", limit=300, tools=[EXEC, AGENTS], stream=stream, **script))
    events = events_of(answer.text) if stream else []
    items = [each["item"] for each in events if "output_item" in each["type"]] or answer.json()["output"]
    assert len(items) == 1 + stream
    called = ("function_call", name, namespace)
    assert {(item["type"], item["name"], item.get("namespace")) for item in items} == {called}
    call = {"type": "function_call", "call_id": "1", "arguments": "{}"}
    forms = ({"name": written}, {"name": name, "namespace": namespace})
    assert len({count(served, call | form, *QUESTION) for form in forms}) == 1


@pytest.mark.parametrize(("kind", "more"), [("custom_tool_call", {"input": "*** Begin"}), ("function_call", {})])
def test_calls_of_custom_tools_are_read_as_those_of_functions(served: Running, kind: str, more: Any) -> None:
    known = {"call_id": "c", "name": "patch"}
    calls = ({"type": kind, **known, **more}, {"type": "function_call", "arguments": more.get("input"), **known})
    results = [{"type": f"{call['type']}_output", "call_id": "c", "output": "好"} for call in calls]
    assert len({count(served, *each) for each in zip(calls, results, strict=True)}) == 1


def test_a_function_in_the_shape_of_chats_is_taken(served: Running) -> None:
    """Many clients send chat completions' tools to `/v1/responses`."""
    function = {key: SPAWN[key] for key in SPAWN if key != "type"}
    assert count(served, tools=[{"type": "function", "function": function}]) == count(served, tools=[SPAWN])


@pytest.mark.parametrize("options", [{}, {"tools": [EXEC], "tool_choice": "required", "max_output_tokens": 300}])
def test_responses_have_all_fields_that_the_sdk_requires(served: Running, options: dict[str, Any]) -> None:
    """The SDK itself checks no answer, and other clients do."""
    bodies = [plain("responses", stream=stream) | options for stream in (False, True)]
    whole, streamed = (served.post("responses", **body) for body in bodies)
    pydantic.TypeAdapter(openai.types.responses.Response).validate_json(whole.content)
    assert whole.json()["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    event = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
    assert len([event.validate_python(each) for each in events_of(streamed.text)]) > 8


def test_numbers_that_are_no_json_do_not_lose_an_answer(served: Running) -> None:
    """Python's clients write NaN, as the default of a parameter for example, and a response repeats its tools."""
    tool = {"type": "function", "name": "f", "parameters": {"properties": {"a": {"default": float("nan")}}}}
    for stream in (False, True):
        body = json.dumps(plain("responses", tools=[tool], metadata={"a": float("inf")}, stream=stream))
        answer = served.client.post(f"{served.v1}/responses", content=body)
        assert answer.status_code == 200 and "NaN" not in answer.text and "Infinity" not in answer.text


def test_the_first_events_hold_nothing_yet(served: Running) -> None:
    events = events_of(served.post("responses", **plain("responses", stream=True)).text)
    assert all(event["response"]["output"] == [] and event["response"]["usage"] is None for event in events[:2])
