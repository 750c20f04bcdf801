"""References: ROUGE-L by the slow definition, BLEU and chrF as sacrebleu itself gives them."""

from __future__ import annotations

import itertools

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from skydraft.evaluation.references import corpus, rouge_l

from ..toys import law


def longest_common(mine: str, theirs: str) -> int:
    """Length of the longest subsequence of `mine` that is one of `theirs`, by trying all."""

    def holds(wanted: tuple[str, ...]) -> bool:
        left = iter(theirs)
        return all(unit in left for unit in wanted)

    return max(
        length
        for length in range(len(mine) + 1)
        if any(holds(wanted) for wanted in itertools.combinations(mine, length))
    )


@law(75)
@given(st.text("我在说他", max_size=9), st.lists(st.text("我在说他", min_size=1, max_size=9), min_size=1, max_size=3))
def test_rouge_l_is_f1_of_the_longest_common_subsequence(text: str, references: list[str]) -> None:
    def f1(reference: str) -> float:
        common = longest_common(text, reference)
        precision, recall = common / max(len(text), 1), common / len(reference)
        return 2 * precision * recall / (precision + recall) if common else 0.0

    assert rouge_l(text, references) == pytest.approx(max(map(f1, references)))


@pytest.mark.parametrize(
    ("text", "references", "score"),
    [
        ("我在说", ["我在说"], 1.0),
        ("我 在\n说", ["我在说"], 1.0),  # spaces left out
        ("我在说", ["他们"], 0.0),
        ("", ["我在说"], 0.0),
        ("The cat sat", ["the cat sat"], 1.0),
        ("the cat", ["the dog sat"], 0.4),  # 1 of 2 and of 3 words
        ("我在", ["他们", "我在"], 1.0),
        ("我在", ["", "我在"], 1.0),
    ],
)
def test_rouge_l_cases(text: str, references: list[str], score: float) -> None:
    assert rouge_l(text, references) == pytest.approx(score)


CHINESE = [("今天天气很好", ("今天的天气很好",)), ("我们去公园走走", ("我们去公园散步", "我们到公园走走"))]
ENGLISH = [("The cat sat on the mat.", ("The cat is on the mat.",)), ("It rains a lot here.", ("It rains here.",))]


@pytest.mark.parametrize(("texts", "tokenize"), [(CHINESE, "zh"), (ENGLISH, "13a")])
def test_bleu_and_chrf_are_those_of_sacrebleu(texts: list[tuple[str, tuple[str, ...]]], tokenize: str) -> None:
    found = corpus([*texts, ("no references", ())])
    assert found is not None
    hypotheses = [text for text, _ in texts]
    streams = [[refs[0] for _, refs in texts], [refs[-1] for _, refs in texts]]
    if all(len(refs) == 1 for _, refs in texts):
        streams = streams[:1]
    assert found["bleu"] == round(sacrebleu.corpus_bleu(hypotheses, streams, tokenize=tokenize).score, 2)
    assert found["chrf"] == round(sacrebleu.corpus_chrf(hypotheses, streams).score, 2)
    assert found["num_texts"] == len(texts)
    assert f"tok:{tokenize}" in found["bleu_signature"] and "version:" in found["chrf_signature"]
    assert 0 < found["bleu"] < 100


def test_without_references_there_is_nothing_to_say() -> None:
    assert corpus([("a", ()), ("b", ())]) is None
    assert corpus([]) is None
