"""Text as it comes: never half a character, never a piece that has to be taken back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence as Seq

from skydraft.engines.vocab import Vocab


class TextStream:
    """Turns tokens into text, one at a time.

    A character appears with the token that completes it. Text that may be the beginning of a stop string is held
    until it is known not to be; text from a stop string on is never shown.
    """

    def __init__(self, vocab: Vocab, stop: Seq[str] = ()) -> None:
        self._vocab = vocab
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._stopped = False

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; may be empty."""
        self._held += self._decoder.decode(self._vocab.token_bytes(token_id))
        if self._stopped:
            return ""
        found = [at for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            self._stopped = True
            return self._held[: min(found)]
        return self._release(len(self._held) - self._num_suspect())

    def finish(self) -> str:
        """What is left at the end: held text, without an unfinished character."""
        return "" if self._stopped else self._release(len(self._held))

    def _release(self, num_chars: int) -> str:
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        return text

    def _num_suspect(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(text) - 1 for text in self._stop), default=0)
        for num_chars in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-num_chars:]) for text in self._stop):
                return num_chars
        return 0
