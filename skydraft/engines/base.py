"""What an engine is to all other rooms: sequences of tokens that any thread may open, feed, cut back and close."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Self

import numpy as np
import numpy.typing as npt

from skydraft.config import Execution
from skydraft.engines.exactness import PROBED_LEN, RowCheck
from skydraft.engines.floor import Floor
from skydraft.engines.model import Feeds, Model, Sequence, TokenBuffer
from skydraft.engines.options import RowProfile
from skydraft.engines.prefix_cache import PrefixCache
from skydraft.engines.rows import Rows
from skydraft.engines.vocab import TokenIds
from skydraft.errors import ContextExceeded, EngineError, PromptError, SkydraftError
from skydraft.types import Recordings, Reuse

__all__ = ["Engine", "Feeds", "Sequence", "TokenBuffer"]


class Engine(Model):
    """A model that gives logits; only an Engine can draft or verify. Subclasses write what `Model` asks for.

    Any thread may use an engine and its sequences: each call takes `floor` and waits for it. A thread that reads rows
    while others use the engine holds `floor` from the feed to the last row. Calls on a closed engine raise EngineError.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.floor = Floor(name)
        self.prefixes = PrefixCache()
        self._row_check = RowCheck()
        self.is_local_only = False  # whether its texts must stay on this device

    @property
    def is_probed(self) -> bool:
        return self._profile is not None

    def adopt_profile(self, profile: RowProfile) -> None:
        self._profile = profile

    @property
    def profile(self) -> RowProfile:
        """Invariant rows and forward times, probed when the engine is loaded."""
        if self._profile is None:
            raise EngineError(f"The engine {self.name} was not probed.", hint="Open it with skydraft.load.")
        return self._profile

    @property
    def invariant_rows(self) -> int:
        """How many rows one forward may hold and still be bit-identical to one row at a time."""
        return self.profile.invariant_rows

    def max_rows(self, execution: Execution) -> int:
        """The most rows of one forward: those that change no bit, or as many as there can be."""
        return self.invariant_rows if execution == "exact" else self.max_output_rows

    def room(self, prompt: Seq[int] | TokenIds, media: Recordings = ()) -> int:
        """How many tokens can follow a prompt. Raises PromptError for one that `check_prompt` refuses."""
        self.check_prompt(prompt, media)
        return self.context_len - len(prompt)

    def open(self, prompt: Seq[int] | TokenIds, media: Recordings = (), reuse: Reuse | None = None) -> Sequence:
        """A new sequence holding all of `prompt` but its last token, which `extend` feeds first. Raises PromptError."""
        sequence = self.begin(prompt, media, reuse)
        try:
            self.fill(sequence, prompt)
        except BaseException:
            sequence.close()
            raise
        return sequence

    def begin(self, prompt: Seq[int] | TokenIds, media: Recordings = (), reuse: Reuse | None = None) -> Sequence:
        """A sequence for `prompt`, to be filled by `prefill`. Raises PromptError.

        It is empty, or, with `reuse`, holds what an earlier sequence shares with the prompt.
        """
        with self.floor:
            self.check_prompt(prompt, media)
            return self.prefixes.begin(self, prompt, media, reuse)

    def fill(self, sequence: Sequence, prompt: Seq[int] | TokenIds) -> None:
        """`prefill` until nothing is left; other threads get the engine between the parts."""
        while self.prefill(sequence, prompt):
            pass

    def prefill(self, sequence: Sequence, prompt: Seq[int] | TokenIds) -> bool:
        """Feed the next part of all of `prompt` but its last token; returns whether there is more to feed."""
        with self.floor:
            sequence.check_open()
            return self.prefixes.feed(self, sequence, prompt)

    def drop(self, sequence: Sequence) -> None:
        """Keep or release a closed sequence: now, or before the next one begins where a thread has the floor."""
        self.prefixes.drop(sequence)
        self._if_free(lambda: self.prefixes.settle(self))

    def forget_kept(self, older_than_s: float = 0.0) -> None:
        """Release KV that was kept for at least `older_than_s` seconds, unless a thread has the floor."""
        self._if_free(lambda: self.prefixes.forget(self, older_than_s))

    def _if_free(self, work: Callable[[], None]) -> None:
        if self.floor.try_acquire():
            try:
                work()
            finally:
                self.floor.release()

    def extend_batch(self, feeds: Feeds) -> list[Rows]:
        """Feed several sequences in one forward: the same as one by one while all rows fit in `invariant_rows`.

        Each sequence may occur once. Returns logits [len(token_ids), vocab.size] per feed, in order.
        """
        with self.floor:
            if len({id(sequence) for sequence, _ in feeds}) < len(feeds):
                raise EngineError("A sequence may occur only once in a batch.")
            for sequence, token_ids in feeds:
                self._check_feed(sequence, token_ids)
            if (num_rows := sum(len(token_ids) for _, token_ids in feeds)) > self.max_output_rows:
                raise EngineError(f"{num_rows} rows are too many for one forward.")
            longest = max(sequence.length for sequence, _ in feeds)
            is_due = self.has_kernels and longest > PROBED_LEN and self.is_probed
            if is_due and 1 < num_rows <= self.invariant_rows:
                return self._row_check.forward(self, feeds)
            return self.feed(feeds)

    def check_prompt(self, prompt: Seq[int] | TokenIds, media: Recordings = ()) -> None:
        """Raise PromptError if the prompt is empty, leaves no room, or does not fit the vocabulary or `media`."""
        self.floor.check_open()
        if len(prompt) == 0:
            raise PromptError("The prompt is empty.", hint="Give at least one word.")
        if len(prompt) >= self.context_len:
            raise ContextExceeded(
                f"The prompt has {len(prompt)} tokens, the context of {self.name} holds {self.context_len}.",
                hint="Shorten the prompt or raise --context.",
            )
        self._check_ids(prompt, PromptError)
        self.check_media(prompt, media)

    def _check_feed(self, sequence: Sequence, token_ids: Seq[int] | TokenIds) -> None:
        sequence.check_open()
        if len(token_ids) == 0:
            raise EngineError("Nothing to feed.")
        if (length := sequence.length + len(token_ids)) > self.context_len:
            raise EngineError(f"{length} tokens do not fit in a context of {self.context_len}.")
        self._check_ids(token_ids)

    def _check_ids(self, token_ids: Seq[int] | TokenIds, kind: type[SkydraftError] = EngineError) -> None:
        ids: npt.NDArray[np.int64] = np.asarray(token_ids, np.int64)
        if ids.min() < 0 or ids.max() >= self.vocab.size:
            raise kind(f"A token id is outside the vocabulary of {self.vocab.size} tokens.")

    def close(self) -> None:
        """Free the model once no thread has the floor; a second call changes nothing. Later calls get EngineError."""
        if self.floor.close():
            self.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
