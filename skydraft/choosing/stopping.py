"""When a generation ends: a pure question about its tokens, asked after each one (F13); and where sentences end."""

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
_MAX_WORD = 64  # characters looked at before a dot; longer words are no abbreviations
_STOPS = re.compile(f"[{re.escape(''.join(sorted(FULL_STOP_LIKE)))}]")


@dataclass(frozen=True, slots=True)
class Said:
    """How many sentences a text holds, and whether it ends one. Grows token by token.

    The last character waits for the next one before it is counted: a dot may turn out to be inside a number.
    """

    _count: int = 0  # sentence ends before the last character, marks in a row once
    _last_end: int = -2  # where the last of them is
    _length: int = 0  # characters
    _tail: str = ""  # the last of them
    _has_words: bool = False  # before the tail
    _pending: bytes = b""  # an unfinished character

    @property
    def ends_sentence(self) -> bool:
        """Whether the text ends at a sentence end, but for spaces, closing marks and spaces, in this order."""
        bare = self._tail.rstrip().rstrip(_CLOSING).rstrip()
        return bool(bare) and _is_sentence_end(bare, len(bare) - 1, self._has_words)

    @property
    def num_sentences(self) -> int:
        is_end = bool(self._tail) and _is_sentence_end(self._tail, len(self._tail) - 1, self._has_words)
        return self._count + (is_end and self._length - 1 != self._last_end + 1)

    def has(self, sentences: int) -> bool:
        return self.ends_sentence and self.num_sentences >= sentences

    def then(self, piece: bytes) -> "Said":
        """The same of the text with `piece` at its end. Costs its length, and a bounded look back for each dot."""
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
    """Whether text[index] ends a sentence; `has_words_before` tells whether words came before `text`.

    A wide stop always does; a dot neither inside a number, a word or an abbreviation, nor after a digit while nothing
    follows it (the next token may be a decimal).
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

    `max_new_tokens` is what was asked for, or less where a context ends before. For one thread at a time.
    """

    def __init__(self, params: DecodingParams, vocab: Vocab, max_new_tokens: int) -> None:
        self._end_ids, self.max_new_tokens = vocab.end_ids | set(params.stop_token_ids), max_new_tokens
        self._stop, tags = [text.encode().decode("latin-1") for text in params.stop], tags_of(params)
        self._num_before = max(map(len, self._stop), default=1) - 1  # bytes that a token may complete to a stop string
        self._pieces = tagged_pieces(vocab, tags)
        self._end = Along((tags.in_bytes.begin, "", False), self._then)
        self._sentences, self._min_new_tokens = params.sentences, params.min_new_tokens
        self._said = said_along(vocab)
        self._thinking = ThinkingAlong(params, vocab) if params.think_end and params.sentences else None

    def finish(self, generated: TokenIds) -> FinishReason | None:
        """Why a generation whose last token is generated[-1] ends here, or None. Earlier tokens ended nothing."""
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
        """Where the thinking is, the end of the answer's bytes, and whether the last token completes a stop string."""
        thought, _, new = before[0].then(self._pieces[token_id].decode("latin-1"))
        end = before[1] + new
        return thought, end[max(len(end) - self._num_before, 0) :], any(stop in end for stop in self._stop)
