"""Answers that follow a schema, and calls of tools, through OpenAI's own SDK.

What `/v1/responses` has for itself: namespaces, items of other clients, events as the SDK knows them.
"""

import json
from typing import Any

import jsonschema
import pydantic
import pytest

from skydraft.engines.toy import open_toy
from skydraft.errors import EngineBusy, MissingDependency
from skydraft.gateway.pair import Pair
from skydraft.gateway.refusals import refusal_of
from skydraft.prompts.chat_template import render
from skydraft.prompts.messages import conversation
from skydraft.prompts.tool_calls import may_answer

from .interfaces import PARIS, Voice, call_text, events_of, forced, num_read, plain, tool_of
from .interfaces import QUESTION as ASKED
from .interfaces import ask as of
from .running import Running, gateway, written_by
from .test_fields import fitting, must, tool
from .test_openai_sdk import openai

pytest.importorskip("llguidance")
WEATHER, TIME = tool("天气", description="the weather", parameters=PARIS), tool("time")
SPAWN = tool_of(
    "responses", "spawn_agent", {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]},
    description="begin an agent", strict=False,
)  # fmt: skip
EXEC = tool_of("responses", "exec_command", {"type": "object", "properties": {}})
AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [SPAWN, {**EXEC, "strict": True}]}
JSON = {"response_format": {"type": "json_object"}}


def count(served: Running, *items: Any, tools: Any = ()) -> int:
    return num_read(served, "responses", plain("responses", tools=tools) | {"input": [*ASKED, *items]})


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_sdk_parses_answers_into_pydantic_models_and_what_is_cut_says_so(
    client: openai.OpenAI, temperature: float
) -> None:
    def parsed(mode: str, most: int = 200) -> Any:
        options: Any = {"max_tokens": most, "temperature": temperature, "seed": 4, "extra_body": {"skydraft": {"k": 5}}}
        asked: Any = {"model": f"skydraft-{mode}", "messages": ASKED, "response_format": Voice}
        return client.chat.completions.parse(**asked, **options).choices[0]

    choices = {mode: parsed(mode) for mode in ("edge", "quality", "lossless", "cloud")}
    assert {(type(each.message.parsed), each.finish_reason) for each in choices.values()} == {(Voice, "stop")}
    assert choices["lossless"].message.content == choices["cloud"].message.content
    with pytest.raises(openai.LengthFinishReasonError):
        parsed("lossless", 3)


def test_a_json_object_may_have_a_schema(served: Running) -> None:
    kind, named = {"type": "json_object", "schema": PARIS}, {"type": "json_schema", "name": "x", "schema": PARIS}
    for path, more in (
        ("chat/completions", {"response_format": kind}), ("responses", {"text": {"format": kind}}),
        ("responses", {"text": {"format": named}}), ("messages", {"output_config": {"format": named}}),
    ):  # fmt: skip
        assert json.loads(of(served, path, plain(path, limit=60) | more).text) == {"city": "Paris"}


# What no grammar follows: tests/choosing/test_grammar.py has all of it.
LOOSE: Any = {
    "type": "object", "propertyNames": {"type": "string"},
    "properties": {"a": {"type": "array", "items": {"enum": [1]}, "uniqueItems": True}},
}  # fmt: skip


@pytest.mark.parametrize("more", [fitting(LOOSE), must(parameters=LOOSE)])
def test_what_no_grammar_follows_is_said_where_it_narrows_an_answer(served: Running, more: Any) -> None:
    assert served.chat(max_tokens=8, **more).json()["skydraft"]["left_out"] == ["uniqueItems"]


@pytest.mark.parametrize(("num", "status"), [(100, 200), (500, 400)])
def test_of_many_tools_the_grammar_counts_no_descriptions(num: int, status: int) -> None:
    props = {"q": {"type": "string", "description": "What to look for. " * 38}}
    tools = [tool(f"t{at}", parameters={"type": "object", "properties": props}) for at in range(num)]
    with gateway(Pair(open_toy("toy", 2**19))) as running:
        answer = running.chat(model="skydraft", max_tokens=1, tool_choice="required", tools=tools)
        assert (
            running.chat(model="skydraft", max_tokens=1, **fitting({**PARIS, "description": "d" * 70_000})).status_code
            == 200
        )
    assert answer.status_code == status, answer.text


def test_with_auto_and_a_schema_the_answer_is_a_call_or_fits(served: Running) -> None:
    kinds, body = set(), plain("chat/completions", limit=200, tools=[TIME], temperature=2.0, model="skydraft-edge")
    for seed in range(12):
        told = of(served, "chat/completions", body | fitting({"enum": ["快", "<慢"]}) | {"seed": seed})
        assert set(told.calls) == {("time", "{}", True)} or json.loads(told.text) in ("快", "<慢")
        kinds.add(bool(told.calls))
    assert kinds == {False, True}


def test_a_gateway_without_grammars_and_one_whose_models_are_taken_say_so() -> None:
    error = MissingDependency("A grammar needs llguidance, which is not installed.", hint="Run: pip install …")
    refusal = refusal_of(error)
    assert (refusal.status, refusal.message) == (501, f"This server lacks a part: {error.message}")
    refusal = refusal_of(EngineBusy("All sequences are in use."))
    assert (refusal.status, refusal.code, "Retry-After" in refusal.headers) == (503, "busy", True)


def test_tools_calls_and_results_reach_the_template_with_all_their_keys() -> None:
    parameters = {"properties": {"z": {"type": "string"}, "a": {}}, "type": "object"}
    function = {"name": "f", "description": "d", "parameters": parameters, "strict": True, "$x": 1}
    told, call = {"type": "function", "function": function}, {"name": "f", "arguments": {"z": "慢"}}
    turns: Any = [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "1", "function": call}]},
        {"role": "tool", "content": "9度", "tool_call_id": "1"},
    ]
    for shown, want in (("tools", [told]), ("messages[1:]", turns)):
        with written_by(f"{{{{ raise_exception({shown} | tojson) }}}}{{# tools <tool_call> #}}") as running:  # an error
            options: Any = {"tools": [{**told, "cache_control": {}}], "tool_choice": "required"}
            answer = running.chat([*ASKED, *turns], **options)
            assert json.dumps(want, ensure_ascii=False) in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("body", [{}, {"tool_choice": "required"}, {"tool_choice": "none"}, JSON])
def test_where_a_call_is_free_the_system_prompt_says_so(served: Running, body: Any) -> None:
    vocab, messages = open_toy("toy").vocab, conversation(ASKED)
    tools = [] if body.get("tool_choice") == "none" else [WEATHER]
    rendered = render(vocab, messages if body else may_answer(messages), tools)
    answer = served.chat(tools=[WEATHER], max_tokens=4, **body).json()
    assert answer["usage"]["prompt_tokens"] == len(vocab.encode(rendered))


NO_CHECK: list[Any] = [{"tool_choice": "none"}, {"model": "skydraft-edge", "skydraft": {}}]


@pytest.mark.parametrize("body", [{}, *NO_CHECK, {"skydraft": {"gate": "entropy:7", "hand_back": 0}}])
def test_the_target_checks_whether_an_answer_begins_as_a_call(served: Running, body: Any) -> None:
    options = {"model": "skydraft-fluency", "skydraft": {"hand_back": 0}, "max_tokens": 4} | body
    answer = served.chat(tools=[WEATHER], **options).json()
    assert (answer["skydraft"]["stats"]["num_escalated"] > 0) == (not body)


def test_a_template_that_calls_no_tools_refuses_them() -> None:
    with written_by("{% for m in messages %}{{ m['content'] }}{% endfor %}") as running:
        reply = running.chat(tools=[TIME])
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools"
        assert running.chat(tools=[TIME], tool_choice="none").status_code == 200


A1, B2 = ({"properties": {name: {"const": value}}, "required": [name]} for name, value in (("a", 1), ("b", 2)))
NAMED = {"$defs": {"A": {"type": "object", **A1}}}
TOPS: dict[str, Any] = {
    "a reference": {"$ref": "#/$defs/A", **NAMED}, "all of a reference": {"allOf": [{"$ref": "#/$defs/A"}], **NAMED},
    "a reference beside properties": {"$ref": "#/$defs/A", **B2, **NAMED},
    "any": {"anyOf": [A1, B2], "type": "object"},
    "any with null": {"anyOf": [{**A1, "type": "object"}, {"type": "null"}]},
    "all": {"allOf": [A1, B2], "type": "object"},
    "one": {"oneOf": [{**each, "type": "object", "additionalProperties": False} for each in (A1, B2)]},
    "a constant": {"const": {"a": 1}}, "two": {"enum": [{"a": 1}, {"b": 2}]},
    "types": {**A1, "type": ["object", "null"]},
}  # fmt: skip


@pytest.mark.parametrize("case", TOPS)
def test_parameters_may_be_any_schema_of_an_object(served: Running, case: str) -> None:
    options = {**must(parameters=TOPS[case]), "parallel_tool_calls": False, "model": "skydraft-fluency"}
    (choice,) = served.chat(**options, max_tokens=900).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    given = json.loads(call["function"]["arguments"])
    jsonschema.validate(given, TOPS[case])
    assert given and served.chat(**fitting(TOPS[case]), max_tokens=4).status_code == 200


@pytest.mark.parametrize("parameters", [
    None, {}, {"type": ["object"], "properties": None}, {"type": None, "properties": {}}, {"required": None},
])  # fmt: skip
def test_parameters_of_a_tool_that_takes_none(served: Running, parameters: Any) -> None:
    options = {**must(parameters=parameters), "parallel_tool_calls": False}
    (call,) = served.chat(**options, max_tokens=99).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == "{}"


def test_a_call_as_qwen3_coder_writes_it_has_the_types_of_its_schema(served: Running) -> None:
    said = "<tool_call>\n<function=f>\n<parameter=city>\n5\n</parameter>\n</function>\n</tool_call>"
    tools = [tool("f", parameters={"properties": {"city": {"type": "string"}}})]
    told = of(served, "chat/completions", plain("chat/completions", limit=400, tools=tools, **forced(said)))
    assert told.parts == (("f", '{"city": "5"}', True),)


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
    assert len({count(served, call | form, *ASKED) for form in forms}) == 1


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
