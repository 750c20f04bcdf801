"""What each check reads out of a text, and what it takes for right. Answers are read from the last line that says
"Answer:"; without one the last number, or a whole line, counts.
"""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from skydraft.lab.tasks.checks import Check, Exact, Json, Number, OneOf

_CHECK: TypeAdapter[Any] = TypeAdapter(Check)
PATTERNS = {"speaker": {"male": "先生|男士", "female": "女士"}, "rate": {"fast": "快", "slow": "慢"}}
CAPTION = {"kind": "fields", "answer": {"speaker": "female", "rate": "slow"}, "patterns": PATTERNS}
NUMBERS = {
    "42": ["3 * 14 = 42\nAnswer: 42\n\nLet me know if you have 2 questions more.", "**Final Answer**: $42$",
           "- 答案：**42**岁\n希望这3步有帮助。", "Answer: 41\nWait, I forgot one.\nAnswer: 42", "Answer: 42\nAnswer:",
           "Answer: 3 + 39 = 42", "<think>Answer: 5? No.</think>\nIt is 42.",
           "6×7＝42，所以共４２个。", "The area is 42 m²."],  # without the line
    "": ["Answer: none\nof 3", "<think>The answer might be 42, let me", "seven"],
    "3": ["Answer: I do not know any of the 3.", "8-3"], "-5": ["Answer: -5", "Answer: −5"], ".5": ["Answer: .5"],
    "694": ["So she pays $694 in total."], "1234.50": ["Answer: $1,234.50"], "25": ["Answer: 25%"],
}  # fmt: skip
CHOICES = {
    "B": ["A is too small.\nAnswer: B", "**Answer:** (b)", "Answer: B, since it is a prime.", "B) 9.9\nA is smaller."],
    "C": ["答案：（C）\n\n希望这个答案对您有帮助！"], "D": ["d"],
    "": ["Answer: A or B", "It is what I said.", "Before"],
}  # fmt: skip
WORDS = [
    (("yes", "no"), "Answer: No, it is not.", "no"), (("周一", "周二"), "答案：是周二", "周二"),
    (("A", "B", "AB"), "Answer: AB", "AB"), (("C", "C++"), "I prefer C++", "C++"),
    (("①", "②"), "答案：②", "②"), (("-5", "5"), "Answer: −5", "-5"),
]  # fmt: skip


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


@pytest.mark.parametrize(("text", "read"), [(text, read) for read, texts in NUMBERS.items() for text in texts])
def test_a_number_is_read(text: str, read: str) -> None:
    assert Number(kind="number", answer=0).judge(text).answer == read


LETTERS = [((), text, read) for read, texts in CHOICES.items() for text in texts]


@pytest.mark.parametrize(("choices", "text", "read"), [*LETTERS, *WORDS])
def test_a_choice_is_read_which_may_be_a_word(choices: tuple[str, ...], text: str, read: str) -> None:
    given = {"choices": choices} if choices else {}
    verdicts = {each: OneOf(kind="choice", answer=each, **given).judge(text) for each in choices or "ABCD"}
    assert [each for each, verdict in verdicts.items() if verdict.score] == [read] * bool(read)
    assert {verdict.answer for verdict in verdicts.values()} == {read}


@pytest.mark.parametrize("answer", [1, -1.5, 1234.5, 9007199254740993, 0.1])
def test_a_number_has_its_value(answer: float) -> None:
    check = Number(kind="number", answer=answer)
    assert check.judge(f"Answer: {answer:,}").score == 1
    assert check.judge(f"Answer: {answer:,}1").score == check.judge("Answer: " + "9" * 100_000).score == 0


@pytest.mark.parametrize("piece", ["answer ", "答案: ", "Answer: \n", "1 ", "1,", "A is ", "\n", " ", "*", "9"])
def test_long_texts_are_read_quickly(piece: str) -> None:
    began = time.process_time()
    for check in (Number(kind="number", answer=1), OneOf(kind="choice", answer="A"), Exact(kind="exact", answer="x")):
        check.judge(piece * (60_000 // len(piece)))
    assert time.process_time() - began < 20
