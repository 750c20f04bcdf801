"""The part that each kind of engine implements, the lock, and sequences: tokens with a KV cache of the same length."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from skydraft.config import Execution
from skydraft.engines.row_costs import NOT_PROBED, RowProfile
from skydraft.engines.vocab import Rows, TokenIds, Vocab
from skydraft.errors import EngineError, PromptError, SkydraftError
from skydraft.types import Cost, Media, Recordings, Reuse

if TYPE_CHECKING:
    from skydraft.engines.base import Engine
    from skydraft.engines.slots import Slots


_RLock: Any = type(threading.RLock())


class FairLock(_RLock):  # type: ignore[misc]
    """A lock for `with`, granted in order of arrival, not reentrant (see `Model.floor`). EngineError when closed.

    Ctrl-C may interrupt a thread between any two steps of Python. So threads only wait for locks in C, whose `with`
    releases them in one step; `__exit__` comes from RLock.
    """

    def __init__(self) -> None:
        self.is_closed = False  # only `close` changes it
        self._last = threading.Lock()  # held by the last thread in line until it has this lock

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        return bool(self._is_owned())

    def __enter__(self) -> None:
        assert not self.is_mine, "it would wait for itself"
        mine = threading.Lock()
        try:
            with mine:
                before, self._last = self._last, mine  # one step; if interrupted, only the order suffers
                with before:
                    self.acquire()
            self.check_open()
        except BaseException:  # Ctrl-C, above all
            self._give_up()
            raise

    def if_free(self, work: Callable[[], object]) -> None:
        """Work under the lock if it is open and no thread holds it, not even this one. Never wait, since the garbage
        collector may close a sequence anywhere."""
        if self.is_mine or self.is_closed:
            return
        try:
            if self.acquire(blocking=False):
                work()
                self.release()
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        if self.is_mine:
            self.release()

    def close(self) -> bool:
        """Close the lock for all threads, once its owner has released it; returns whether it was open."""
        with suppress(EngineError), self:
            self.is_closed = True
            return True
        return False

    def check_open(self) -> None:
        if self.is_closed:
            raise EngineError("The model is closed.")


class TokenBuffer:
    """Token ids that grow at the end, and can be cut to an absolute length. Only a subclass changes them."""

    def __init__(self, token_ids: Seq[int] | TokenIds = ()) -> None:
        self._store: TokenIds = np.empty(64, np.int32)
        self.length = 0  # only `_add` and `_cut` change it
        self._add(token_ids)

    @property
    def token_ids(self) -> TokenIds:
        """A read-only view, [length], valid until the next change."""
        view = self._store[: self.length]
        view.flags.writeable = False
        return view

    def _add(self, token_ids: Seq[int] | TokenIds) -> None:
        new_len = self.length + len(token_ids)
        if new_len > len(self._store):
            self._store = np.concatenate((self._store[: self.length], np.empty(2 * new_len, np.int32)))
        self._store[self.length : new_len] = token_ids
        self.length = new_len

    def _cut(self, length: int) -> None:
        assert 0 <= length <= self.length, f"{self.length} tokens cannot be cut to {length}"
        self.length = length


class Sequence(TokenBuffer):
    """Tokens with valid KV in one engine. Only `extend` and the engine add tokens, only `truncate` removes them.

    `slot` is the engine's own handle: a KV sequence id or a cache object. `reuse` selects later sequences that may take
    over the KV after `close`; None selects none. `media` are the recordings of the audio tokens.
    """

    def __init__(
        self, engine: Engine, slot: Any, media: Recordings = (), reuse: Reuse | None = None,
        token_ids: Seq[int] | TokenIds = (), whole_len: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(token_ids)
        self.engine, self.slot, self.reuse, self.media = engine, slot, reuse, media
        self.whole_len = whole_len  # tokens fed as whole parts of a prompt; only the engine raises it
        self.prefill_cost = Cost(num_cached=self.length)  # cost of the prompt, not taken yet; only the engine writes it
        self.is_closed = False  # only `close` changes it

    def extend(self, token_ids: Seq[int] | TokenIds) -> Rows:
        """Feed tokens at the end; returns logits [len(token_ids), vocab.size].

        Row i has the raw logits for the token after token_ids[: i + 1]. Rows are valid until the next forward of the
        same engine. Raises EngineError and leaves the sequence unchanged if the engine refuses.
        """
        return self.engine.extend_batch([(self, token_ids)])[0]

    def truncate(self, length: int) -> None:
        """Cut to an absolute length; the current length changes nothing. Raises EngineError if refused."""
        with self.engine.floor:
            self.check_open()
            if not 0 <= length <= self.length:
                raise EngineError(f"Cannot truncate a sequence of {self.length} tokens to {length}.")
            if length < self.length:
                self.engine.roll_back(self, length)
                self._cut(length)
                self.whole_len = min(self.whole_len, length)
                self._assert_kv()

    def align(self, token_ids: TokenIds) -> None:
        """Cut to the longest prefix shared with `token_ids`, but leave at least one of these to feed. Comparing the KV
        cache with the true text makes bookkeeping of rejections unnecessary (F1 to F3)."""
        shared = min(self.length, len(token_ids) - 1)
        differs = np.flatnonzero(self.token_ids[:shared] != token_ids[:shared])
        self.truncate(int(differs[0]) if len(differs) else shared)

    def take_prefill_cost(self) -> Cost:
        cost, self.prefill_cost = self.prefill_cost, Cost()
        return cost

    def check_open(self) -> None:
        if self.is_closed:
            raise EngineError("This sequence is closed.")

    def discard(self) -> None:
        """Close without keeping the KV, which may be incomplete."""
        self.reuse = None
        self.close()

    def close(self) -> None:
        """Return the KV memory; the sequence cannot be used afterwards. Any thread may close it at any time."""
        if not self.is_closed:
            self.is_closed = True
            self.engine.drop(self)

    def record(self, token_ids: Seq[int] | TokenIds) -> None:
        """Record tokens that the engine has just written into the KV cache. Only engines call this."""
        self._add(token_ids)
        self._assert_kv()

    def _assert_kv(self) -> None:
        if (kv_len := self.engine.kv_length(self)) != self.length:
            raise EngineError(f"The KV cache holds {kv_len} tokens, the sequence {self.length}.")


Feeds = Seq[tuple[Sequence, Seq[int] | TokenIds]]


class Model(ABC):
    """The part of an `Engine` that differs between kinds. `Engine` calls it under its lock, with valid arguments.

    Subclasses of `Engine` set the attributes and implement the five abstract methods from `allocate` to `kv_length`.
    `fingerprint` identifies the weights, wherever their files are. `vocab` does not refer to the engine.
    """

    name: str
    fingerprint: str
    vocab: Vocab
    context_len: int
    lock: FairLock
    takes_audio: bool = False
    max_batch_rows: int = 512  # most rows of a forward without logits
    max_output_rows: int = 512  # most rows of a forward with logits
    max_sequences: int = 1  # KV is kept for reuse while fewer are open
    slots: Slots | None = None  # limits open sequences, if any; further generations wait
    has_kernels: bool = True  # kernels may change with the length, so rows of longer texts are compared again
    probed_len: int = 255  # tokens up to which the profile is valid
    is_full_precision: bool = True  # 16 bits hide differences: rows equal in a probe may differ later
    profile: RowProfile = NOT_PROBED
    default_execution: Execution = "exact"
    about_rows: str = ""  # a line on the weights' type, and how many rows keep their bits
    can_copy: bool = False  # whether it has `copy`

    @property
    def floor(self) -> AbstractContextManager[object]:
        """The engine's lock for `with`, reentrant. While a thread holds it, no other thread can overwrite rows."""
        return nullcontext() if self.lock.is_mine else self.lock

    @abstractmethod
    def allocate(self, num_tokens: int) -> Any:
        """Return a handle for a new, empty KV sequence, which will soon hold `num_tokens`."""

    @abstractmethod
    def forward(self, feeds: Feeds, *, want_logits: bool) -> list[Rows]:
        """Run the model and write KV, on failure perhaps a part. Returns rows per feed, empty without `want_logits`."""

    @abstractmethod
    def roll_back(self, sequence: Sequence, length: int) -> None:
        """Drop KV from position `length` on; raises EngineError if the cache cannot."""

    @abstractmethod
    def release(self, sequence: Sequence) -> None: ...

    @abstractmethod
    def kv_length(self, sequence: Sequence) -> int:
        """Return the number of tokens by the cache's own count."""

    def copy(self, source: Sequence, target: Sequence, length: int) -> None:  # noqa: B027
        """Copy the KV of the first `length` tokens of `source` into the empty `target`, to the bit."""

    def free(self) -> None:  # noqa: B027  engines in Python have nothing to free
        """Called once, by `Engine.close`."""

    def media(self, samples: npt.NDArray[np.float32]) -> Media:
        """Return features of mono audio [num_samples] at 16 kHz. Raises PromptError if the engine takes no audio."""
        raise self._no_audio()

    def audio_tokens(self, media: Media) -> tuple[int, ...]:
        """Return the prompt tokens for a recording, its two marks included. Raises PromptError like `media`."""
        raise self._no_audio()

    def check_media(self, prompt: Seq[int] | TokenIds, media: Recordings) -> None:
        """Raise PromptError unless the prompt's audio tokens match `media`, in order."""
        if media:
            raise self._no_audio()

    def _no_audio(self) -> PromptError:
        hint = "Use a Qwen2.5-Omni model, such as Qwen/Qwen2.5-Omni-3B; tiny-omni-edge is a toy of that kind."
        return PromptError(f"The model {self.name} takes no audio.", hint=hint)

    @property
    def num_cells(self) -> int:
        """Tokens that the sequences have memory for, if memory grows with them; else 0."""
        return 0

    @property
    def invariant_rows(self) -> int:
        return self.profile.invariant_rows

    @property
    def forward_ms(self) -> tuple[float, ...]:
        """Milliseconds for 1, 2, … rows. More rows are never faster: a longer time for fewer rows was a busy moment."""
        return tuple(np.minimum.accumulate(self.profile.forward_ms[::-1])[::-1].tolist())

    def shapes(self, feeds: Feeds) -> list[Hashable]:
        """Return the shapes of a forward. Forwards of the same shape take the same path through the kernels."""
        return [tuple(sorted((sequence.length.bit_length(), len(token_ids)) for sequence, token_ids in feeds))]

    def max_rows(self, execution: Execution | None = None) -> int:
        """Return the most rows of one forward: `invariant_rows` if exact, else all. None is the engine's default."""
        return self.invariant_rows if (execution or self.default_execution) == "exact" else self.max_output_rows

    def extend_batch(self, feeds: Feeds) -> list[Rows]:
        """Feed several sequences in one forward. Up to `invariant_rows` the result equals feeding one by one. Each
        sequence may occur once. Returns logits [len(token_ids), vocab.size] per feed, in order."""
        with self.floor:
            if len(dict(feeds)) < len(feeds):
                raise EngineError("A sequence may occur only once in a batch.")
            num_rows = longest = 0
            for sequence, token_ids in feeds:
                sequence.check_open()
                if len(token_ids) == 0:
                    raise EngineError("Nothing to feed.")
                if (length := sequence.length + len(token_ids)) > self.context_len:
                    raise EngineError(f"{length} tokens do not fit in a context of {self.context_len}.")
                self.check_ids(token_ids)
                num_rows, longest = num_rows + len(token_ids), max(longest, sequence.length)
            if num_rows > self.max_output_rows:
                raise EngineError(f"{num_rows} rows are too many for one forward.")
            if self.has_kernels and longest > self.probed_len and 1 < num_rows <= self.invariant_rows:
                return self.feed_compared(feeds)
            return self.feed(feeds)

    def check_ids(self, token_ids: Seq[int] | TokenIds, kind: type[SkydraftError] = EngineError) -> None:
        ids: npt.NDArray[np.int64] = np.asarray(token_ids, np.int64)
        if ids.min() < 0 or ids.max() >= self.vocab.size:
            raise kind(f"A token id is outside the vocabulary of {self.vocab.size} tokens.")

    def feed(self, feeds: Feeds, *, want_logits: bool = True) -> list[Rows]:
        """Run one forward of all feeds and record the tokens; on failure all KV stays as before. For `Engine` only."""
        try:
            rows = self.forward(feeds, want_logits=want_logits)
        except BaseException:
            for sequence, _ in feeds:
                self.roll_back(sequence, sequence.length)
            raise
        for sequence, token_ids in feeds:
            sequence.record(token_ids)
        return rows

    @abstractmethod
    def feed_compared(self, feeds: Feeds) -> list[Rows]:
        """Feed rows whose bits at this length are unknown, and compare them with single rows."""
