"""Indicators of a text: punctuation, repeats, sentence ends, and its similarity to references.

Content characters are CJK ideographs, letters and digits; repeat rates count only these.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from skydraft.characters import is_cjk, punctuation_density
from skydraft.choosing.stopping import ends_sentence
from skydraft.engines.vocab import TokenIds
from skydraft.errors import MissingDependency
from skydraft.evaluation.records import Line
from skydraft.gating.gates import num_cycles


@dataclass(frozen=True, slots=True)
class TextIndicators:
    """Counts about one generated text; rates are computed from them later.

    `num_repeats[n]` of `num_ngrams[n]` n-grams of content characters occurred before in the same text, n = 2, 3.
    `num_adjacent` CJK characters equal the one just before, without the `num_doubles` that belong to lexical doubles
    such as 慢慢. `num_cycles` cycles of tokens ran at least twice.
    """

    num_chars: int
    num_punctuation: int
    num_ngrams: dict[int, int]
    num_repeats: dict[int, int]
    num_adjacent: int
    num_doubles: int
    ends_sentence: bool
    num_cycles: int

    @property
    def punctuation_density(self) -> float:
        """Punctuation characters / characters."""
        return self.num_punctuation / self.num_chars if self.num_chars else 0.0


def indicators(text: str, token_ids: TokenIds) -> TextIndicators:
    """The indicators of a finished text; `token_ids` are its tokens without the prompt."""
    content = [char for char in text if is_cjk(char) or char.isalnum()]
    num_adjacent, num_doubles = _adjacent_repeats(text)
    ngrams = {n: [tuple(content[i : i + n]) for i in range(len(content) - n + 1)] for n in (2, 3)}
    return TextIndicators(
        num_chars=len(text),
        num_punctuation=round(punctuation_density(text) * len(text)),
        num_ngrams={n: len(grams) for n, grams in ngrams.items()},
        num_repeats={n: len(grams) - len(set(grams)) for n, grams in ngrams.items()},
        num_adjacent=num_adjacent,
        num_doubles=num_doubles,
        ends_sentence=ends_sentence(text),
        num_cycles=num_cycles(token_ids.tolist()),
    )


def _adjacent_repeats(text: str) -> tuple[int, int]:
    """(adjacent equal CJK characters without lexical doubles, lexical doubles)."""
    pairs = [a + b for a, b in itertools.pairwise(text) if a == b and is_cjk(a)]
    num_doubles = sum(pair in lexical_doubles() for pair in pairs)
    return len(pairs) - num_doubles, num_doubles


@cache
def lexical_doubles() -> frozenset[str]:
    """Words of one character written twice."""
    listed = resources.files("skydraft.evaluation").joinpath("lexical_doubles.txt").read_text(encoding="utf-8")
    return frozenset(word for line in listed.splitlines() if not line.startswith("#") for word in line.split())


def rouge_l(text: str, references: Sequence[str]) -> float:
    """F1 of the longest common subsequence (Lin 2004, beta 1) with the best reference.

    It compares characters without spaces if the reference has CJK, else lower-case words.
    """
    return max(_rouge_l(_units(text, reference), _units(reference, reference)) for reference in references)


def _units(text: str, reference: str) -> list[str]:
    if any(map(is_cjk, reference)):
        return [char for char in text if not char.isspace()]
    return text.lower().split()


def _rouge_l(mine: list[str], theirs: list[str]) -> float:
    longest = [0] * (len(theirs) + 1)
    for unit in mine:
        before = longest[:]
        for index, other in enumerate(theirs, 1):
            longest[index] = before[index - 1] + 1 if unit == other else max(before[index], longest[index - 1])
    return 2 * longest[-1] / (len(mine) + len(theirs)) if mine and theirs else 0.0


class References(Line):
    """Corpus BLEU and chrF of texts that have references, with sacrebleu's signatures."""

    num_texts: int
    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str


def load_sacrebleu() -> Any:
    """sacrebleu's metrics. Raises MissingDependency."""
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise MissingDependency(
            "Texts with references need sacrebleu, which is not installed.", hint="Run: pip install 'skydraft[report]'."
        ) from error
    return metrics


def score_references(texts: Sequence[tuple[str, tuple[str, ...]]]) -> References | None:
    """The scores of (text, references) pairs; None without references.

    BLEU splits texts into characters (`zh`) if any reference has CJK, else into words (`13a`).
    """
    pairs = [(text, references) for text, references in texts if references]
    if not pairs:
        return None
    metrics = load_sacrebleu()
    most = max(len(references) for _, references in pairs)
    # sacrebleu wants equally many references for each text; a repeated reference changes nothing
    streams = [[references[min(index, len(references) - 1)] for _, references in pairs] for index in range(most)]
    hypotheses = [text for text, _ in pairs]
    is_chinese = any(is_cjk(char) for _, references in pairs for reference in references for char in reference)
    bleu, chrf = metrics.BLEU(tokenize="zh" if is_chinese else "13a"), metrics.CHRF()
    scores = [round(metric.corpus_score(hypotheses, streams).score, 2) for metric in (bleu, chrf)]
    return References(
        num_texts=len(pairs),
        bleu=scores[0],
        bleu_signature=str(bleu.get_signature()),
        chrf=scores[1],
        chrf_signature=str(chrf.get_signature()),
    )
