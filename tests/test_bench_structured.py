"""What the measurement of schemas and tools counts as well-formed and as right; each task can be done right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema")
checks: Any = pytest.importorskip("bench.structured_checks")
BENCH = Path(__file__).parent.parent / "bench"
CALL = {"name": "f", "arguments": {"a": 1}}


def lines(name: str) -> list[Any]:
    return [json.loads(line) for line in (BENCH / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        '好的：\n```json\n{"name": "f",\n "arguments": {"a": 1}}\n```\n这样。',
        '{"name": "f", "parameters": {"a": 1}}',
        '{"name": "g", "arguments": {}} {"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{f} {"name": "f", "arguments": {"a": 1}}',
    ],
)
def test_a_call_is_found_however_it_is_wrapped(text: str) -> None:
    assert checks.read_call(text, ["f"]) == CALL


@pytest.mark.parametrize("text", ["", "f(a=1)", '{"name": "f"}', '{"name": "g", "arguments": {}}', '{"name": "f"'])
def test_what_is_no_call_is_none(text: str) -> None:
    assert checks.read_call(text, ["f"]) is None


def test_an_answer_is_found_in_a_fence_and_strings_are_compared_without_spaces() -> None:
    assert checks.read_answer('```json\n{"a": "x y", "b": 2.0}\n```') == {"a": "x y", "b": 2}
    assert checks.is_right({"a": "x y", "b": [2.0]}, {"b": [2], "a": "xy"})
    for wrong in ({"a": 1}, {"a": True}, {"a": "1"}, {"a": [1]}, {"a": None}, {}, None):
        assert not checks.is_right(wrong, {"a": 0}) and not checks.is_right(wrong, {"a": 2})
    assert not checks.is_right({"a": True}, {"a": 1}) and not checks.is_right({"a": 1}, {"a": 1, "b": 2})


def test_a_text_that_does_not_fit_is_complained_of() -> None:
    schema = {"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}}}
    assert checks.complaint('{"at": "2026-03-01T09:00:00+08:00"}', schema) == ""
    assert checks.complaint('{"at": "2026-13-01T09:00:00Z"}', schema) and checks.complaint('{"at": 1}', schema)
    assert checks.complaint("39.9", {"multipleOf": 0.1}) == "" != checks.complaint("39.95", {"multipleOf": 0.1})
    assert checks.complaint('{"at": "2026', schema).startswith("no JSON")


def test_there_are_60_schemas_that_are_schemas() -> None:
    rows = lines("structured_schemas.jsonl")
    assert len(rows) == 60 and len({row["id"] for row in rows}) == 60
    for row in rows:
        jsonschema.Draft202012Validator.check_schema(row["schema"])


def test_there_are_30_questions_that_want_no_call() -> None:
    sets = {line["set"] for line in lines("structured_tools.jsonl")}
    rows = lines("structured_questions.jsonl")
    assert len({row["prompt"] for row in rows}) == 30 and {row["set"] for row in rows} == sets


def test_there_are_60_tasks_whose_answers_fit() -> None:
    sets = {line["set"]: {tool["name"]: tool for tool in line["tools"]} for line in lines("structured_tools.jsonl")}
    rows = lines("structured_tasks.jsonl")
    assert len(rows) == 60 and len({row["id"] for row in rows}) == 60 and sum("set" in row for row in rows) == 30
    for row in rows:
        if "set" in row:
            parameters = sets[row["set"]][row["answer"]["name"]]["parameters"]
            assert set(row["answer"]["arguments"]) == set(parameters["properties"])
            jsonschema.validate(row["answer"]["arguments"], parameters)
        else:
            jsonschema.validate(row["answer"], row["schema"])
