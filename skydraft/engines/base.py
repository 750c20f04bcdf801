"""The contract of every engine: a sequence is its tokens, and its KV cache is exactly as long as they are."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from copy import copy
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from skydraft.config import Execution
from skydraft.engines.options import RowProfile
from skydraft.engines.prefix_cache import PrefixCache
from skydraft.engines.turns import Floor, Turns
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.errors import ContextExceeded, EngineError, PromptError, SkydraftError
from skydraft.types import Cost, Media, Recordings, Reuse

# [num_rows, vocab.size], numpy or torch: rows stay where the engine has them.
Rows: TypeAlias = Any


class TokenBuffer:
    """Token ids that grow at the end and are cut to an absolute length. The view it hands out is read-only."""

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
    """Tokens with valid KV in one engine. `extend` is the only way in, `truncate` the only way out.

    `reuse` says who may take up its KV when it is closed, None nobody; `media` is what its audio tokens stand for.
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
        with self.engine.turns:
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

        What the KV cache holds is compared with what is true, so no bookkeeping of rejections can go wrong (F1 to F3).
        """
        shared = min(self.length, len(token_ids) - 1)
        differs = np.flatnonzero(self.token_ids[:shared] != token_ids[:shared])
        self.truncate(int(differs[0]) if len(differs) else shared)

    def take_prefill_cost(self) -> Cost:
        """What its prompt has cost since this was last asked."""
        cost, self.prefill_cost = self.prefill_cost, Cost()
        return cost

    def check_open(self) -> None:
        """Raise EngineError if the sequence is closed."""
        if self.is_closed:
            raise EngineError("This sequence is closed.")

    def discard(self) -> None:
        """Close it, and let nobody take up its KV, which may be half done."""
        self.reuse = None
        self.close()

    def close(self) -> None:
        """Give the KV memory back. The sequence cannot be used afterwards. Any thread may do so at any time."""
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


class Engine(ABC):
    """A model that gives logits. Capability is this type: what is no Engine cannot draft or verify.

    Any thread may use an engine and its sequences, but one at a time: a call during a call of another thread raises
    EngineError at once and changes nothing. So does every call after `close`, or after the end of a `with` block.

    Subclasses set the attributes and write the five abstract methods, and `free`; validation and bookkeeping are here.
    `fingerprint` names the weights, wherever their files lie; `vocab` is what `own` makes of one.
    """

    fingerprint: str
    vocab: Vocab
    context_len: int
    takes_audio: bool = False
    max_batch_rows: int = 512  # most rows of a forward without logits
    max_output_rows: int = 512  # most rows of a forward with logits
    max_sequences: int = 1  # KV is kept for reuse while fewer are open
    is_full_precision: bool = True  # 16 bits round differences away: rows equal in a probe need not be equal later
    _profile: RowProfile | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.turns = Turns(name)
        self.floor = Floor()
        self.prefixes = PrefixCache()

    def drop(self, sequence: Sequence) -> None:
        """Keep or release a sequence: now, or before the next one begins while another thread uses the engine."""
        self.prefixes.drop(sequence)
        self._when_free(lambda: self.prefixes.settle(self))

    def forget_kept(self, older_than_s: float = 0.0) -> None:
        """Release what has been kept for reuse for so long, unless another thread uses the engine."""
        self._when_free(lambda: self.prefixes.forget(self, older_than_s))

    def _when_free(self, work: Callable[[], None]) -> None:
        # Who has the floor must not find the engine in use by one who tidies up.
        if self.floor.try_acquire():
            try:
                with suppress(EngineError), self.turns:
                    work()
            finally:
                self.floor.release()

    def own(self, vocab: Vocab) -> Vocab:
        """`vocab` for this engine: it decodes for ever, and encodes until the engine is closed."""
        own, encode, turns = copy(vocab), vocab.encode, self.turns

        def encode_if_open(text: str) -> list[int]:
            turns.check()
            return list(encode(text))

        own._encode = encode_if_open
        return own

    @property
    def profile(self) -> RowProfile:
        """Invariant rows and forward times, probed when it is loaded."""
        if self._profile is None:
            raise EngineError(f"The engine {self.name} was not probed.", hint="Open it with skydraft.load.")
        return self._profile

    @property
    def is_probed(self) -> bool:
        """Whether it has a profile."""
        return self._profile is not None

    def adopt_profile(self, profile: RowProfile) -> None:
        """Take what was measured for its profile."""
        self._profile = profile

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
        """A new sequence holding all of `prompt` but its last token, which the first `extend` feeds.

        So its logits come from a feed like any other. `media` is what the audio tokens stand for. Raises PromptError.
        """
        with self.floor:
            sequence = self.begin(prompt, media, reuse)
        try:
            self.fill(sequence, prompt)
        except BaseException:
            sequence.close()
            raise
        return sequence

    def begin(self, prompt: Seq[int] | TokenIds, media: Recordings = (), reuse: Reuse | None = None) -> Sequence:
        """A sequence for `prompt`, to be filled by `prefill`: `open` in steps. Raises PromptError.

        It is empty, or, with `reuse`, holds what it could take over of one that was kept.
        """
        with self.turns:
            self.check_prompt(prompt, media)
            return self.prefixes.begin(self, prompt, media, reuse)

    def sequence(
        self, slot: Any, media: Recordings = (), reuse: Reuse | None = None, token_ids: Seq[int] | TokenIds = (),
        whole_len: int = 0,
    ) -> Sequence:  # fmt: skip
        """A handle for a slot that holds the KV of `token_ids`."""
        return Sequence(self, slot, reuse=reuse, media=media, token_ids=token_ids, whole_len=whole_len)

    def fill(self, sequence: Sequence, prompt: Seq[int] | TokenIds) -> None:
        """Feed what is left of all of `prompt` but its last token; between its parts others may have the floor."""
        has_more = True
        while has_more:
            with self.floor:
                has_more = self.prefill(sequence, prompt)

    def prefill(self, sequence: Sequence, prompt: Seq[int] | TokenIds) -> bool:
        """Feed the next part of all of `prompt` but its last token; returns whether there is more to feed.

        Parts end at the same places, whatever lies between the calls or was reused, so that the KV of a prompt is a
        function of its tokens. The beginning is taken from where it was fed before.
        """
        with self.turns:
            sequence.check_open()
            self.prefixes.take_beginning(self, sequence, prompt)
            start, end = sequence.length, len(prompt) - 1
            part_end = self.prefixes.parts(self).next_end(start, prompt)
            chunk = prompt[start : min(part_end, end)]
            if len(chunk):
                began = time.perf_counter()
                try:
                    self.forward([(sequence, chunk)], want_logits=False)
                    sequence.record(chunk)
                    if sequence.whole_len == start and sequence.length == part_end:
                        sequence.whole_len = part_end
                        self.prefixes.keep_beginning(self, sequence)
                finally:
                    ms = (time.perf_counter() - began) * 1e3
                    sequence.prefill_cost += Cost(forward_ms=ms, prefill_ms=ms)
            return sequence.length < end

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
        return PromptError(
            f"The model {self.name} takes no audio.",
            hint="Use a Qwen2.5-Omni model, such as Qwen/Qwen2.5-Omni-3B; tiny-omni-edge is a toy of that kind.",
        )

    def extend_batch(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]]) -> list[Rows]:
        """Feed several sequences in one forward: the same as one by one while all rows fit in `invariant_rows`.

        Each sequence may occur once. Returns logits [len(token_ids), vocab.size] per feed, in order.
        """
        with self.turns:
            if len({id(sequence) for sequence, _ in feeds}) < len(feeds):
                raise EngineError("A sequence may occur only once in a batch.")
            for sequence, token_ids in feeds:
                self._check_feed(sequence, token_ids)
            rows = self.forward(feeds, want_logits=True)
            for sequence, token_ids in feeds:
                sequence.record(token_ids)
            return rows

    def check_prompt(self, prompt: Seq[int] | TokenIds, media: Recordings = ()) -> None:
        """Raise PromptError unless the prompt has tokens, all in the vocabulary, leaves room for one more and fits
        `media`."""
        self.turns.check()
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

    @abstractmethod
    def allocate(self) -> Any:
        """A handle for a new, empty KV sequence."""

    @abstractmethod
    def forward(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]], *, want_logits: bool) -> list[Rows]:
        """Run the model and write KV. On failure the KV of every sequence is as before. Returns rows per feed."""

    @abstractmethod
    def roll_back(self, sequence: Sequence, length: int) -> None:
        """Drop KV from position `length` on; raises EngineError when the cache cannot."""

    def allocate_beginning(self) -> Any:
        """A handle for the KV of the beginning of prompts, None where there is none; one that gives it has `copy`."""
        return None

    def copy(self, source: Sequence, target: Sequence, length: int) -> None:  # noqa: B027
        """Give `target`, which is empty, the KV of the first `length` tokens of `source`, to the bit."""

    @abstractmethod
    def release(self, sequence: Sequence) -> None:
        """Free the KV of a sequence."""

    @abstractmethod
    def kv_length(self, sequence: Sequence) -> int:
        """How many tokens the cache itself says it holds."""

    def free(self) -> None:  # noqa: B027  nothing to do where all is in Python
        """Let go of the model. Called once, by `close`."""

    def close(self) -> None:
        """Free the model; a second time changes nothing. Whatever uses it afterwards gets an EngineError."""
        if not self.turns.is_over:
            with self.floor, self.turns:  # somebody may be drafting ahead, for a moment
                self.turns.is_over = True
                self.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
