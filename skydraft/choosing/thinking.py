"""Where thinking ends along the tokens of a text, and what holds only after it or ends it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from skydraft.choosing.incremental import Along
from skydraft.config import DecodingParams
from skydraft.engines.vocab import Mask, TokenIds, Vocab
from skydraft.errors import OptionError
from skydraft.thinking import BLANK, Tags, Thought

_MAX_GAP = 2  # tokens of blanks before a grammar


@dataclass(frozen=True, slots=True)
class Place:
    """After `num_tokens` of a text: `start` is where its answer begins, so far. Tags and blanks are thinking."""

    thought: Thought
    num_tokens: int = 0
    start: int = 0
    num_gap: int = 0  # tokens of blanks since the end tag

    @property
    def num_thinking(self) -> int:
        return self.num_tokens if self.thinks else self.start

    @property
    def has_ended(self) -> bool:
        return self.thought.phase in ("gap", "answer")

    @property
    def thinks(self) -> bool:
        return self.thought.phase == "thinking"


def tags_of(params: DecodingParams) -> Tags:
    return Tags(params.think_start, params.think_end)


@lru_cache(maxsize=8)
def tagged_pieces(vocab: Vocab, tags: Tags) -> tuple[bytes, ...]:
    """What tokens add to a text; the names of special ones, if these are tags."""
    names = {tag.encode() for tag in (tags.start, tags.end) if tag}
    ids = [i for i in vocab.special_ids if vocab.name_bytes(i) in names]
    if not ids:
        return vocab.pieces
    return tuple(vocab.name_bytes(i) if i in ids else piece for i, piece in enumerate(vocab.pieces))


class ThinkingAlong:
    """Follows texts of a vocabulary. For one thread at a time."""

    def __init__(self, params: DecodingParams, vocab: Vocab) -> None:
        self._vocab, self._tags, self._budget = vocab, tags_of(params), params.think_budget
        self._pieces = tagged_pieces(vocab, self._tags)
        self._ends = np.array(sorted(vocab.end_ids), np.int32)
        self._along = Along(Place(self._tags.in_bytes.begin), self._then)
        if self._budget and _spelling(vocab, self._tags, self._tags.in_bytes.end).longest < 0:
            raise OptionError("--think-budget cannot be kept: no token of this model begins its end tag.")

    def at(self, text: TokenIds) -> Place:
        return self._along.at(text)

    def _then(self, place: Place, token_id: int) -> Place:
        piece = self._pieces[token_id].decode("latin-1")
        thought, _, _ = place.thought.then(piece)
        num, before, now = place.num_tokens + 1, place.thought.phase, thought.phase
        if now == "gap":
            return Place(thought, num, num, place.num_gap + (before == "gap"))
        # The token that ends the thinking and begins the answer is of the thinking.
        return Place(thought, num, num if before == "thinking" and now == "answer" else place.start)

    def forced(self, text: TokenIds) -> int | None:
        """The token that must come where the budget is spent: the longest that goes on with the end tag."""
        place = self.at(text)
        if not (self._budget and place.thinks and place.num_thinking >= self._budget):
            return None
        return _spelling(self._vocab, self._tags, place.thought.missing).longest

    def may_come(self, text: TokenIds, allowed: Mask, has_left: bool) -> Mask:
        """Which tokens a text may go on with whose answer follows a grammar, which `allowed` these for the answer.

        A grammar that the answer `has_left` allows the end alone.
        """
        place = self.at(text)
        if place.thinks:
            mask = ~_spelling(self._vocab, self._tags, place.thought.missing).over
            mask[self._ends] = False
            return mask
        if place.thought.phase == "gap" and place.num_gap < _MAX_GAP:
            return allowed | _spelling(self._vocab, self._tags, "").goes_on
        if place.thought.phase == "before":
            opening = _opening(self._vocab, self._tags, place.thought)
            return opening if has_left and opening.any() else allowed | opening
        return allowed


@dataclass(frozen=True, slots=True)
class _Spelling:
    """Of tokens, [vocab]: those that go on with the rest of the end tag, or with blanks where none is missing; the
    longest of these, or -1; and those that end the thinking with a part of the answer, which no grammar would see."""

    goes_on: Mask
    longest: int
    over: Mask


@lru_cache(maxsize=64)
def _spelling(vocab: Vocab, tags: Tags, missing: str) -> _Spelling:
    pieces = tagged_pieces(vocab, tags)
    rest, blank = missing.encode("latin-1"), BLANK.encode()
    goes_on = [bool(each) and (rest.startswith(each) if rest else not each.strip(blank)) for each in pieces]
    longest = max(np.flatnonzero(goes_on).tolist(), key=lambda i: len(pieces[i]), default=-1)
    over = [bool(rest) and each.startswith(rest) and bool(each[len(rest) :].strip(blank)) for each in pieces]
    return _Spelling(np.array(goes_on), longest, np.array(over))


@lru_cache(maxsize=64)
def _opening(vocab: Vocab, tags: Tags, thought: Thought) -> Mask:
    """The tokens with which it may still turn out to be thinking."""
    pieces = tagged_pieces(vocab, tags)
    after = (thought.then(each.decode("latin-1"))[0].phase if each else "answer" for each in pieces)
    return np.array([phase != "answer" for phase in after])
