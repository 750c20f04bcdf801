"""When a generation ends: a pure question about its tokens, asked after each one (F13)."""

from __future__ import annotations

import numpy as np

from skydraft.characters import CLOSING
from skydraft.choosing.sentences import said_along
from skydraft.config import DecodingParams
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.types import FinishReason


class Stopping:
    """The end conditions of one generation, in order: end token, stop string, sentences, length.

    Costs of a row: a token's bytes and the longest stop string; a look back of 64 characters for each dot in it.
    `max_new_tokens` is what the text may hold: what was asked for, or less where a context ends before.
    """

    def __init__(self, params: DecodingParams, vocab: Vocab, max_new_tokens: int) -> None:
        self._vocab = vocab
        self.max_new_tokens = max_new_tokens
        self._stop = tuple(text.encode() for text in params.stop)
        self._sentences = params.sentences
        self._said = said_along(vocab)
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
        return self._said.at(generated).has(self._sentences)
