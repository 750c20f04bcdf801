"""The contract of every engine: a sequence is its tokens, and its KV cache is exactly as long as they are."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from skydraft.config import Execution
from skydraft.engines.exactness import PROBED_LEN, RowCheck
from skydraft.engines.model import Model
from skydraft.engines.options import RowProfile
from skydraft.engines.prefix_cache import PrefixCache
from skydraft.engines.rows import Rows, on_host
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.errors import ContextExceeded, EngineError, PromptError, SkydraftError
from skydraft.types import Cost, Recordings, Reuse


class Floor:
    """The lock of one engine, for `with`. Threads get it in the order in which they asked; its owner may take it again.

    While a thread has it no other can overwrite rows. Once it is closed, `with` raises EngineError.
    """

    def __init__(self, name: str) -> None:
        self.is_closed = False  # only `close` changes it
        self._name = name
        self._owner = 0  # id of the thread that has the lock, 0 if none has
        self._depth = 0  # how often the owner has taken it
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        # Reentrant: the garbage collector may close a sequence, which calls `try_acquire`, anywhere in here.
        self._state = threading.RLock()

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            self._depth += 1
        else:
            self.acquire()
        if self.is_closed:
            self.release()
            self.check_open()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Wait for the lock, in a thread that does not have it."""
        with self._state:
            if not self._owner:
                self._depth, self._owner = 1, threading.get_ident()
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(mine := (threading.get_ident(), turn))
        try:
            turn.acquire()  # the owner before releases it, and has made this thread the owner
        except BaseException:  # Ctrl-C, above all
            with self._state:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                    raise
            self.release()
            raise

    def try_acquire(self) -> bool:
        """Take the lock if it is open and no thread has it, not even this one; returns whether that was so."""
        with self._state:
            if self._owner or self.is_closed:
                return False
            self._depth, self._owner = 1, threading.get_ident()
            return True

    def release(self) -> None:
        """Undo one `acquire`; the last one hands the lock to the thread that has waited longest."""
        if self._depth > 1:
            self._depth -= 1
            return
        with self._state:
            if self._waiting:
                self._owner, turn = self._waiting.popleft()
                turn.release()
            else:
                self._owner = 0

    def close(self) -> bool:
        """Close the lock for all threads, once its owner has released it; returns whether it was open."""
        with suppress(EngineError), self:
            self.is_closed = True
            return True
        return False

    def check_open(self) -> None:
        """Raise EngineError if the lock, and so the engine, is closed."""
        if self.is_closed:
            raise EngineError(f"{self._name} is closed.")


class TokenBuffer:
    """Token ids that grow at the end and are cut to an absolute length. Its view is read-only."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._store: TokenIds = np.empty(64, np.int32)
        self._len = 0
        self.extend(np.fromiter(token_ids, np.int32))

    def __len__(self) -> int:
        return self._len

    @property
    def view(self) -> TokenIds:
        """Read-only view of the tokens so far, [len]; valid until the next change."""
        view = self._store[: self._len]
        view.flags.writeable = False
        return view

    def extend(self, token_ids: Seq[int] | TokenIds) -> None:
        """Add tokens at the end."""
        new_len = self._len + len(token_ids)
        if new_len > len(self._store):
            self._store = np.concatenate((self._store[: self._len], np.empty(2 * new_len, np.int32)))
        self._store[self._len : new_len] = token_ids
        self._len = new_len

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        if not 0 <= length <= self._len:
            raise ValueError(f"cannot cut {self._len} tokens to {length}")
        self._len = length


class Sequence:
    """Tokens with valid KV in one engine. Only `extend` adds tokens, only `truncate` removes them.

    `reuse` says which later sequences may take over the KV after `close`, None that none may. `media` are the
    recordings behind the audio tokens.
    """

    def __init__(
        self, engine: Engine, slot: Any, *, reuse: Reuse | None = None, media: Recordings = (),
        token_ids: Iterable[int] = (), whole_len: int = 0,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.slot = slot  # the engine's own handle: a KV sequence id or a cache object
        self.reuse = reuse
        self.media = media
        self._tokens = TokenBuffer(token_ids)
        self.whole_len = whole_len  # how many went in as whole parts of a prompt; only the engine writes it
        self.prefill_cost = Cost(num_cached=self.length)  # of its prompt, not taken yet; only the engine writes it
        self.is_closed = False  # only `close` changes it

    @property
    def length(self) -> int:
        """How many tokens have valid KV."""
        return len(self._tokens)

    @property
    def token_ids(self) -> TokenIds:
        """Read-only view of the tokens with valid KV, [length]."""
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
                if length < self.whole_len:
                    self.whole_len = self.engine.prefixes.parts(self.engine).last_end(self.token_ids)
                self._assert_kv()

    def align(self, token_ids: TokenIds) -> None:
        """Cut to the longest prefix shared with `token_ids`, but leave at least one of these to feed.

        It compares the KV cache with the true text, so no rejection has to be remembered (F1 to F3).
        """
        shared = min(self.length, len(token_ids) - 1)
        differs = np.flatnonzero(self.token_ids[:shared] != token_ids[:shared])
        self.truncate(int(differs[0]) if len(differs) else shared)

    def take_prefill_cost(self) -> Cost:
        """What the prompt has cost since the last call."""
        cost, self.prefill_cost = self.prefill_cost, Cost()
        return cost

    def check_open(self) -> None:
        """Raise EngineError if the sequence is closed."""
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

    def own(self, vocab: Vocab) -> Vocab:
        """`vocab` for this engine: it decodes for ever, and encodes until the engine is closed."""
        return vocab.encoding_while(self.floor.check_open)

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

    def sequence(
        self, slot: Any, media: Recordings = (), reuse: Reuse | None = None, token_ids: Seq[int] | TokenIds = (),
        whole_len: int = 0,
    ) -> Sequence:  # fmt: skip
        """A handle for a slot that holds the KV of `token_ids`."""
        return Sequence(self, slot, reuse=reuse, media=media, token_ids=token_ids, whole_len=whole_len)

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

    def extend_batch(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]]) -> list[Rows]:
        """Feed several sequences in one forward: the same as one by one while all rows fit in `invariant_rows`.

        Each sequence may occur once. Returns logits [len(token_ids), vocab.size] per feed, in order.
        """
        with self.floor:
            if len({id(sequence) for sequence, _ in feeds}) < len(feeds):
                raise EngineError("A sequence may occur only once in a batch.")
            for sequence, token_ids in feeds:
                self._check_feed(sequence, token_ids)
            num_rows = sum(len(token_ids) for _, token_ids in feeds)
            longest = max(sequence.length for sequence, _ in feeds)
            is_due = self.has_kernels and longest > PROBED_LEN and self.is_probed
            if is_due and 1 < num_rows <= self.invariant_rows:
                return self._row_check.forward(self, feeds)
            return self.feed(feeds)

    def feed(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]]) -> list[Rows]:
        """One forward of all feeds, and their tokens noted. Only `extend_batch` and the check of its rows call this."""
        rows = [on_host(each) for each in self.forward(feeds, want_logits=True)]
        for sequence, token_ids in feeds:
            sequence.record(token_ids)
        return rows

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
