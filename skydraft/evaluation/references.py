"""Texts against references: BLEU and chrF by sacrebleu, ROUGE-L over characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skydraft.characters import is_cjk
from skydraft.errors import MissingDependency


def rouge_l(text: str, references: Sequence[str]) -> float:
    """F1 of the longest common subsequence (Lin 2004, beta 1) with the best reference.

    Over characters where the reference has CJK, spaces left out; else over lower-case words.
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


def load_library() -> Any:
    """sacrebleu's metrics. Raises MissingDependency."""
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise MissingDependency(
            "Texts with references need sacrebleu, which is not installed.", hint="Run: pip install 'skydraft[report]'."
        ) from error
    return metrics


def corpus(texts: Sequence[tuple[str, tuple[str, ...]]]) -> dict[str, Any] | None:
    """Corpus BLEU and chrF of (text, references) pairs, with sacrebleu's signatures; None where nothing has references.

    BLEU splits Chinese into characters (`zh`) where any reference has CJK, and words else (`13a`).
    """
    pairs = [(text, references) for text, references in texts if references]
    if not pairs:
        return None
    metrics = load_library()
    most = max(len(references) for _, references in pairs)
    # sacrebleu wants as many references for each text; saying one twice changes nothing
    streams = [[references[min(index, len(references) - 1)] for _, references in pairs] for index in range(most)]
    hypotheses = [text for text, _ in pairs]
    is_chinese = any(is_cjk(char) for _, references in pairs for reference in references for char in reference)
    found: dict[str, Any] = {"num_texts": len(pairs)}
    for name, metric in (("bleu", metrics.BLEU(tokenize="zh" if is_chinese else "13a")), ("chrf", metrics.CHRF())):
        found[name] = round(metric.corpus_score(hypotheses, streams).score, 2)
        found[f"{name}_signature"] = str(metric.get_signature())
    return found
