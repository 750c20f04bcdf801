"""Answers are read from the last line that says "Answer:"; without one the last number, or a whole line, counts."""

import time

import pytest

from skydraft.lab.tasks.checks import Exact, Number, OneOf

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
