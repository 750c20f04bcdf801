"""The contract of every engine: a sequence is its tokens, and its KV cache is exactly as long as they are."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.errors import EngineError, OptionError, PromptError
from skydraft.types import Media

Quantization = Literal["none", "8bit", "4bit"]

# [num_rows, vocab.size], numpy or torch: rows stay where the engine has them.
Rows: TypeAlias = Any


class TokenBuffer:
    """Token ids that grow at the end and are cut to an absolute length. The view it hands out is read-only."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        initial = np.fromiter(token_ids, np.int32)
        self._store: TokenIds = np.empty(max(64, 2 * len(initial)), np.int32)
        self._store[: len(initial)] = initial
        self._len = len(initial)

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
            grown = np.empty(2 * new_len, np.int32)
            grown[: self._len] = self._store[: self._len]
            self._store = grown
        self._store[self._len : new_len] = token_ids
        self._len = new_len

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        if not 0 <= length <= self._len:
            raise ValueError(f"cannot cut {self._len} tokens to {length}")
        self._len = length


@dataclass(frozen=True, slots=True)
class RowProfile:
    """What forwards of n rows cost and give, measured on this machine.

    `invariant_rows`: how many rows one forward may hold and still be bit-identical to one row at a time.
    `forward_ms[n - 1]`: median time of a forward of n rows, milliseconds.
    """

    invariant_rows: int
    forward_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a model; each engine takes what applies to it.

    `num_threads` 0 means all cores. `gpu_layers` is for GGUF files (-1: all). `device` and `dtype` are for
    transformers models, `quantization` for those on a GPU. `shared_cache` lets sequences of a GGUF model share one KV
    cache, so that any feeds fit into one forward; the cells of a sequence lose their order then, and logits their
    bit-equality.
    """

    context_len: int = 4096
    max_sequences: int = 1
    shared_cache: bool = False
    num_threads: int = 0
    gpu_layers: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    quantization: Quantization = "none"
    profile_path: Path | None = None

    def __post_init__(self) -> None:
        if self.context_len < 16:
            raise OptionError(f"A context of {self.context_len} tokens is too short.", hint="Use --context 16 or more.")
        if self.num_threads < 0:
            raise OptionError(f"--threads must not be negative, like {self.num_threads}.")
        if self.quantization not in get_args(Quantization):
            raise OptionError(f"--quantization must be none, 8bit or 4bit, not '{self.quantization}'.")


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """What filling a sequence with its prompt took so far. `encode_ms` is the part of `prefill_ms` for its audio."""

    prefill_ms: float = 0.0
    encode_ms: float = 0.0


class Sequence:
    """Tokens with valid KV in one engine. `extend` is the only way in, `truncate` the only way out."""

    def __init__(self, engine: Engine, slot: Any) -> None:
        self.engine = engine
        self.slot = slot  # the engine's own handle: a KV sequence id or a cache object
        self.prefill_cost = PrefillCost()  # only the engine writes it
        self._tokens = TokenBuffer()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether its memory was given back."""
        return self._closed

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
        if self._closed:
            raise EngineError("This sequence is closed.")
        if not 0 <= length <= self.length:
            raise EngineError(f"Cannot truncate a sequence of {self.length} tokens to {length}.")
        if length < self.length:
            self.engine.roll_back(self, length)
            self._tokens.truncate(length)
            self._assert_kv()

    def close(self) -> None:
        """Give the KV memory back. The sequence cannot be used afterwards."""
        if not self._closed:
            self._closed = True
            self.engine.release(self)

    def record(self, token_ids: Seq[int] | TokenIds) -> None:
        """Note tokens that the engine has just written into the KV cache. Only engines call this."""
        self._tokens.extend(token_ids)
        self._assert_kv()

    def _assert_kv(self) -> None:
        kv_len = self.engine.kv_length(self)
        if kv_len != self.length:
            raise EngineError(f"The KV cache holds {kv_len} tokens, the sequence {self.length}.")


class Engine(ABC):
    """A model that gives logits. Capability is this type: what is no Engine cannot draft or verify.

    Subclasses set the attributes and write the five abstract methods; validation and bookkeeping are here.
    `fingerprint` names the weights, wherever their files lie.
    """

    name: str
    fingerprint: str
    vocab: Vocab
    context_len: int
    takes_audio: bool = False
    max_batch_rows: int = 512  # most rows of a forward without logits
    max_output_rows: int = 512  # most rows of a forward with logits
    _profile: RowProfile | None = None

    @property
    def profile(self) -> RowProfile:
        """Invariant rows and forward times, probed at load."""
        if self._profile is None:
            raise EngineError(f"The engine {self.name} was not probed.")
        return self._profile

    @property
    def invariant_rows(self) -> int:
        """How many rows one forward may hold and still be bit-identical to one row at a time."""
        return self.profile.invariant_rows

    def open(self, prompt: Seq[int] | TokenIds, media: Media | None = None) -> Sequence:
        """A new sequence holding all of `prompt` but its last token, which the first `extend` feeds.

        So the logits of the first new token come from a feed like any other. `media` is what the prompt's audio
        tokens stand for. Raises PromptError.
        """
        sequence = self.begin(prompt, media)
        try:
            while self.prefill(sequence, prompt):
                pass
        except BaseException:
            sequence.close()
            raise
        return sequence

    def begin(self, prompt: Seq[int] | TokenIds, media: Media | None = None) -> Sequence:
        """An empty sequence for `prompt`, to be filled by `prefill`: `open` in steps. Raises PromptError."""
        self.check_prompt(prompt, media)
        return Sequence(self, self.allocate())

    def prefill(self, sequence: Sequence, prompt: Seq[int] | TokenIds) -> bool:
        """Feed the next part of all of `prompt` but its last token; returns whether there is more to feed.

        Parts end at the same places whatever lies between the calls, so that a prompt always goes in the same way.
        """
        start, end = sequence.length, len(prompt) - 1
        chunk = prompt[start : min(start + self.max_batch_rows, end)]
        if len(chunk):
            began = time.perf_counter()
            try:
                self.forward([(sequence, chunk)], want_logits=False)
                sequence.record(chunk)
            finally:
                spent_ms = sequence.prefill_cost.prefill_ms + (time.perf_counter() - began) * 1e3
                sequence.prefill_cost = replace(sequence.prefill_cost, prefill_ms=spent_ms)
        return sequence.length < end

    def media(self, samples: npt.NDArray[np.float32]) -> Media:
        """Features of mono audio [num_samples] at 16 kHz. Raises PromptError, as every engine without ears does."""
        raise self._no_audio()

    def audio_tokens(self, media: Media) -> tuple[int, ...]:
        """The part of a prompt that stands for `media`, its two marks included. Raises PromptError like `media`."""
        raise self._no_audio()

    def check_media(self, prompt: Seq[int] | TokenIds, media: Media | None) -> None:
        """Raise PromptError unless the prompt's audio tokens are those of `media`."""
        if media is not None:
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
        if len({id(sequence) for sequence, _ in feeds}) < len(feeds):
            raise EngineError("A sequence may occur once in a batch.")
        for sequence, token_ids in feeds:
            self._check_feed(sequence, token_ids)
        rows = self.forward(feeds, want_logits=True)
        for sequence, token_ids in feeds:
            sequence.record(token_ids)
        return rows

    def check_prompt(self, prompt: Seq[int] | TokenIds, media: Media | None = None) -> None:
        """Raise PromptError unless the prompt has tokens, all in the vocabulary, leaves room for one more and fits
        `media`."""
        if len(prompt) == 0:
            raise PromptError("The prompt is empty.", hint="Give at least one word.")
        if len(prompt) >= self.context_len:
            raise PromptError(
                f"The prompt has {len(prompt)} tokens, the context of {self.name} holds {self.context_len}.",
                hint="Shorten the prompt or raise --context.",
            )
        self._check_ids(prompt)
        self.check_media(prompt, media)

    def _check_feed(self, sequence: Sequence, token_ids: Seq[int] | TokenIds) -> None:
        if sequence.is_closed:
            raise EngineError("This sequence is closed.")
        if len(token_ids) == 0:
            raise EngineError("Nothing to feed.")
        if sequence.length + len(token_ids) > self.context_len:
            raise EngineError(
                f"{sequence.length} + {len(token_ids)} tokens do not fit in a context of {self.context_len}."
            )
        self._check_ids(token_ids)

    def _check_ids(self, token_ids: Seq[int] | TokenIds) -> None:
        ids: npt.NDArray[np.int64] = np.asarray(token_ids, np.int64)
        if ids.min() < 0 or ids.max() >= self.vocab.size:
            raise EngineError(f"A token id is outside of the vocabulary of {self.vocab.size}.")

    @abstractmethod
    def allocate(self) -> Any:
        """A handle for a new, empty KV sequence."""

    @abstractmethod
    def forward(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]], *, want_logits: bool) -> list[Rows]:
        """Run the model and write KV. On failure the KV of every sequence is as before. Returns rows per feed."""

    @abstractmethod
    def roll_back(self, sequence: Sequence, length: int) -> None:
        """Drop KV from position `length` on; raises EngineError when the cache cannot."""

    @abstractmethod
    def release(self, sequence: Sequence) -> None:
        """Free the KV of a sequence."""

    @abstractmethod
    def kv_length(self, sequence: Sequence) -> int:
        """How many tokens the cache itself says it holds."""

    def close(self) -> None:
        """Free the model. The engine cannot be used afterwards."""
        return None
