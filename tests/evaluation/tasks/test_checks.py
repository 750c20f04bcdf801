"""What each check reads out of a text, and what it takes for right."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from skydraft.lab.tasks.checks import Check, Json, Number, OneOf

_CHECK: TypeAdapter[Any] = TypeAdapter(Check)
PATTERNS = {"speaker": {"male": "先生|男士", "female": "女士"}, "rate": {"fast": "快", "slow": "慢"}}
CAPTION = {"kind": "fields", "answer": {"speaker": "female", "rate": "slow"}, "patterns": PATTERNS}


def judge(check: dict[str, Any], text: str) -> tuple[float, str]:
    verdict = _CHECK.validate_python(check).judge(text)
    assert (verdict.score == 1) == (verdict.note == "")
    return verdict.score, verdict.answer


@pytest.mark.parametrize(("check", "text", "found"), [
    ({"kind": "exact", "answer": ["Rome", "Paris"]}, "Well.\n**Answer:** paris.\nBye", (1, "paris")),
    ({"kind": "exact", "answer": "Paris"}, "Paris is it", (0, "Paris is it")),
    ({"kind": "exact", "answer": "巴黎"}, "答案：“巴黎”。\n如果有误请告诉我。", (1, "巴黎")),
    ({"kind": "exact", "answer": "Paris"}, "**Paris**\n\nIt is the capital.", (1, "Paris")),
    ({"kind": "number", "answer": 0.5, "tolerance": 0.01}, "about .5 or 0.505", (1, "0.505")),
    ({"kind": "regex", "pattern": r"(\d{4})年", "answer": "1998"}, "在1998年", (1, "1998")),
    ({"kind": "regex", "pattern": "是"}, "没", (0, "")),
    ({"kind": "json", "answer": {"a": [1, "x"]}}, '```json\n{"a": [1.0, "x "]}\n```', (1, '{"a": [1.0, "x "]}')),
    ({"kind": "json", "answer": {"a": 1}}, '{"a": true}', (0, '{"a": true}')),
    ({"kind": "json", "answer": [1]}, "[1", (0, "")),
    ({"kind": "json", "answer": {"a": None}}, '{x} [1, {"a": null}', (1, '{"a": null}')),
    ({"kind": "call", "answer": {"name": "f", "arguments": {}}, "names": ["f"]}, '{"name": "f", "parameters": {}}',
     (1, '{"name": "f", "arguments": {}}')),
    ({"kind": "call", "answer": {"name": "f", "arguments": {}}, "names": ["f"]}, "f()", (0, "")),
    (CAPTION, "一位女士，说得慢，不快。", (1, '{"speaker": "female", "rate": "slow"}')),
    (CAPTION, "一位女士，说得快。", (0.5, '{"speaker": "female", "rate": "fast"}')),
    (CAPTION, "", (0, '{"speaker": null, "rate": null}')),
])  # fmt: skip
def test_an_answer_is_read_and_compared(check: dict[str, Any], text: str, found: tuple[float, str]) -> None:
    assert judge(check, text) == found


@pytest.mark.parametrize("check", [
    {"kind": "regex", "pattern": "("}, {"kind": "choice", "answer": "A", "choices": ["A"]},
    {"kind": "exact", "answer": "a", "more": 1},
    # those that no text, or any text, would pass
    {"kind": "number", "answer": "8"}, {"kind": "number", "answer": True}, {"kind": "number", "answer": float("nan")},
    {"kind": "number", "answer": 1, "tolerance": float("inf")}, {"kind": "choice", "answer": "b"},
    {"kind": "choice", "answer": "A", "choices": ["A", " "]}, {"kind": "choice", "answer": "A", "choices": ["A", "a"]},
    {"kind": "exact", "answer": ""}, {"kind": "exact", "answer": "?!"}, {"kind": "exact", "answer": []},
    {"kind": "exact", "answer": ["Paris", "。"]}, {"kind": "exact", "answer": 8}, {"kind": "regex", "pattern": ""},
    {"kind": "call", "answer": {"name": "f", "arguments": {}}, "names": ["g"]},
    {"kind": "call", "answer": {"name": "f"}, "names": ["f"]},
    {"kind": "call", "answer": {"name": "f", "arguments": "{}"}, "names": ["f"]},
    *({"kind": "fields", "answer": {"a": "x"}, "patterns": of} for of in ({}, {"a": {"y": "y"}}, {"a": {"x": "("}})),
])  # fmt: skip
def test_what_is_no_check_is_refused(check: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        _CHECK.validate_python(check)


@given(st.text(max_size=60))
def test_no_text_breaks_a_check(text: str) -> None:
    for check in (Number(kind="number", answer=1), OneOf(kind="choice", answer="A"), Json(kind="json", answer={})):
        assert 0 <= check.judge(text).score <= 1
