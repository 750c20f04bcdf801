"""The end of thinking in the tokens of a text: where it is, how a budget forces it, and grammars that begin there."""

import numpy as np

from skydraft.choosing.incremental import Along
from skydraft.config import DecodingParams
from skydraft.engines.vocab import Mask, TokenIds, Vocab, kept_with_vocab
from skydraft.errors import OptionError
from skydraft.thinking import BLANK, Place, Tags, Thought

_MAX_GAP = 2  # tokens of blanks before a grammar
_BLANK = BLANK.encode()


def tags_of(params: DecodingParams) -> Tags:
    return Tags(params.think_start, params.think_end)


@kept_with_vocab
def tagged_pieces(vocab: Vocab, tags: Tags) -> tuple[bytes, ...]:
    """Return the bytes that tokens add to a text; for special tokens that are tags, their names."""
    names = {tag.encode() for tag in (tags.start, tags.end) if tag}
    ids = [i for i in vocab.special_ids if vocab.name_bytes(i) in names]
    if not ids:
        return vocab.pieces
    return tuple(vocab.name_bytes(i) if i in ids else piece for i, piece in enumerate(vocab.pieces))


class ThinkingAlong(Along[Place]):
    """Follows the thinking of a text. For one thread at a time."""

    def __init__(self, params: DecodingParams, vocab: Vocab) -> None:
        self._vocab, self._tags, self._budget = vocab, tags_of(params), params.think_budget
        self._pieces = tagged_pieces(vocab, self._tags)
        self._no_end = ~np.isin(np.arange(vocab.size), sorted(vocab.end_ids))
        super().__init__(Place(self._tags.in_bytes.begin), self._then)
        if self._budget and _longest(vocab, self._tags, self._tags.in_bytes.end) < 0:
            raise OptionError("--think-budget cannot be kept: no token of this model begins its end tag.")

    def _then(self, place: Place, token_id: int) -> Place:
        thought, _, _ = place.thought.then(self._pieces[token_id].decode("latin-1"))
        num, before, now = place.num_tokens + 1, place.thought.phase, thought.phase
        if now == "gap":
            return Place(thought, num, num, place.num_gap + (before == "gap"))
        # A token that ends the thinking and begins the answer counts as thinking.
        start = num if before == "thinking" and now == "answer" else place.start
        return Place(thought, num, start, place.num_gap)

    def forced(self, text: TokenIds) -> int | None:
        """Return the token to force if the budget is spent: the longest that continues the end tag."""
        place = self.at(text)
        if not (self._budget and place.thinks and place.num_thinking >= self._budget):
            return None
        return _longest(self._vocab, self._tags, place.thought.missing)

    def may_come(self, text: TokenIds, allowed: Mask, has_left: bool) -> Mask:
        """Return the mask of tokens that may follow `text`, given the tokens that a grammar `allowed` for its answer.

        If the answer `has_left` the grammar, `allowed` holds only the end.
        """
        place = self.at(text)
        thought = place.thought
        if thought.phase == "answer" or place.num_gap >= _MAX_GAP:
            return allowed
        if place.thinks:  # of the held text only a part of the end tag counts
            end = self._tags.in_bytes.end
            thought = Thought(thought.tags, "thinking", end.removesuffix(thought.missing), has_said=True)
        mask = _not_yet(self._vocab, self._tags, thought)
        if place.thinks:
            return mask & self._no_end
        return mask if thought.phase == "before" and has_left and mask.any() else allowed | mask


@kept_with_vocab
def _longest(vocab: Vocab, tags: Tags, missing: str) -> int:
    """Return the longest token that continues the end tag, or -1."""
    pieces, rest = tagged_pieces(vocab, tags), missing.encode("latin-1")
    fitting = (i for i, piece in enumerate(pieces) if piece and rest.startswith(piece))
    return max(fitting, key=lambda i: len(pieces[i]), default=-1)


@kept_with_vocab
def _not_yet(vocab: Vocab, tags: Tags, thought: Thought) -> Mask:
    """Return the mask [vocab] of tokens after which the answer has not begun. A grammar never sees them."""
    pieces, thinks = tagged_pieces(vocab, tags), thought.phase == "thinking"
    held, start, end = (text.encode("latin-1") for text in (thought.held, thought.tags.start, thought.tags.end))
    if thinks:  # a comparison decides for most tokens; `then` takes a second for a whole vocabulary
        unclear = [i for i, piece in enumerate(pieces) if end in held + piece]
    else:
        bare = {i: (held + piece).lstrip(_BLANK) for i, piece in enumerate(pieces) if piece}
        unclear = [i for i, text in bare.items() if start.startswith(text) or (start and text.startswith(start))]
    mask = np.full(len(pieces), thinks)
    for i in unclear:
        mask[i] = thought.then(pieces[i].decode("latin-1"))[0].phase != "answer"
    return mask
