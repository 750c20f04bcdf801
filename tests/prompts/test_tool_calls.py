"""Calls of tools in a text: what comes out does not depend on how the text came, and nothing is lost."""

import itertools
import json
import time
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.errors import PromptError
from skydraft.prompts import tool_calls
from skydraft.prompts.messages import Message, conversation
from skydraft.prompts.tool_calls import CallReader, EnforcedReader, Piece
from tests.gateway.interfaces import call_text, is_object
from tests.toys import law

NAMES = ["get_weather", "天气"]
Read = tuple[str, list[tuple[str, str]]]

# Texts with whatever could be taken for a call, a mark, or half of one.
words = st.sampled_from([
    "<tool_call>", "</tool_call>", "<tool", "}", "\n", "}\n</tool", "语速", '"', "{", " ", "<", "{}", "```", "json",
    "`", "\\", '{"name": "天气', '{"name": "天气", "arguments": {', '"name"', "\n" * 70, " " * 260,
])  # fmt: skip
arguments = st.dictionaries(st.text(max_size=4) | words, st.text(max_size=6) | words | st.integers(), max_size=3)


def read(texts: Seq[str], *, certain: bool = False) -> Read:
    """Text and calls of what came in pieces."""
    reader = EnforcedReader() if certain else CallReader(NAMES)
    pieces = [piece for text in texts for piece in reader.push(text)] + reader.finish()
    said, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        if piece.kind == "text":
            said += piece.text
            continue
        if piece.name:
            calls.append((piece.name, ""))
        name, before = calls[-1]
        calls[-1] = name, before + piece.text
        assert piece.is_last == is_object(calls[-1][1])
    return said, calls


def cut(text: str, places: Seq[int]) -> list[str]:
    at = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(at)]


@law(150)
@given(st.lists(words | st.text(max_size=3), max_size=12).map("".join), st.lists(st.integers(0, 999), max_size=8),
       st.booleans())  # fmt: skip
def test_how_a_text_comes_changes_nothing_and_other_text_is_kept(text: str, places: list[int], certain: bool) -> None:
    whole = read([text], certain=certain)
    assert read(cut(text, places), certain=certain) == whole
    if not certain:
        assert whole == (text, []) or whole[1]


@law(200)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=4),
    st.sampled_from(["marks", "enforced", "", "```", "```json\n", "`", "one fence"]),
    st.sampled_from(["", "好的。", "I will look.\n\nNow:"]),
    st.sampled_from(["", "\n", " \n"]), st.sampled_from([None, 1, 2]),
    st.sampled_from(["", "\n说明。", "\n\n```py\n1\n```"]),
    st.lists(st.integers(0, 999), max_size=8),
)  # fmt: skip
def test_calls_are_found_in_marks_and_where_they_begin_an_answer_bare_and_in_fences(
    calls: list[tuple[str, Any]], form: str, said: str, space: str, indent: int | None, after: str, places: list[int]
) -> None:
    if form in ("marks", "enforced"):
        said = said if form == "marks" else ""
        text, expected = "\n".join([*([said] if said else []), *(call_text(*each) for each in calls)]), said
    else:
        fence, closing = ("```json\n", "\n```") if form == "one fence" else (form, space + "`" * form.count("`"))
        objects = [
            json.dumps({"name": name, "arguments": given}, ensure_ascii=False, indent=indent) for name, given in calls
        ]
        between = "\n" if form == "one fence" else f"{closing if form else ''}\n{fence}"
        text, expected = f"{space}{fence}{between.join(objects)}{closing if form else ''}{after}", after
    found_text, found = read(cut(text, places), certain=form == "enforced")
    assert found_text == expected and [(name, json.loads(each)) for name, each in found] == calls


NO_ARGUMENTS, ONE = ("天气", "{}"), ("天气", '{"a": 1}')


@pytest.mark.parametrize(("text", "said", "found"), [
    (call_text("天气", {"a": 1}).removesuffix("\n</tool_call>"), "", ONE),
    (call_text("天气", {"a": "</tool_call>"}), "", ("天气", '{"a": "</tool_call>"}')),
    (call_text("天气", {}) + "\n好", "\n好", NO_ARGUMENTS),
    ("<tool_call>\nx</tool_call>\n" + call_text("天气", {}), "<tool_call>\nx</tool_call>", NO_ARGUMENTS),
    ('{"name": "天气", "parameters": {"a": 1}}', "", ONE),
    ('{"name": "天气", "arguments": "{\\"a\\": 1}"}', "", ONE),
    ('{"name": "天气"}', "", NO_ARGUMENTS),
    # A bracket too many.
    (call_text("天气", {"a": 1}).replace("}}", "}}}\n}"), "", ONE),
    ('{"name": "天气", "arguments": {"a": 1}}}', "", ONE),
    ('```json\n{"name": "天气", "arguments": {"a": 1}}}\n```\n好', "\n好", ONE),
    # Bare breaks in strings, as small models write code.
    (call_text("天气", {"code": "a\nb\tc"}).replace("\\n", "\n"), "", ("天气", '{"code": "a\\nb\\tc"}')),
])  # fmt: skip
def test_a_call_in_another_form_is_one(text: str, said: str, found: tuple[str, str]) -> None:
    assert read([text]) == read(list(text)) == (said, [found])


@pytest.mark.parametrize("text", [
    '{"name": "get_weather", "arguments": {"city": "上海"}',  # cut
    '{"name": "get_weather", "arguments": [1]}',
    '{"name": "rm", "arguments": {}}', '{"name": {}, "arguments": {}}',
    '```json\n{"name": "天气", "description": "天气。", "parameters": {"type": "object", "properties": {}}}\n```',
    '{"name": "天气", "arguments": {"a": "\\ud800"}}',
    '{"name": "天气", "arguments": {"a": NaN}}',
    '说明：\n```json\n{"name": "天气", "arguments": {}}\n```',
    '```json\n{"city": "上海"}\n```\n```json\n{"name": "天气", "arguments": {}}\n```',
    call_text("rm", {"path": "/"}),  # no tool of ours
    "<tool_call>\n{'name': 'get_weather'}\n</tool_call>", '<tool_call>\n{"name": {}, "arguments": {}}\n</tool_call>',
    '说：<tool_call>\n{"name": "get_weather", "arguments": "上海"}\n</tool_call>',
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "上',
    "[" * 5000 + '{"name": "天气"',
    '{"name": "天气", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001,
])  # fmt: skip
def test_what_looks_like_a_call_and_is_none_is_unchanged(text: str) -> None:
    assert read([text]) == read(list(text)) == (text, [])


def test_a_system_prompt_says_that_no_tool_need_be_called() -> None:
    given = [Message("user", "一"), Message("assistant", "二"), Message("user", "三")]
    told = tool_calls.may_answer(given)
    assert told[0].role == "system" and "one of the functions" in told[0].content and told[1:] == given
    results = [*given, Message("assistant", "看"), Message("tool", "晴")]
    assert tool_calls.may_answer(told) == told and tool_calls.may_answer(results) == results
    assert tool_calls.may_answer([*results, Message("user", "四")])[0] == told[0]


@pytest.mark.parametrize("word", ["x</tool_call>\n", "<tool_call>", "\n", "{", '{"name": "气"', "```json\n", '"', "}"])
def test_a_model_that_repeats_itself_costs_no_time(word: str) -> None:
    """Each mark was tried again with each piece of text that came: a thousand took seconds of everybody's."""
    for begin in ("<tool_call>{", '{"name": "天气", "arguments": {', ""):
        text = begin + word * 8_000
        began = time.process_time()
        said, found = read([text[start : start + 4] for start in range(0, len(text), 4)])
        assert time.process_time() - began < 3 and (said == text or found)


def test_arguments_that_a_grammar_enforces_come_as_they_are_written_and_its_marks_are_never_text() -> None:
    text, reader = call_text("get_weather", {"city": "上海", "days": 3}), EnforcedReader()
    pieces = [(index, piece) for index, char in enumerate(text) for piece in reader.push(char)]
    assert len(pieces) > 15 and pieces[8][0] < text.index("上海") < pieces[15][0] < text.index("days") + 4
    assert pieces[0][1] == Piece("{", "call", "get_weather") and pieces[-1][1] == Piece("}", "call", is_last=True)
    for length in range(len(text)):
        said, calls = read([text[:length]], certain=True)
        assert said == "" and all(name == "get_weather" and text.find(given) > 0 for name, given in calls)
    answer = '"<tool_call>\\n 1"'
    assert read(list(answer), certain=True) == (answer, [])


def test_arguments_of_earlier_turns_are_objects_and_so_are_the_parameters_of_tools() -> None:
    half = '{"a": "\\ud800"}'
    cases = [('{"a": "上"}', {"a": "上"}), ({"a": 1}, {"a": 1}), ("[1", "[1"), (half, half), ("", {})]
    for before, expected in cases:
        call = {"id": "1", "function": {"name": "f", "arguments": before}}
        (told,) = conversation([{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert dict(told.more) == {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": expected}}]}
    for parameters in ({"type": "array"}, {"type": ["array", "null"]}, {"type": 1}):
        with pytest.raises(PromptError, match="'f' must be a schema of an object"):
            tool_calls.calling_grammar([{"name": "f", "parameters": parameters}], parallel=False)
