"""Tools that are not functions: what agents send beside theirs is left out and said, and never refuses a request."""

import json
from typing import Any

import httpx2 as httpx
import pytest

from .interfaces import COUNTS, ask, call_text, events_of, forced, plain
from .running import Running

pytest.importorskip("llguidance")
SPAWN = {
    "type": "function", "name": "spawn_agent", "description": "begin an agent", "strict": False,
    "parameters": {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]},
}  # fmt: skip
EXEC = {"type": "function", "name": "exec_command", "parameters": {"type": "object", "properties": {}}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [SPAWN, {**EXEC, "strict": True}]}
OTHERS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": True}, {"type": "what_comes_next"}, {"type": "local_shell"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "a"}},
    {"type": "mcp", "server_label": "x", "server_url": "https://x.example"},
]  # fmt: skip


def respond(served: Running, path: str = "responses", **body: Any) -> httpx.Response:
    return served.post(path, **{"model": "skydraft-lossless", "input": "语速", "max_output_tokens": 8} | body)


def num_tokens(served: Running, **body: Any) -> int:
    answer = respond(served, "responses/input_tokens", **body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["input_tokens"])


LEFT_OUT: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "responses": (OTHERS, EXEC),
    "chat/completions": ([{"type": "custom", "custom": {}}], {"type": "function", "function": {"name": "f"}}),
    "messages": (
        [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}],
        {"name": "f", "input_schema": {"type": "object"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", LEFT_OUT)
def test_tools_that_are_not_functions_are_left_out_and_said(served: Running, path: str) -> None:
    others, function = LEFT_OUT[path]

    def count(*tools: dict[str, Any]) -> int:
        return int(served.post(COUNTS[path], **plain(path, tools=tools)).json()["input_tokens"])

    assert count(*others, function) == count(function) and count(*others) == count()
    told = json.dumps(sorted(tool["type"] for tool in others), separators=(",", ":"))
    for stream in (False, True):
        answer = served.post(path, **plain(path, tools=[*others, function], stream=stream))
        assert answer.status_code == 200 and (path == "messages" or f'"left_out":{told}' in answer.text), answer.text
    assert "left_out" not in served.post(path, **plain(path, tools=[function])).text


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_a_namespace_are_called_by_their_own_names(served: Running, stream: bool) -> None:
    """Clients look a call up by namespace and name; the two joined are an unknown tool to them."""
    tools = [EXEC, AGENTS]
    for written, name, namespace in (
        ("spawn_agent", "spawn_agent", "agents"), ("exec_command", "exec_command", None),
        ("agents.exec_command", "exec_command", "agents"),
    ):  # fmt: skip
        script = forced(call_text(written, {"task": "a"}))
        answer = respond(served, tools=tools, max_output_tokens=300, stream=stream, **script)
        if stream:
            items = [event["item"] for event in events_of(answer.text) if "output_item" in event["type"]]
            assert len(items) == 2
        else:
            items = answer.json()["output"]
        called = ("function_call", name, namespace)
        assert {(item["type"], item["name"], item.get("namespace")) for item in items} == {called}


def test_a_call_of_a_namespace_goes_on_under_the_name_that_the_model_knows(served: Running) -> None:
    """The item comes back as it was sent, and is one prompt with the function of that name."""
    call = {"type": "function_call", "call_id": "1", "name": "exec_command", "arguments": "{}"}
    given = [{"role": "user", "content": "a"}, call | {"namespace": "agents"}, {"role": "user", "content": "b"}]
    flat = [given[0], call | {"name": "agents.exec_command"}, given[2]]
    assert num_tokens(served, input=given, tools=[EXEC, AGENTS]) == num_tokens(served, input=flat, tools=[EXEC, AGENTS])


# Kinds of calls, each with what a call is, its result, and the name, arguments and result as a function's.
CALLS: list[tuple[str, dict[str, Any], Any, str, str, str]] = [
    ("custom_tool_call", {"name": "patch", "input": "*** Begin"}, "Done!", "patch", "*** Begin", "Done!"),
    ("apply_patch_call", {"operation": {"path": "a"}}, "gone", "apply_patch", '{"path": "a"}', "gone"),
    ("shell_call", {"action": {"cmd": "ls"}}, [{"out": "a"}], "shell", '{"cmd": "ls"}', '[{"out": "a"}]'),
    ("mcp_call", {"name": "look", "arguments": "{}", "output": "seen"}, None, "look", "{}", "seen"),
    *(("function_call", {"name": "f", "arguments": "{}"}, result, "f", "{}", json.dumps(result))
      for result in (1, 1.5, True, {"a": 1}, [1])),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "call", "result", "name", "arguments", "text"), CALLS)
def test_other_calls(served: Running, kind: str, call: Any, result: Any, name: str, arguments: str, text: str) -> None:
    """Calls of other tools and their results are read as those of functions."""
    question, known = {"role": "user", "content": "语速"}, {"call_id": "c"}
    more = {"name": name, "arguments": arguments}
    its_own = [{"type": kind, **known, **call}, {"type": f"{kind}_output", **known, "output": result}]
    function = [{"type": "function_call", **known, **more}, {"type": "function_call_output", **known, "output": text}]
    its_own = its_own[: 1 if result is None else 2]
    assert num_tokens(served, input=[question, *its_own]) == num_tokens(served, input=[question, *function])


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
def test_allowed_tools_are_the_only_ones(served: Running, path: str) -> None:
    flat: Any = {name: {"type": "function", "name": name} for name in "fghx"}
    nested: Any = {name: {"type": "function", "function": {"name": name}} for name in "fghx"}

    def body(mode: str, *allowed: str, **more: Any) -> dict[str, Any]:
        by_name, is_chat = (flat, False) if path == "responses" else (nested, True)
        choice: Any = {"mode": mode, "tools": [*(by_name[name] for name in allowed), {"type": "web_search"}]}
        choice = {"type": "allowed_tools"} | ({"allowed_tools": choice} if is_chat else choice)
        tools = [by_name[name] for name in "fgh"]
        return plain(path, limit=400, model="skydraft-lossless", tools=tools, tool_choice=choice, **more)

    def calls(body: dict[str, Any]) -> list[str]:
        return [name for name, *_ in ask(served, path, body).calls]

    assert set(calls(body("required", "g", "h"))) <= {"g", "h"} != set()
    assert calls(body("auto", "g", **forced(call_text("g", {})))) == ["g"]
    assert calls(body("auto", "g", **forced(call_text("f", {})))) == []
    assert calls(body("auto")) == []
    for wrong in (body("auto", "x"), body("required")):
        answer = served.post(path, **wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice", answer.text


def test_a_function_in_the_shape_of_chats_is_taken(served: Running) -> None:
    """Many clients send chat completions' tools to `/v1/responses`."""
    function = {key: SPAWN[key] for key in SPAWN if key != "type"}
    assert num_tokens(served, tools=[{"type": "function", "function": function}]) == num_tokens(served, tools=[SPAWN])
