"""The end of a generation, a pure function of its tokens, tested after each one (F13); and the ends of sentences."""

import codecs
import re
import string
from dataclasses import dataclass, replace

from skydraft.characters import CLOSING, FULL_STOP_LIKE
from skydraft.choosing.incremental import Along
from skydraft.choosing.thinking import ThinkingAlong, tagged_pieces, tags_of
from skydraft.config import DecodingParams
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.thinking import Thought
from skydraft.types import FinishReason

_WIDE_STOPS = FULL_STOP_LIKE - {".", "．"}
_ABBREVIATIONS = frozenset((
    "e.g", "i.e", "etc", "vs", "cf", "al", "mr", "mrs", "ms", "dr", "prof", "st", "fig", "eq", "vol", "p", "pp",
    "approx", "dept", "inc", "ltd", "jr", "sr", "u.s", "u.k", "a.m", "p.m", "www",
))  # fmt: skip
_CLOSING = "".join(CLOSING)
_LETTERS = string.ascii_letters + "."  # of abbreviations
_MAX_WORD = 64  # characters to look at before a dot; longer words are no abbreviations
_STOPS = re.compile(f"[{re.escape(''.join(sorted(FULL_STOP_LIKE)))}]")


@dataclass(frozen=True, slots=True)
class Said:
    """The number of sentences in a text, and whether it ends one. Updated token by token.

    A last character counts only once the next one is known: a dot may turn out to be inside a number.
    """

    _count: int = 0  # sentence ends before the last character, marks in a row once
    _last_end: int = -2  # position of the last sentence end
    _length: int = 0  # characters
    _tail: str = ""  # the last characters
    _has_words: bool = False  # before the tail
    _pending: bytes = b""  # an unfinished character

    @property
    def ends_sentence(self) -> bool:
        """Whether the text ends a sentence; spaces, closing marks and spaces may follow, in this order."""
        bare = self._tail.rstrip().rstrip(_CLOSING).rstrip()
        return bool(bare) and _is_sentence_end(bare, len(bare) - 1, self._has_words)

    @property
    def num_sentences(self) -> int:
        is_end = bool(self._tail) and _is_sentence_end(self._tail, len(self._tail) - 1, self._has_words)
        return self._count + (is_end and self._length - 1 != self._last_end + 1)

    def has(self, sentences: int) -> bool:
        return self.ends_sentence and self.num_sentences >= sentences

    def then(self, piece: bytes) -> "Said":
        """Return the state after `piece`. Costs its length, and a bounded look back for each dot."""
        new, used = codecs.utf_8_decode(self._pending + piece, "replace", False)
        pending = (self._pending + piece)[used:]
        if not new:
            return replace(self, _pending=pending)
        text = self._tail + new
        begin, count, last_end = self._length - len(self._tail), self._count, self._last_end
        for mark in _STOPS.finditer(text, max(len(self._tail) - 1, 0), len(text) - 1):
            if _is_sentence_end(text, mark.start(), self._has_words):
                at = begin + mark.start()
                count, last_end = count + (at != last_end + 1), at
        length, cut = self._length + len(new), max(len(text) - 2 * _MAX_WORD - 1, 0)
        return Said(count, last_end, length, text[cut:], self._has_words or bool(text[:cut].strip()), pending)


def said_along(vocab: Vocab) -> Along[Said]:
    return Along(Said(), lambda said, token_id: said.then(vocab.pieces[token_id]))


def _is_sentence_end(text: str, index: int, has_words_before: bool) -> bool:
    """Whether text[index] ends a sentence; `has_words_before` means that words came before `text`.

    A wide stop always ends one. A dot does not inside a number, a word or an abbreviation. After a last digit it
    does not either, since decimals may follow.
    """
    if text[index] not in ".．":
        return text[index] in _WIDE_STOPS
    before, after = text[max(index - _MAX_WORD, 0) : index], text[index + 1 : index + 2]
    if after and after.isascii() and (after.isalnum() or after == "."):
        return False
    if before[-1:].isdigit():
        return after.isspace() or bool(after and not after.isascii())
    letters = before[len(before.rstrip(_LETTERS)) :].lower().strip(".")
    is_initial = len(letters) == 1 and before[-1:].isupper()
    says_something = has_words_before or bool(text[:index].strip())
    return says_something and letters not in _ABBREVIATIONS and not is_initial


class Stopping:
    """The end conditions of one generation, in order: end token, stop string, sentences (both of the answer), length.

    `max_new_tokens` may be less than requested if the context is shorter. For one thread at a time.
    """

    def __init__(self, params: DecodingParams, vocab: Vocab, max_new_tokens: int) -> None:
        self._end_ids, self.max_new_tokens = vocab.end_ids | set(params.stop_token_ids), max_new_tokens
        self._stop, tags = [text.encode().decode("latin-1") for text in params.stop], tags_of(params)
        self._num_before = max(map(len, self._stop), default=1) - 1  # bytes to keep for stop strings over tokens
        self._pieces = tagged_pieces(vocab, tags)
        self._end = Along((tags.in_bytes.begin, "", False), self._then)
        self._sentences, self._min_new_tokens = params.sentences, params.min_new_tokens
        self._said = said_along(vocab)
        self._thinking = ThinkingAlong(params, vocab) if params.think_end and params.sentences else None

    def finish(self, generated: TokenIds) -> FinishReason | None:
        """Return why the generation ends at its last token, or None. Earlier tokens must not have ended it."""
        if int(generated[-1]) in self._end_ids:
            return "eos"
        if self._stop and self._end.at(generated)[2]:
            return "stop_string"
        if self._sentences and self._has_sentences(generated):
            return "sentences"
        return "length" if len(generated) >= self.max_new_tokens else None

    def _has_sentences(self, generated: TokenIds) -> bool:
        if self._thinking:
            generated = generated[self._thinking.at(generated).num_thinking :]
        return len(generated) >= self._min_new_tokens and self._said.at(generated).has(self._sentences)

    def _then(self, before: tuple[Thought, str, bool], token_id: int) -> tuple[Thought, str, bool]:
        """Return (state of thinking, last bytes of the answer, whether the last token completes a stop string)."""
        thought, _, new = before[0].then(self._pieces[token_id].decode("latin-1"))
        end = before[1] + new
        return thought, end[max(len(end) - self._num_before, 0) :], any(stop in end for stop in self._stop)
