"""Parameters of tools: any schema of an object, as pydantic and zod write them, and tools that take none."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from .running import Running
from .test_structured import fitting, tool

pytest.importorskip("llguidance")
A1, B2 = ({"properties": {name: {"const": value}}, "required": [name]} for name, value in (("a", 1), ("b", 2)))
NAMED = {"$defs": {"A": {"type": "object", **A1}}}
TOPS: dict[str, Any] = {
    "a reference": {"$ref": "#/$defs/A", **NAMED}, "all of a reference": {"allOf": [{"$ref": "#/$defs/A"}], **NAMED},
    "a reference beside properties": {"$ref": "#/$defs/A", **B2, **NAMED},
    "any": {"anyOf": [A1, B2], "type": "object"},
    "any with null": {"anyOf": [{**A1, "type": "object"}, {"type": "null"}]},
    "any beside properties": {**A1, "type": "object", "anyOf": [{**B2}]}, "all": {"allOf": [A1, B2], "type": "object"},
    "one": {"oneOf": [{**each, "type": "object", "additionalProperties": False} for each in (A1, B2)]},
    "a constant": {"const": {"a": 1}}, "two": {"enum": [{"a": 1}, {"b": 2}]},
    "types": {**A1, "type": ["object", "null"]},
}  # fmt: skip


@pytest.mark.parametrize("case", TOPS)
def test_parameters_may_be_any_schema_of_an_object(served: Running, case: str) -> None:
    options = {"tools": [tool("f", parameters=TOPS[case])], "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = served.chat(**options, max_tokens=900).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    given = json.loads(call["function"]["arguments"])
    jsonschema.validate(given, TOPS[case])
    assert given and served.chat(**fitting(TOPS[case]), max_tokens=4).status_code == 200


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"type": ["object"], "properties": None}, {"type": None, "properties": {}}, {"required": None}],
)
def test_parameters_of_a_tool_that_takes_none(served: Running, parameters: Any) -> None:
    options = {"tools": [tool("f", parameters=parameters)], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = served.chat(**options, max_tokens=99).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == "{}"
