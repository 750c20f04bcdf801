"""What each kind of engine writes, its lock, and its sequences: tokens, and a KV cache exactly as long as they are."""

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
    """For `with`, once a thread (see `Engine.floor`). Once it is closed, `with` raises EngineError.

    Ctrl-C may interrupt a thread between any two steps of Python. So all that others wait for are locks in C, whose
    `with` releases them in one step; `__exit__` is that of RLock.
    """

    def __init__(self) -> None:
        self.is_closed = False  # only `close` changes it
        self._last = threading.Lock()  # which the thread that came last holds until it has this one

    @property
    def is_mine(self) -> bool:
        """Whether this thread has it."""
        return bool(self._is_owned())

    def __enter__(self) -> None:
        assert not self.is_mine, "it would wait for itself"
        mine = threading.Lock()
        try:
            with mine:
                before, self._last = self._last, mine  # one step; where it is not, only the order suffers
                with before:
                    self.acquire()
            self.check_open()
        except BaseException:  # Ctrl-C, above all
            self._give_up()
            raise

    def if_free(self, work: Callable[[], object]) -> None:
        """Do some work with the lock, if it is open and no thread has it, not even this one. It never waits, since the
        garbage collector may close a sequence anywhere."""
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
        """Close it for all threads, once its owner has released it; returns whether it was open."""
        with suppress(EngineError), self:
            self.is_closed = True
            return True
        return False

    def check_open(self) -> None:
        if self.is_closed:
            raise EngineError("The model is closed.")


class TokenBuffer:
    """Token ids that grow at the end and are cut to an absolute length. Its view is read-only."""

    def __init__(self, token_ids: Seq[int] | TokenIds = ()) -> None:
        self._store: TokenIds = np.empty(64, np.int32)
        self._len = 0
        self.extend(token_ids)

    def __len__(self) -> int:
        return self._len

    @property
    def view(self) -> TokenIds:
        """Valid until the next change."""
        view = self._store[: self._len]
        view.flags.writeable = False
        return view

    def extend(self, token_ids: Seq[int] | TokenIds) -> None:
        new_len = self._len + len(token_ids)
        if new_len > len(self._store):
            self._store = np.concatenate((self._store[: self._len], np.empty(2 * new_len, np.int32)))
        self._store[self._len : new_len] = token_ids
        self._len = new_len

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self._len, f"{self._len} tokens cannot be cut to {length}"
        self._len = length


class Sequence:
    """Tokens with valid KV in one engine. Only `extend` adds tokens, only `truncate` removes them.
    `slot` is the engine's own handle: a KV sequence id or a cache object. `reuse` says which later sequences may take
    over the KV after `close`, None that none may. `media` are the recordings behind the audio tokens.
    """

    def __init__(
        self, engine: Engine, slot: Any, media: Recordings = (), reuse: Reuse | None = None,
        token_ids: Seq[int] | TokenIds = (), whole_len: int = 0,
    ) -> None:  # fmt: skip
        self.engine, self.slot, self.reuse, self.media = engine, slot, reuse, media
        self._tokens = TokenBuffer(token_ids)
        self.whole_len = whole_len  # how many went in as whole parts of a prompt; only the engine raises it
        self.prefill_cost = Cost(num_cached=self.length)  # of its prompt, not taken yet; only the engine writes it
        self.is_closed = False  # only `close` changes it

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def token_ids(self) -> TokenIds:
        """A read-only view, [length]."""
        return self._tokens.view

    def extend(self, token_ids: Seq[int] | TokenIds) -> Rows:
        """Feed tokens at the end; returns logits [len(token_ids), vocab.size].

        Row i are the raw logits of the token that follows token_ids[: i + 1]. Valid until the next forward of the
        same engine. Raises EngineError and leaves the sequence as it was when the engine refuses.
        """
        return self.engine.extend_batch([(self, token_ids)])[0]

    def truncate(self, length: int) -> None:
        """Cut to an absolute length; the same length again changes nothing. Raises EngineError if refused."""
        with self.engine.floor:
            self.check_open()
            if not 0 <= length <= self.length:
                raise EngineError(f"Cannot truncate a sequence of {self.length} tokens to {length}.")
            if length < self.length:
                self.engine.roll_back(self, length)
                self._tokens.truncate(length)
                self.whole_len = min(self.whole_len, length)
                self._assert_kv()

    def align(self, token_ids: TokenIds) -> None:
        """Cut to the longest prefix shared with `token_ids`, but leave at least one of these to feed. It compares the
        KV cache with the true text, so no rejection has to be remembered (F1 to F3)."""
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
        """Close it without keeping its KV, which may be half done."""
        self.reuse = None
        self.close()

    def close(self) -> None:
        """Give the KV memory back; the sequence cannot be used afterwards. Any thread may close it at any time."""
        if not self.is_closed:
            self.is_closed = True
            self.engine.drop(self)

    def record(self, token_ids: Seq[int] | TokenIds) -> None:
        """Note tokens that the engine has just written into the KV cache. Only engines call this."""
        self._tokens.extend(token_ids)
        self._assert_kv()

    def _assert_kv(self) -> None:
        if (kv_len := self.engine.kv_length(self)) != self.length:
            raise EngineError(f"The KV cache holds {kv_len} tokens, the sequence {self.length}.")


Feeds = Seq[tuple[Sequence, Seq[int] | TokenIds]]


class Model(ABC):
    """The part of an `Engine` that differs from kind to kind. `Engine` calls it under its lock, with valid arguments.
    Subclasses of `Engine` set the attributes and write the five abstract methods from `allocate` to `kv_length`.
    `fingerprint` names the weights, wherever their files lie. `vocab` does not refer to the engine.
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
    slots: Slots | None = None  # if no more than these can be open: a generation then waits for its own
    has_kernels: bool = True  # whose path may depend on the length; then rows are compared further on in a text
    probed_len: int = 255  # tokens; the profile stands for shorter texts
    is_full_precision: bool = True  # 16 bits round differences away: rows equal in a probe need not be equal later
    profile: RowProfile = NOT_PROBED
    default_execution: Execution = "exact"
    about_rows: str = ""  # the type of the weights, and how many rows keep their bits
    can_copy: bool = False  # whether it has `copy`

    @property
    def floor(self) -> AbstractContextManager[object]:
        """The engine's lock for `with`, also within a `with` of its owner. While a thread has it no other can overwrite
        rows."""
        return nullcontext() if self.lock.is_mine else self.lock

    @abstractmethod
    def allocate(self, num_tokens: int) -> Any:
        """A handle for a new, empty KV sequence, which will soon hold so many tokens."""

    @abstractmethod
    def forward(self, feeds: Feeds, *, want_logits: bool) -> list[Rows]:
        """Run the model and write KV, on failure some or none. Rows per feed, not read without `want_logits`."""

    @abstractmethod
    def roll_back(self, sequence: Sequence, length: int) -> None:
        """Drop KV from position `length` on; raises EngineError when the cache cannot."""

    @abstractmethod
    def release(self, sequence: Sequence) -> None: ...

    @abstractmethod
    def kv_length(self, sequence: Sequence) -> int:
        """How many tokens the cache itself says it holds."""

    def copy(self, source: Sequence, target: Sequence, length: int) -> None:  # noqa: B027
        """Give `target`, which is empty, the KV of the first `length` tokens of `source`, to the bit."""

    def free(self) -> None:  # noqa: B027  nothing to do where all is in Python
        """Called once, by `Engine.close`."""

    def media(self, samples: npt.NDArray[np.float32]) -> Media:
        """Features of mono audio [num_samples] at 16 kHz. Raises PromptError, as every engine that takes none does."""
        raise self._no_audio()

    def audio_tokens(self, media: Media) -> tuple[int, ...]:
        """The part of a prompt that stands for `media`, its two marks included. Raises PromptError like `media`."""
        raise self._no_audio()

    def check_media(self, prompt: Seq[int] | TokenIds, media: Recordings) -> None:
        """Raise PromptError unless the prompt's audio tokens are those of `media`, in its order."""
        if media:
            raise self._no_audio()

    def _no_audio(self) -> PromptError:
        hint = "Use a Qwen2.5-Omni model, such as Qwen/Qwen2.5-Omni-3B; tiny-omni-edge is a toy of that kind."
        return PromptError(f"The model {self.name} takes no audio.", hint=hint)

    @property
    def num_cells(self) -> int:
        """Tokens that its sequences have memory for, where that grows with them."""
        return 0

    @property
    def invariant_rows(self) -> int:
        return self.profile.invariant_rows

    @property
    def forward_ms(self) -> tuple[float, ...]:
        """Times of 1, 2, … rows. A row more does not save time, so what took longer met a busy moment."""
        return tuple(np.minimum.accumulate(self.profile.forward_ms[::-1])[::-1].tolist())

    def shapes(self, feeds: Feeds) -> list[Hashable]:
        """Forwards of one kind have the same shapes and take the same path through the kernels."""
        return [tuple(sorted((sequence.length.bit_length(), len(token_ids)) for sequence, token_ids in feeds))]

    def max_rows(self, execution: Execution | None = None) -> int:
        """The most rows of one forward: those that change no bit, or all. None is the engine's default."""
        return self.invariant_rows if (execution or self.default_execution) == "exact" else self.max_output_rows

    def extend_batch(self, feeds: Feeds) -> list[Rows]:
        """Feed several sequences in one forward: the same as one by one while all rows fit in `invariant_rows`. Each
        sequence may occur once. Returns logits [len(token_ids), vocab.size] per feed, in order."""
        with self.floor:
            if len({id(sequence) for sequence, _ in feeds}) < len(feeds):
                raise EngineError("A sequence may occur only once in a batch.")
            for sequence, token_ids in feeds:
                sequence.check_open()
                if len(token_ids) == 0:
                    raise EngineError("Nothing to feed.")
                if (length := sequence.length + len(token_ids)) > self.context_len:
                    raise EngineError(f"{length} tokens do not fit in a context of {self.context_len}.")
                self.check_ids(token_ids)
            if (num_rows := sum(len(token_ids) for _, token_ids in feeds)) > self.max_output_rows:
                raise EngineError(f"{num_rows} rows are too many for one forward.")
            longest = max(sequence.length for sequence, _ in feeds)
            if self.has_kernels and longest > self.probed_len and 1 < num_rows <= self.invariant_rows:
                return self.feed_compared(feeds)
            return self.feed(feeds)

    def check_ids(self, token_ids: Seq[int] | TokenIds, kind: type[SkydraftError] = EngineError) -> None:
        ids: npt.NDArray[np.int64] = np.asarray(token_ids, np.int64)
        if ids.min() < 0 or ids.max() >= self.vocab.size:
            raise kind(f"A token id is outside the vocabulary of {self.vocab.size} tokens.")

    def feed(self, feeds: Feeds, *, want_logits: bool = True) -> list[Rows]:
        """One forward of all feeds, and their tokens noted; on failure all KV is as before. For `Engine` alone."""
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
        """Feed rows whose bits at this length are not known yet, and compare them with single rows."""
