"""Answers that follow a schema, and calls of tools, through OpenAI's own SDK."""

import json
from typing import Any

import jsonschema
import pytest

from skydraft.engines.toy import open_toy
from skydraft.errors import EngineBusy, MissingDependency
from skydraft.gateway.pair import Pair
from skydraft.gateway.refusals import refusal_of
from skydraft.prompts.chat_template import render
from skydraft.prompts.messages import conversation
from skydraft.prompts.tool_calls import may_answer

from .interfaces import PARIS, Voice, forced, plain
from .interfaces import QUESTION as ASKED
from .interfaces import ask as of
from .running import Running, gateway, written_by
from .test_fields import fitting, must, tool
from .test_openai_sdk import openai

pytest.importorskip("llguidance")
ENOUGH = 200
CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["上海", "北京"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
WEATHER: Any = {"type": "function", "function": {"name": "天气", "description": "the weather", "parameters": CITY}}
TIME: Any = {"type": "function", "function": {"name": "time"}}
SCHEMA_OF = {"天气": CITY, "time": {"type": "object", "additionalProperties": False}}


def ask(client: openai.OpenAI, mode: str = "edge", **options: Any) -> Any:
    asked: dict[str, Any] = {"model": f"skydraft-{mode}", "messages": ASKED, "max_tokens": ENOUGH} | options
    return client.chat.completions.create(**asked)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_sdk_parses_answers_into_pydantic_models(client: openai.OpenAI, temperature: float) -> None:
    texts = {}
    for mode in ("edge", "quality", "lossless", "cloud"):
        answer = client.chat.completions.parse(
            model=f"skydraft-{mode}", messages=ASKED, response_format=Voice, max_tokens=ENOUGH, temperature=temperature,
            seed=4, extra_body={"skydraft": {"k": 5}},
        )  # fmt: skip
        assert isinstance(answer.choices[0].message.parsed, Voice)
        assert answer.choices[0].finish_reason == "stop"
        texts[mode] = answer.choices[0].message.content
    assert texts["lossless"] == texts["cloud"]


def test_what_is_cut_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="skydraft", messages=ASKED, response_format=Voice, max_tokens=3)


def test_a_json_object_may_have_a_schema(served: Running) -> None:
    kind, named = {"type": "json_object", "schema": PARIS}, {"type": "json_schema", "name": "x", "schema": PARIS}
    for path, more in (
        ("chat/completions", {"response_format": kind}), ("responses", {"text": {"format": kind}}),
        ("responses", {"text": {"format": named}}), ("messages", {"output_config": {"format": named}}),
    ):  # fmt: skip
        assert json.loads(of(served, path, plain(path, limit=60) | more).text) == {"city": "Paris"}


MAIL: Any = {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)[a-z]+@[a-z]+$"}
ABOUT = {"description": "d" * 70_000, "title": "t" * 70_000, "examples": ["e" * 70_000], "default": "e" * 70_000}
# What no grammar follows: of these, what only narrows an answer is said.
LOOSE: Any = {
    "type": "object", "propertyNames": {"type": "string"}, "unevaluatedProperties": False, "required": ["to"],
    "properties": {"to": MAIL, "a": {"type": "array", "items": {"enum": [1]}, "uniqueItems": True}},
}  # fmt: skip


@pytest.mark.parametrize("more", [fitting(LOOSE), must(parameters=LOOSE)])
def test_what_no_grammar_follows_is_said(served: Running, more: Any) -> None:
    assert served.chat(max_tokens=8, **more).json()["skydraft"]["left_out"] == ["pattern", "uniqueItems"]


@pytest.mark.parametrize(("num", "status"), [(100, 200), (500, 400)])
def test_of_many_tools_the_grammar_counts_no_descriptions(num: int, status: int) -> None:
    props = {"q": {"type": "string", "description": "What to look for. " * 38}}
    tools = [tool(f"t{at}", parameters={"type": "object", "properties": props}) for at in range(num)]
    with gateway(Pair(open_toy("toy", 2**19))) as running:
        answer = running.chat(model="skydraft", max_tokens=1, tool_choice="required", tools=tools)
        assert running.chat(model="skydraft", max_tokens=1, **fitting({**PARIS, **ABOUT})).status_code == 200
    assert answer.status_code == status, answer.text


def check_calls(calls: Any) -> None:
    assert 1 <= len(calls) <= 8 and len({call.id for call in calls}) == len(calls)
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA_OF[call.function.name])


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_of_calls_is_the_same_answer(client: openai.OpenAI, seed: int) -> None:
    options: dict[str, Any] = {
        "model": "skydraft-lossless", "messages": ASKED, "tools": [WEATHER, TIME], "tool_choice": "required",
        "max_tokens": 900, "temperature": 1.0, "seed": seed,
    }  # fmt: skip
    whole = client.chat.completions.create(**options).choices[0].message.tool_calls
    with client.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls" and not streamed.message.content
    told = [[(c.function.name, c.function.arguments) for c in calls] for calls in (streamed.message.tool_calls, whole)]
    assert told[0] == told[1] and kinds.count("tool_calls.function.arguments.done") == len(whole) > 0


def test_with_auto_and_a_schema_the_answer_is_a_call_or_fits(client: openai.OpenAI) -> None:
    kinds = set()
    for seed in range(12):
        options = fitting({"enum": ["快", "<慢"]})
        message = ask(client, tools=[TIME], temperature=2.0, seed=seed, **options).choices[0].message
        if message.tool_calls:
            check_calls(message.tool_calls)
        else:
            assert json.loads(message.content or "") in ("快", "<慢")
        kinds.add(bool(message.tool_calls))
    assert kinds == {False, True}


def test_a_loop_of_three_turns_renders_calls_and_results_as_the_template_does(client: openai.OpenAI) -> None:
    messages: list[Any] = list(ASKED)
    template, tools = open_toy("toy").vocab, {"tools": [WEATHER, TIME], "tool_choice": "required"}
    for turn in range(3):
        answer = ask(client, "lossless", **tools, messages=messages, seed=turn, temperature=1.0, max_tokens=900)
        rendered = render(template, conversation(messages), [WEATHER, TIME])
        assert answer.usage and answer.usage.prompt_tokens == len(template.encode(rendered))
        message = answer.choices[0].message
        check_calls(message.tool_calls)
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "9度"} for call in message.tool_calls]
    last = ask(client, "lossless", messages=messages, tools=[WEATHER, TIME], tool_choice="none", max_tokens=12)
    assert last.choices[0].message.content and not last.choices[0].message.tool_calls


def test_a_gateway_without_grammars_and_one_whose_models_are_taken_say_so() -> None:
    error = MissingDependency("A grammar needs llguidance, which is not installed.", hint="Run: pip install …")
    refusal = refusal_of(error)
    assert (refusal.status, refusal.message) == (501, f"This server lacks a part: {error.message}")
    refusal = refusal_of(EngineBusy("All sequences are in use."))
    assert (refusal.status, refusal.code, "Retry-After" in refusal.headers) == (503, "busy", True)


def test_tools_reach_the_template_with_all_their_keys() -> None:
    parameters = {"properties": {"z": {"type": "string"}, "a": {}}, "type": "object"}
    function = {"name": "f", "description": "d", "parameters": parameters, "strict": True, "$x": 1}
    told = {"type": "function", "function": function}
    with written_by("{{ raise_exception(tools | tojson) }}{# <tool_call> #}") as running:  # an error
        answer = running.chat(tools=[{**told, "cache_control": {}}], max_tokens=1)
    assert json.dumps([told]) in answer.json()["error"]["message"], answer.text


JSON = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize("body", [{}, {"tool_choice": "required"}, {"tool_choice": "none"}, JSON])
def test_where_a_call_is_free_the_system_prompt_says_so(client: openai.OpenAI, body: Any) -> None:
    template = open_toy("toy").vocab
    messages = conversation(ASKED)
    tools = [] if body.get("tool_choice") == "none" else [WEATHER]
    rendered = render(template, messages if body else may_answer(messages), tools)
    answer = ask(client, "lossless", messages=ASKED, tools=[WEATHER], max_tokens=4, **body)
    assert answer.usage and answer.usage.prompt_tokens == len(template.encode(rendered))


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
