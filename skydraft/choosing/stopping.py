"""When a generation ends: a pure question about its tokens, asked after each one (F13)."""

from __future__ import annotations

import re

import numpy as np

from skydraft.characters import CLOSING, FULL_STOP_LIKE
from skydraft.config import DecodingParams
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.types import FinishReason

_WIDE_STOPS = FULL_STOP_LIKE - {".", "．"}
_ABBREVIATIONS = frozenset((
    "e.g", "i.e", "etc", "vs", "cf", "al", "mr", "mrs", "ms", "dr", "prof", "st", "fig", "eq", "vol", "p", "pp",
    "approx", "dept", "inc", "ltd", "jr", "sr", "u.s", "u.k", "a.m", "p.m", "www",
))  # fmt: skip
_MAX_WORD = 64  # characters looked at before a dot; longer words are no abbreviations
_STOPS = re.compile(f"[{re.escape(''.join(sorted(FULL_STOP_LIKE)))}]")


class Stopping:
    """The end conditions of one generation, in order: end token, stop string, sentences, length. Immutable.

    `max_new_tokens` is what the text may hold: what was asked for, or less where a context ends before.
    """

    def __init__(self, params: DecodingParams, vocab: Vocab, max_new_tokens: int) -> None:
        self._vocab = vocab
        self.max_new_tokens = max_new_tokens
        self._stop = tuple(text.encode() for text in params.stop)
        self._sentences = params.sentences
        self._min_new_tokens = params.min_new_tokens
        self._may_end = vocab.classes.full_stop if params.sentences else np.zeros(0, bool)

    def finish(self, generated: TokenIds) -> FinishReason | None:
        """Why a generation whose last token is generated[-1] ends here, or None. Earlier tokens ended nothing."""
        if int(generated[-1]) in self._vocab.end_ids:
            return "eos"
        if self._stop and self._ends_with_stop_string(generated):
            return "stop_string"
        if self._sentences and len(generated) >= self._min_new_tokens and self._said_enough(generated):
            return "sentences"
        return "length" if len(generated) >= self.max_new_tokens else None

    def _ends_with_stop_string(self, generated: TokenIds) -> bool:
        """Whether a stop string lies in the text so that the last token completed it."""
        last = self._vocab.token_bytes(int(generated[-1]))
        needed = len(last) + max(map(len, self._stop)) - 1
        tail = b""
        for token_id in generated[::-1]:
            if len(tail) >= needed:
                break
            tail = self._vocab.token_bytes(int(token_id)) + tail
        return any(stop in tail[-(len(last) + len(stop) - 1) :] for stop in self._stop)

    def _said_enough(self, generated: TokenIds) -> bool:
        last = int(generated[-1])
        if not (self._may_end[last] or self._vocab.token_bytes(last).decode(errors="ignore").strip()[:1] in CLOSING):
            return False
        return has_said(self._vocab.decode(generated), self._sentences)


def has_said(text: str, sentences: int) -> bool:
    """Whether the text ends at a sentence end and holds at least so many sentences."""
    return ends_sentence(text) and num_sentences(text, enough=sentences) >= sentences


def ends_sentence(text: str) -> bool:
    """Whether the text, closing quotes and spaces apart, ends at a sentence end."""
    bare = text.rstrip().rstrip("".join(CLOSING)).rstrip()
    return bool(bare) and _is_sentence_end(bare, len(bare) - 1)


def num_sentences(text: str, enough: int | None = None) -> int:
    """Sentence ends in `text`; several marks in a row count once. Counting ends at `enough`.

    The cost is that of a search for stops and a bounded look around each.
    """
    count, last = 0, -2
    for found in _STOPS.finditer(text):
        if _is_sentence_end(text, index := found.start()):
            count += index != last + 1
            last = index
            if count == enough:
                break
    return count


def _is_sentence_end(text: str, index: int) -> bool:
    """A wide stop always ends a sentence; a dot neither inside a number, a word or an abbreviation, nor after a digit
    while nothing follows it (the next token may be a decimal)."""
    char = text[index]
    if char in _WIDE_STOPS:
        return True
    if char not in ".．":
        return False
    before, after = text[max(index - _MAX_WORD, 0) : index], text[index + 1 : index + 2]
    if after and after.isascii() and (after.isalnum() or after == "."):
        return False
    if before[-1:].isdigit():
        return after.isspace() or bool(after and not after.isascii())
    tail = len(before)
    while tail and (before[tail - 1] == "." or (before[tail - 1].isascii() and before[tail - 1].isalpha())):
        tail -= 1
    word = before[tail:]
    letters = word.lower().strip(".")
    is_initial = len(letters) == 1 and before[-1:].isupper()
    says_something = bool(before.strip() or text[:index].strip())
    return says_something and letters not in _ABBREVIATIONS and not is_initial
