"""Indicators of a text: punctuation, repeats, sentence ends.

Content characters are CJK ideographs, letters and digits; repeat rates count only these.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from skydraft.characters import is_cjk, punctuation_density
from skydraft.choosing.stopping import ends_sentence
from skydraft.gating.gates import num_cycles


@dataclass(frozen=True, slots=True)
class TextIndicators:
    """Counts about one generated text; rates are computed from them later.

    `num_repeats[n]` of `num_ngrams[n]` n-grams of content characters occurred before in the same text, n = 2, 3.
    `num_adjacent` CJK characters equal the one just before, lexical doubles such as 慢慢 apart. `num_cycles` cycles of
    tokens ran at least twice.
    """

    num_chars: int
    num_punctuation: int
    num_ngrams: dict[int, int]
    num_repeats: dict[int, int]
    num_adjacent: int
    ends_sentence: bool
    num_cycles: int


def indicators(text: str, token_ids: Sequence[int]) -> TextIndicators:
    """Of a finished text; `token_ids` are its tokens without the prompt."""
    content = [char for char in text if is_cjk(char) or char.isalnum()]
    ngrams = {n: [tuple(content[i : i + n]) for i in range(len(content) - n + 1)] for n in (2, 3)}
    return TextIndicators(
        num_chars=len(text),
        num_punctuation=round(punctuation_density(text) * len(text)),
        num_ngrams={n: len(grams) for n, grams in ngrams.items()},
        num_repeats={n: len(grams) - len(set(grams)) for n, grams in ngrams.items()},
        num_adjacent=sum(a == b and is_cjk(a) and a + b not in lexical_doubles() for a, b in itertools.pairwise(text)),
        ends_sentence=ends_sentence(text),
        num_cycles=num_cycles(token_ids),
    )


@cache
def lexical_doubles() -> frozenset[str]:
    listed = resources.files("skydraft.evaluation").joinpath("lexical_doubles.txt").read_text(encoding="utf-8")
    return frozenset(word for line in listed.splitlines() if not line.startswith("#") for word in line.split())
