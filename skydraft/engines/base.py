"""The interface of engines: sequences of tokens that any thread may open, feed, truncate and close."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np

from skydraft.engines.adapters import Adapters
from skydraft.engines.model import FairLock, Feeds, Model, Sequence, TokenBuffer
from skydraft.engines.prefix_cache import PrefixCache
from skydraft.engines.slots import Seats
from skydraft.engines.vocab import Rows, TokenIds
from skydraft.errors import ContextExceeded, OptionError, PromptError, or_else
from skydraft.files import log
from skydraft.types import Recordings, Reuse

__all__ = ["Engine", "Feeds", "Seats", "Sequence", "TokenBuffer"]


class Engine(Model, AbstractContextManager["Engine"]):
    """A model that gives logits; only an Engine can draft or verify. Subclasses implement `Model`.

    Any thread may use an engine and its sequences: each call waits for the lock `floor`. A thread must hold `floor`
    from a feed until it has read the rows, since other forwards overwrite them. A closed engine raises EngineError.
    """

    drafts = True  # False without a model
    on_gpu = False

    def __init__(self, name: str) -> None:
        self.name, self.lock, self.prefixes = name, FairLock(), PrefixCache()
        self.adapters = Adapters(self)
        self.adapter: str | None = None  # the name of the adapter that this engine adds
        self._is_exact: dict[Hashable, bool] = {}  # by shape, see `feed_compared`
        self.is_local_only = False  # whether its texts must stay on this device

    def vocabulary_file(self) -> bytes:
        """Return a GGUF file with the vocabulary but no matrices; empty for other kinds of models."""
        return b""

    def open_adapted(self, adapter: Path) -> Engine:
        """Open an engine on the same weights that adds this adapter. Raises OptionError or RecordsError."""
        raise OptionError(f"{self.name} takes no adapters.", hint="Use a GGUF model or a checkpoint of text.")

    def room(self, prompt: Seq[int] | TokenIds, media: Recordings = ()) -> int:
        """Return how many tokens can follow a prompt. Raises PromptError like `check_prompt`."""
        self.check_prompt(prompt, media)
        return self.context_len - len(prompt)

    def open(self, prompt: Seq[int] | TokenIds, media: Recordings = (), reuse: Reuse | None = None) -> Sequence:
        """Open a sequence with all of `prompt` but its last token, which `extend` feeds first. Raises PromptError."""
        sequence = self.begin(prompt, media, reuse)
        with or_else(sequence.close):
            self.fill(sequence, prompt)
        return sequence

    def begin(self, prompt: Seq[int] | TokenIds, media: Recordings = (), reuse: Reuse | None = None) -> Sequence:
        """Open a sequence for `prompt`, empty or with a cached beginning; `prefill` fills it. Raises PromptError."""
        with self.floor:
            self.check_prompt(prompt, media)
            return self.prefixes.begin(self, prompt, media, reuse)

    def fill(self, sequence: Sequence, prompt: Seq[int] | TokenIds) -> None:
        while self.prefill(sequence, prompt):
            pass

    def prefill(self, sequence: Sequence, prompt: Seq[int] | TokenIds) -> bool:
        """Feed the next part of `prompt` without its last token; returns whether there is more to feed."""
        with self.floor:
            sequence.check_open()
            return self.prefixes.feed(self, sequence, prompt)

    def drop(self, sequence: Sequence) -> None:
        """Keep or release a closed sequence: at once, or when the next one begins if the engine is in use."""
        self.prefixes.drop(sequence)
        self.lock.if_free(lambda: self.prefixes.settle(self))

    def forget_kept(self, older_than_s: float = 0.0) -> None:
        """Free KV kept longer than `older_than_s`. Does nothing while the engine is in use."""
        self.lock.if_free(lambda: self.prefixes.forget(self, older_than_s))

    def feed_compared(self, feeds: Feeds) -> list[Rows]:
        """Keep the promise of `invariant_rows` at any length; on failure every sequence stays as before.

        The probe at load time only sees a short text, and kernels may take another path for a longer KV cache
        (llama.cpp does from 512 cells on). So the first forward of each shape is compared with single rows.
        """
        lengths = [sequence.length for sequence, _ in feeds]
        shapes = self.shapes(feeds)
        known = [self._is_exact.get(shape) for shape in shapes]
        if all(known):
            return self.feed(feeds)
        with or_else(partial(_go_back, feeds, lengths)):
            if False in known:
                return self._feed_singly(feeds)
            together = [rows.copy() for rows in self.feed(feeds)]  # valid until the next forward only
            _go_back(feeds, lengths)
            singly = self._feed_singly(feeds)
        is_exact = all(map(np.array_equal, together, singly))
        self._is_exact |= {shape: is_exact for shape, was_exact in zip(shapes, known, strict=True) if not was_exact}
        if not is_exact:
            num_rows, from_len = sum(len(rows) for rows in together), 1 << (max(lengths).bit_length() - 1)
            says = f"{num_rows} rows at once are not exact from {from_len} tokens on"
            log.warning(f"{self.name}: {says}; there they are computed one by one.")
        return singly

    def _feed_singly(self, feeds: Feeds) -> list[Rows]:
        return [
            np.concatenate([self.feed([(sequence, [token_id])])[0].copy() for token_id in token_ids])
            for sequence, token_ids in feeds
        ]

    def check_prompt(self, prompt: Seq[int] | TokenIds, media: Recordings = ()) -> None:
        """Raise PromptError if the prompt is empty, leaves no room, or does not fit the vocabulary or `media`."""
        self.lock.check_open()
        if len(prompt) == 0:
            raise PromptError("The prompt is empty.", hint="Give at least one word.")
        if len(prompt) >= self.context_len:
            raise ContextExceeded(
                f"The prompt has {len(prompt)} tokens, the context of {self.name} holds {self.context_len}.",
                num_tokens=len(prompt), most=self.context_len, hint="Shorten the prompt or raise --context.",
            )  # fmt: skip
        self.check_ids(prompt, PromptError)
        self.check_media(prompt, media)

    def close(self) -> None:
        """Free the model once no thread uses it; a second call changes nothing. Later calls raise EngineError."""
        if self.lock.close():
            self.adapters.close()
            self.free()

    def __exit__(self, *_: object) -> None:
        self.close()


def _go_back(feeds: Feeds, lengths: list[int]) -> None:
    for (sequence, _), length in zip(feeds, lengths, strict=True):
        sequence.truncate(length)
