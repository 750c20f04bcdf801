"""Answers are read out of texts as real models write them. "" means that the text gives none."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.evaluation.tasks.checks import Exact, Number, OneOf

CAKE = "Step 1: 3 dozen at $68 is 3 * $68 = $204.\n"
NUMBERS = [
    # marks
    ("Answer: 42\n\nLet me know if this answer is right.", "42"),
    ("So the answer to question 2 is 42.", "42"),
    ("**Answer:** 42", "42"),
    ("### Answer\n\n42 apples, as 6 * 7 = 42", "42"),
    ("**Final Answer**\n\\boxed{840}", "840"),
    ("\\boxed{840}.,but let me explain: 3 more.\n\n**Final Answer**\n\\boxed{840}", "840"),
    ("We have 3 of them.\n#### 42", "42"),
    ("#### Step 1: add\n3 + 4 = 7\n#### Step 2: multiply\n7 * 6 = 42", "42"),
    ("Answer: 41\nWait, I forgot one.\nAnswer: 42", "42"),
    ("I think the answer: 5 is wrong.\nAnswer: 10", "10"),
    ("Answer: 42\nAnswer:", "42"),
    ("Answer:\n\n42\n\nThat took 3 steps.", "42"),
    ("The answer to 3.5 * 12 is 42.", "42"),
    ("The final answer should be 42, I am sure (3 checks).", "42"),
    ("42 is the answer: 3 more than 39.", "42"),
    ("To answer this question: 3 + 4 = 7.\nThen 7 * 6 = 42.", "42"),
    ("Answer: 7, because 7 - 4 = 3", "7"),
    ("Answer: 7 (10 - 3 = 7, and 3 of 10 are left)", "7"),
    ("Answer: The total cost of 3 shirts is $42.", "42"),
    ("Answer: 5 apples + 3 apples = 8 apples", "8"),
    ("Answer: 20 = 5 × 4", "20"),
    ("Answer: 2^10 = 1024", "1024"),
    ("The answer is not 5 but 7.", "7"),
    ("Answer: 3 or 4", ""),
    ("Answer: 1/4 or 0.25", "1/4"),
    ("<think>The answer is 5? No, 6 * 7 = 42.</think>\nIt is 42 in 3 steps.\nAnswer: 42", "42"),
    ("<think>The answer might be 42, let me", ""),
    ("```\n42\n```", "42"),
    # Chinese
    ("答案：42", "42"),
    ("所以第2题的答案是42。", "42"),
    ("答案为：\\boxed{42}", "42"),
    ("答案不是5，而是7。", "7"),
    ("答：5年以后，两人的年龄之和是42岁。", "42"),
    ("答案：每组得到 (12-4)×10÷2=40 个", "40"),
    ("① 3+4=7\n② 7×6=42", "42"),
    # how numbers are written
    ("Answer: $1,234.50", "1234.50"),
    ("\\boxed{$9{,}500}", "9500"),
    ("The answer is $10\\,000$.", "10000"),
    ("Answer: 12\u202f345 km", "12345"),
    ("Answer: 1'000'000", "1000000"),
    ("Answer: 12,34,567 rupees", "1234567"),
    ("The total is 72 clips, altogether.", "72"),
    ("Answer: -5", "-5"),
    ("The answer is negative 5.", "-5"),
    ("答案：负5度", "-5"),
    ("Answer: .5", ".5"),
    ("Answer: 1/2", "1/2"),
    ("\\boxed{\\frac{1}{2}}", "1/2"),
    ("\\boxed{-\\dfrac{1}{2}}", "-1/2"),
    ("Answer: 11 5/6", "11 5/6"),
    ("Answer: 1½ cups", "1 1/2"),
    ("Answer: 25%", "25"),
    ("Answer: 3 × 10⁸ m/s", "3e8"),
    ("The area is 42 m².", "42"),
    ("The answer is \\(\\boxed{\\text{The answer is 460}}\\)", "460"),
    ("Not 5 and not 6.", ""),
    # fallbacks
    (CAKE + "So she pays $694 in total.", "694"),
]  # fmt: skip
CHOICES = [
    ("B is correct, because it is a prime.", "B"),
    ("I would pick B — a safe choice.", "B"),
    ("The answer is B. Note that A is a common distractor.", "B"),
    ("ANSWER IS D. A is incorrect.", "D"),
    ("The correct answer is B. Here's why... option A is wrong because...", "B"),
    ("Answer: B\n\nLet me know if this answer is right, A or not.", "B"),
    ("The answer isn't A but C", "C"),
    ("The answer cannot be A, so it is C.", "C"),
    ("Answer: Let's think step by step. B is larger.\nThe answer is (C).", "C"),
    ("I considered (A), but it is incorrect. Final answer: D.", "D"),
    ("A perfect answer cannot be found.", ""),
    ("Answer: A prime number", ""),
    ("Answer: A", "A"),
    ("answer: (b)", "B"),
    ("b. 4", "B"),
    ("d", "D"),
    ("Answer: B. A is too small.", "B"),
    ("\\boxed{\\textbf{(B)}\\ 9.9}", "B"),
    ("#### C", "C"),
    ("B", "B"),
    ("B) 9.9 is larger than (A) 9.11.", "B"),
    ("A. Too small. B. Too large. So it must be C", "C"),
    ("A: no\nB: no\nC: yes, C", "C"),
    ("B because it is larger than A", "B"),
    ("Neither A nor B is correct.", ""),
    ("Answer: A or B", ""),
    ("The answer is both A and C.", ""),
    ("Answer: B/C", ""),
    ("Vitamin A's use is not clear, D it is: D", "D"),
    ("Answer choices: A, B, C, D. I go with C.", "C"),
    ("Think of C++ and C#.\nAnswer: D", "D"),
    # Chinese
    ("答案：（C）", "C"),
    ("答案选B，因为A太小。", "B"),
    ("正确选项是B，A不对。", "B"),
    ("只有选项C是对的", "C"),
    ("选项B正确，A太小。", "B"),
    ("A不对，所以是D。", "D"),
    ("【答案】B【解析】A项小于C项", "B"),
    ("答案不是A，而是C。", "C"),
    ("答案：B\n如果这个答案有误，请告诉我，比如A。", "B"),
    ("```text\nB\n```", "B"),
]  # fmt: skip
LINES = [
    ("Answer: Paris\n\nLet me know if this answer is right.", "Paris"),
    ("**Final answer:** *Paris*\nIs this answer what you want?", "Paris"),
    ("\\boxed{\\text{Paris}}", "Paris"),
    ("答案是：“巴黎”。\n如果答案有误请告诉我。", "巴黎"),
    ("Paris\n\nIt is the capital, so the question has one answer.", "Paris"),
    ("```\nParis\n```", "Paris"),
    ("<think>Lyon?</think>\nParis", "Paris"),
]


@pytest.mark.parametrize(("text", "read"), NUMBERS)
def test_a_number_is_read(text: str, read: str) -> None:
    found = Number(kind="number", answer=0).judge(text).answer
    assert found == read


@pytest.mark.parametrize(("text", "read"), CHOICES)
def test_a_choice_is_read(text: str, read: str) -> None:
    verdicts = {letter: OneOf(kind="choice", answer=letter).judge(text) for letter in "ABCD"}
    assert {letter for letter, verdict in verdicts.items() if verdict.score} == set(read)
    assert {verdict.answer.upper() for verdict in verdicts.values()} == {read}


@pytest.mark.parametrize(("text", "read"), LINES)
def test_a_line_is_read(text: str, read: str) -> None:
    verdict = Exact(kind="exact", answer=read).judge(text)
    assert (verdict.score, verdict.answer) == (1, read)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("The answer is C because I computed the integral.", "C"), ("I think it is J", "J"), ("I'd say: I", "I"),
        ("Answer: I", "I"), ("I is correct", "I"), ("I am not sure.", ""), ("It might be option  J. Dog is not.", "J"),
    ],
)  # fmt: skip
def test_i_is_a_choice_where_it_is_no_word(text: str, read: str) -> None:
    assert OneOf(kind="choice", answer="A", choices=tuple("ABCDEFGHIJ")).judge(text).answer == read


@pytest.mark.parametrize(
    ("choices", "text", "read"),
    [
        (("yes", "no"), "Answer: No, it is not.", "no"),
        (("周一", "周二"), "会议不是周一，是周二。", "周二"),
        (("9.9", "9.11"), "Answer: 9.11 is smaller, but I say 9.9", "9.11"),
        (("A", "B", "AB"), "Answer: AB", "AB"),
        (("AB", "B", "A", "C"), "Answer: AB", "AB"),
        (("C", "C++"), "I prefer C++", "C++"),
        (("①", "②"), "答案：②", "②"),
        (("a", "b"), "It is a prime, so (a)", "a"),
        (("A", "a"), "Answer: a", "a"),
        (("A", "a"), "Answer: A", "A"),
        (("-5", "5"), "Answer: −5", "-5"),
    ],
)  # fmt: skip
def test_choices_may_be_words(choices: tuple[str, ...], text: str, read: str) -> None:
    right = [each for each in choices if OneOf(kind="choice", answer=each, choices=choices).judge(text).score]
    assert right == [read]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("1/2", 0.5), ("-1/2", -0.5), ("11 5/6", 71 / 6), ("-1 1/2", -1.5), ("3 × 10^8", 3e8), ("1,234.5", 1234.5),
        ("9007199254740993", 9007199254740993), ("0.1", 0.1), ("5e-1", 0.5),
    ],
)  # fmt: skip
def test_a_number_has_its_value(said: str, answer: float) -> None:
    check = Number(kind="number", answer=answer)
    assert check.judge(f"Answer: {said}").score == 1
    assert check.judge(f"Answer: {said.replace('1', '2').replace('3', '4').replace('5', '6')}").score == 0


@pytest.mark.parametrize("text", ["Answer: 1/0", "Answer: " + "9" * 100_000, "Answer: 1e999", "Answer: -"])
def test_what_has_no_value_is_wrong(text: str) -> None:
    assert Number(kind="number", answer=1).judge(text).score == 0


@pytest.mark.parametrize(
    "piece",
    ["answer ", "####", "#### a\n", "\\boxed{", "答案是", "1 ", "A is ", "choose A\n", "\n", " ", "9", "\\frac{"],
)
def test_long_texts_are_read_quickly(piece: str) -> None:
    began = time.process_time()
    for check in (Number(kind="number", answer=1), OneOf(kind="choice", answer="A"), Exact(kind="exact", answer="x")):
        check.judge(piece * (60_000 // len(piece)))
    assert time.process_time() - began < 20


@given(
    st.sampled_from("ABCD"),
    st.sampled_from(["Answer: {}", "The answer is {}.", "答案：{}", "**Answer:** ({})", "\\boxed{{{}}}", "{}"]),
    st.sampled_from(["", "\n\nLet me know if this answer is right.", "\n\n希望这个答案对您有帮助！", "\nI like it."]),
)
def test_what_is_polite_afterwards_changes_nothing(letter: str, written: str, after: str) -> None:
    assert OneOf(kind="choice", answer=letter).judge(written.format(letter) + after).score == 1
    assert Number(kind="number", answer=7).judge(written.format(7) + after).score == 1
