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
KINDS = {
    "text": {"type": "string"},
    "may": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "on": {"type": "boolean"}, "int": {"type": "integer"}, "one": {"enum": ["1", "2"]}, "opt": {"$ref": "#/$defs/x"},
    "maybe": {"oneOf": [{"type": ["integer", "null"]}]}, "null": {"type": "array", "nullable": True},
}  # fmt: skip
TOOLS = {"get_weather": None, "天气": {"properties": KINDS}}
Read = tuple[str, list[tuple[str, str]]]

# Texts with whatever could be taken for a call, a mark, or half of one.
words = st.sampled_from([
    "<tool_call>", "</tool_call>", "<tool", "}", "\n", "}\n</tool", "语速", '"', "{", " ", "<", "{}", "```", "json",
    "`", "\\", "<function=", "<function=天气>", "<parameter=a>", "<parameter=on>", "</parameter>", "</function>",
    '{"name": "天气', '{"name": "天气", "arguments": {', '"name"', "\n" * 70, " " * 260,
])  # fmt: skip
arguments = st.dictionaries(st.text(max_size=4) | words, st.text(max_size=6) | words | st.integers(), max_size=3)


def read(texts: Seq[str], *, certain: bool = False) -> Read:
    """Text and calls of what came in pieces."""
    reader = EnforcedReader() if certain else CallReader(TOOLS)
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


def function(name: str, **given: str) -> str:
    """A call as Qwen3-Coder writes it."""
    said = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    return f"<function={name}>\n{said}</function>"


TYPED = {"text": "5", "may": "6", "on": "True", "a": "[1]", "b": "x\n\n  y"}


@pytest.mark.parametrize(("text", "said", "found"), [
    (call_text("天气", {"a": 1}).removesuffix("\n</tool_call>"), "", ONE),
    (call_text("天气", {"a": "</tool_call>"}), "", ("天气", '{"a": "</tool_call>"}')),
    (call_text("天气", {}) + "\n好", "\n好", NO_ARGUMENTS),
    ("<tool_call>\nx</tool_call>\n" + call_text("天气", {}), "<tool_call>\nx</tool_call>", NO_ARGUMENTS),
    ('{"name": "天气", "parameters": {"a": 1}}', "", ONE),
    ('{"name": "天气", "arguments": "{\\"a\\": 1}"}', "", ONE),
    ('{"name": "天气"}', "", NO_ARGUMENTS),
    (f"好。\n\n<tool_call>\n{function('天气', a='1')}\n</tool_call>", "好。", ONE),
    (f"{function('天气', a='1')}\n</tool_call>好", "好", ONE),  # it often leaves the first mark out
    (function("天气", **TYPED), "", ("天气", json.dumps({**TYPED, "on": True, "a": [1]}))),
    # A bracket too many.
    (call_text("天气", {"a": 1}).replace("}}", "}}}\n}"), "", ONE),
    ('{"name": "天气", "arguments": {"a": 1}}}', "", ONE),
    ('```json\n{"name": "天气", "arguments": {"a": 1}}}\n```\n好', "\n好", ONE),
    # Bare breaks in strings, as small models write code.
    (call_text("天气", {"code": "a\nb\tc"}).replace("\\n", "\n"), "", ("天气", '{"code": "a\\nb\\tc"}')),
])  # fmt: skip
def test_a_call_in_another_form_is_one(text: str, said: str, found: tuple[str, str]) -> None:
    assert read([text]) == read(list(text)) == (said, [found])


END = "</parameter>"
FUNCTION = "<function=天气>\n"


@pytest.mark.parametrize(("written", "given"), [
    # An end of a parameter is missing.
    (f"<parameter=int>\n5\n<parameter=text>\nx\n{END}\n", {"int": 5, "text": "x"}),
    (f"<parameter=int>5<parameter=text>x{END}", {"int": 5, "text": "x"}),
    (f"<parameter=int>\n5\n{END}\n<parameter=text>\n x\n", {"int": 5, "text": " x"}),
    # Marks in a value.
    (f"<parameter=text>\na {END} b\n{END}\n", {"text": f"a {END} b"}),
    (f"<parameter=text>\na </function> b\n{END}\n<parameter=int>\n5\n{END}\n",
     {"text": "a </function> b", "int": 5}),
    (f"<parameter=text>\na <parameter=x> <parameter=text>\n{END}\n", {"text": "a <parameter=x> <parameter=text>"}),
    (f"<parameter=text>\na <tool_call>{FUNCTION}\n{END}\n", {"text": f"a <tool_call>{FUNCTION}"}),
    # Null and nothing.
    *((f"<parameter={key}>\n{said}\n{END}\n", {} if value is END else {key: value}) for key, said, value in (
        ("int", "", END), ("int", "null", END), ("int", "None", END), ("on", " ", END), ("maybe", "", None),
        ("maybe", "null", None), ("maybe", "None", None), ("maybe", "6", 6), ("null", "none", None),
        ("null", "[1]", [1]), ("text", "", ""), ("text", "null", "null"), ("text", "None", "None"), ("may", "", ""),
        ("may", "null", None), ("may", "None", None), ("one", "1", "1"), ("opt", "", ""), ("opt", "null", None),
    )),
])  # fmt: skip
@law(30)
@given(places=st.lists(st.integers(0, 999), max_size=8))
def test_wrongly_ended_parameters_have_schema_types(written: str, given: dict[str, Any], places: list[int]) -> None:
    text = f"好<tool_call>\n{FUNCTION}{written}</function>\n</tool_call>"
    expected = [("天气", json.dumps(given, ensure_ascii=False))]
    assert read(cut(text, places)) == ("好", expected)
    for length in range(len(text) - len("n>\n</tool_call>")):
        assert read([text[:length]]) == (text[:length], [])
    text = text.removesuffix("</function>\n</tool_call>") + "</tool_call>云"
    assert read([text]) == (("好云", expected) if written.rstrip().endswith(END) else (text, []))


@pytest.mark.parametrize("text", [
    '{"name": "get_weather", "arguments": {"city": "上海"}',  # cut
    '{"name": "get_weather", "arguments": [1]}',
    '{"name": "rm", "arguments": {}}', '{"name": {}, "arguments": {}}',
    '```json\n{"name": "天气", "description": "天气。", "parameters": {"type": "object", "properties": {}}}\n```',
    '{"name": "天气", "arguments": {"a": "\\ud800"}}',
    '{"name": "天气", "arguments": {"a": NaN}}',
    '说明：\n```json\n{"name": "天气", "arguments": {}}\n```',
    '```json\n{"city": "上海"}\n```\n```json\n{"name": "天气", "arguments": {}}\n```',
    call_text("rm", {"path": "/"}), function("rm", path="/"),  # no tool of ours
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
    calls = [{"id": "a", "function": {"name": "天气", "arguments": {}}}]
    results = [
        *given,
        Message("assistant", "", (("tool_calls", calls),)),
        Message("tool", "晴", (("tool_call_id", "a"),)),
    ]
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
