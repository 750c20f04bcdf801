"""Checkpoints that transformers can load, text in and text out. Each sequence has a KV cache of its own.

Rows of several sequences go side by side into one forward, without padding. Matrix products see all rows at once;
attention runs for each sequence alone, in the model's own implementation, with its own keys and mask. So logits have
the bits of one by one as long as matrix products of so many rows do (`Engine.invariant_rows`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from skydraft.engines import adapter
from skydraft.engines.base import Engine, Sequence
from skydraft.engines.checkpoint import first_line, load_checkpoint, load_library, read_vocab, weights_fingerprint
from skydraft.engines.options import EngineOptions
from skydraft.engines.probe import cpu_model, profile_of
from skydraft.engines.registry import EngineKind
from skydraft.engines.rows import Rows
from skydraft.engines.vocab import TokenIds
from skydraft.errors import BrokenModel, EngineError

_WEIGHTS = ("*.safetensors", "*.bin", "config.json")
_GROWING, _SLIDING, _EMPTY = "DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"
_SIDE_BY_SIDE = "skydraft_side_by_side"  # the name of an attention and of its masks in transformers
_SAME = 0.02  # of the largest logit: rows of other lengths differ in rounding, those of other texts by more

Feeds = Seq[tuple[Sequence, Seq[int] | TokenIds]]


@dataclass(slots=True)
class Slot:
    """The KV cache of one sequence: a `DynamicCache` that keeps every position in every layer."""

    cache: Any


class TransformersEngine(Engine):
    """One causal language model.

    Sequences are limited by memory only. Several feeds run side by side in one forward if the first ones show that the
    model allows it, else one after another. `num_threads` other than 0 sets the threads of torch for the whole process.
    Rows have the dtype of the model, lie on its device, and stay valid after later forwards.
    """

    _model_class: ClassVar[str] = "AutoModelForCausalLM"
    _unused: ClassVar[tuple[str, ...]] = ()  # parts of the model to drop after loading
    # What the forward of a model must take for its logits to be a function of the tokens alone.
    _needed: ClassVar[frozenset[str]] = frozenset({"position_ids", "past_key_values", "logits_to_keep"})

    def __init__(self, path: Path, options: EngineOptions, *, name: str = "") -> None:
        super().__init__(name or path.name)
        torch, _ = self._torch, self._transformers = load_library()
        self.path = path
        self.fingerprint = weights_fingerprint(self._weight_files())
        if options.num_threads:
            torch.set_num_threads(options.num_threads)
        model, tokenizer = load_checkpoint(path, self._model_class, options, unused=self._unused)
        if options.adapter:
            self.fingerprint = adapter.add_to(model, options.adapter, self.fingerprint, self.name)
        self._model, self._device = model, model.device
        self._is_fed_together: bool | None = None  # not tried yet
        self._check_forward()
        self.vocab = self.own(read_vocab(tokenizer, model.generation_config))
        self._decoder_config = config = model.config.get_text_config(decoder=True)
        if config.vocab_size < self.vocab.size:
            raise BrokenModel(
                f"The tokenizer in {path} has {self.vocab.size} tokens, the model only {config.vocab_size}."
            )
        self.context_len = min(options.context_len, getattr(config, "max_position_embeddings", options.context_len))
        self.max_sequences = options.max_sequences
        self._check_cache()
        self.is_full_precision = (options.dtype, options.quantization) == ("float32", "none")
        self._profile = profile_of(self, self._profile_key(options), options)

    def _check_forward(self) -> None:
        if missing := sorted(self._needed - set(signature(self._model.forward).parameters)):
            raise EngineError(
                f"{self.name} is a {type(self._model).__name__}, whose forward does not take {missing[0]}.",
                hint="Use a decoder-only model with attention.",
            )

    def _check_cache(self) -> None:
        kinds = {type(layer).__name__ for layer in self._new_cache().layers}
        if unfit := sorted(kinds - {_GROWING, _EMPTY}):
            raise EngineError(
                f"The KV cache of {self.name} cannot be rolled back: it has layers of the kind {unfit[0]}.",
                hint="Use a model without recurrent layers.",
            )

    def _weight_files(self) -> list[Path]:
        return sorted(file for kind in _WEIGHTS for file in self.path.glob(kind))

    def _profile_key(self, options: EngineOptions) -> str:
        torch, files = self._torch, self._weight_files()
        stats = [(file.name, file.stat().st_size, int(file.stat().st_mtime)) for file in files]
        on_gpu = self._device.type == "cuda"
        processor = torch.cuda.get_device_name(self._device) if on_gpu else torch.backends.cpu.get_cpu_capability()
        versions = (torch.__version__, self._transformers.__version__)
        how = (self._device, options.dtype, options.quantization, torch.get_num_threads())
        which = (self.path.resolve(), self.fingerprint, *stats)
        parts = (self.context_len, *which, *versions, *how, cpu_model(), processor)
        return "|".join(map(str, parts))

    def allocate(self) -> Slot:
        return Slot(self._new_cache())

    def _new_cache(self) -> Any:
        cache = self._transformers.DynamicCache(config=self._model.config)
        growing = self._transformers.cache_utils.DynamicLayer
        # A sliding layer forgets what a rollback would need. The mask hides what lies before the window all the same.
        cache.layers = [growing() if type(layer).__name__ == _SLIDING else layer for layer in cache.layers]
        return cache

    def forward(self, feeds: Feeds, *, want_logits: bool) -> list[Rows]:
        num_rows = sum(len(token_ids) for _, token_ids in feeds)
        if num_rows > (self.max_output_rows if want_logits else self.max_batch_rows):
            raise EngineError(f"{num_rows} rows are too many for one forward.")
        try:
            with self._torch.inference_mode():
                together = len(feeds) > 1 and self._can_feed_together()
                feed = self._feed_together if together else self._feed_in_turn
                rows = feed(feeds, want_logits)
            if not want_logits and self._device.type == "cuda":
                self._torch.cuda.synchronize(self._device)  # no row is read, but the time is taken
            return rows
        except BaseException as error:
            for sequence, _ in feeds:
                self.roll_back(sequence, sequence.length)
            if isinstance(error, Exception):
                raise EngineError(f"transformers refused a forward of {num_rows} rows: {first_line(error)}") from error
            raise

    def _feed_in_turn(self, feeds: Feeds, want_logits: bool) -> list[Rows]:
        return [
            self._run(
                self._inputs(sequence, token_ids), self._position_ids(sequence.length, len(token_ids)),
                sequence.slot.cache, want_logits,
            )
            for sequence, token_ids in feeds
        ]  # fmt: skip

    def _feed_together(self, feeds: Feeds, want_logits: bool) -> list[Rows]:
        inputs = self._torch.cat([self._inputs(*feed) for feed in feeds], 1)
        positions = [self._position_ids(sequence.length, len(token_ids)) for sequence, token_ids in feeds]
        parts = [Stretch(sequence.slot.cache, sequence.length, len(token_ids)) for sequence, token_ids in feeds]
        with side_by_side(parts, self._decoder_config) as cache:
            rows = self._run(inputs, self._torch.cat(positions, -1), cache, want_logits)
        return list(rows.split([part.num_rows for part in parts])) if want_logits else [None] * len(parts)

    def _can_feed_together(self) -> bool:
        """Whether texts have the same rows side by side as one after another: tried once, with two of two feeds."""
        if self._is_fed_together is None:
            self._is_fed_together = not _looks_at_all_positions(self._decoder_config) and self._tries_together()
        return self._is_fed_together

    def _tries_together(self) -> bool:
        alone, together = ([self.sequence(self.allocate()) for _ in range(2)] for _ in range(2))
        for lengths in ((3, 5), (4, 1)):
            texts = [
                [(7 * n + 3) % self.vocab.size for n in range(at, at + size)]
                for at, size in zip((0, 40), lengths, strict=True)
            ]
            expected = self._feed_in_turn(list(zip(alone, texts, strict=True)), True)
            try:
                rows = self._feed_together(list(zip(together, texts, strict=True)), True)
                apart = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, rows, strict=True))
            except Exception:  # a model may do anything with its cache; one after another works
                return False
            if not apart < _SAME:
                return False
            for sequence, text in (*zip(alone, texts, strict=True), *zip(together, texts, strict=True)):
                sequence.record(text)
        return True

    def _inputs(self, sequence: Sequence, token_ids: Seq[int] | TokenIds) -> Any:
        """The model's input for the next tokens, [1, num_rows] or [1, num_rows, hidden_size]."""
        return self._torch.tensor(np.array([token_ids], np.int64), device=self._device)

    def _run(self, inputs: Any, position_ids: Any, cache: Any, want_logits: bool) -> Rows:
        """A forward: [num_rows, vocab.size]. Rows of the head beyond the tokenizer are padding."""
        output = self._model(
            input_ids=inputs, position_ids=position_ids, past_key_values=cache, use_cache=True,
            logits_to_keep=inputs.shape[1] if want_logits else 1,
        )  # fmt: skip
        return output.logits[0, :, : self.vocab.size] if want_logits else None

    def _position_ids(self, base: int, num_rows: int) -> Any:
        """Positions of the next tokens, [1, num_rows]."""
        return self._torch.arange(base, base + num_rows, device=self._device)[None]

    def allocate_beginning(self) -> Slot:
        return self.allocate()

    def copy(self, source: Sequence, target: Sequence, length: int) -> None:
        cache = self._new_cache()
        for index, layer in enumerate(source.slot.cache.layers):
            if getattr(layer, "keys", None) is not None:
                # [1, heads, length, head_dim], not a view: the rest of the source can be freed
                cache.update(layer.keys[..., :length, :].clone(), layer.values[..., :length, :].clone(), index)
        target.slot.cache = cache

    def roll_back(self, sequence: Sequence, length: int) -> None:
        # Not by `crop`: it is relative, and after a forward that failed half-way the layers differ in length.
        if length == 0:
            sequence.slot.cache = self._new_cache()
        for layer in _written(sequence.slot):
            # [1, heads, length, head_dim]
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
        if self.kv_length(sequence) != length:
            raise EngineError(f"The KV cache of {self.name} cannot be rolled back to {length}.")

    def release(self, sequence: Sequence) -> None:
        sequence.slot = None

    def kv_length(self, sequence: Sequence) -> int:
        lengths = {tensor.shape[-2] for layer in _written(sequence.slot) for tensor in (layer.keys, layer.values)}
        if len(lengths) > 1:
            raise EngineError(f"The layers of a KV cache hold {sorted(lengths)} tokens.")
        return lengths.pop() if lengths else 0

    def free(self) -> None:
        self._model = None


def _looks_at_all_positions(config: Any) -> bool:
    """Whether rotary embeddings depend on the positions of all rows in the forward, so that parts change each other."""
    rotary = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    return "dynamic" in rotary or "longrope" in rotary or bool(getattr(config, "attn_temperature_tuning", False))


def _written(slot: Slot) -> list[Any]:
    return [layer for layer in slot.cache.layers if getattr(layer, "keys", None) is not None]


@dataclass(frozen=True)
class Stretch:
    """The part of one sequence in a forward: its cache, the tokens in that, and the number of new rows."""

    cache: Any
    length: int
    num_rows: int


class SideBySide:
    """The cache given to the model: it puts the keys of each part into the cache of that part.

    `attention` names the model's own attention.
    """

    def __init__(self, parts: Seq[Stretch], attention: str) -> None:
        self._parts = parts
        self._sizes = [part.num_rows for part in parts]
        self._attention = attention
        self._held: list[tuple[Any, Any]] | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: no tokens precede all parts. Positions say where each part begins."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0, as above."""
        return 0

    def get_mask_sizes(self, num_rows: int, layer_idx: int = 0) -> tuple[int, int]:
        """(keys, offset) of a mask that is not used: `masks` makes one for each part."""
        return num_rows, 0

    def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Keep new keys and values [1, heads, rows, head_dim] of a layer; returns them, since `attend` has the rest."""
        new = zip(self._parts, keys.split(self._sizes, -2), values.split(self._sizes, -2), strict=True)
        self._held = [part.cache.update(key, value, layer_idx, *args, **kwargs) for part, key, value in new]
        return keys, values

    def masks(self, **kwargs: Any) -> list[Any]:
        """The mask of each part, as the model would have it made for that part alone."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        made = ALL_MASK_ATTENTION_FUNCTIONS[self._attention]
        return [
            made(**kwargs | {
                "q_length": part.num_rows, "q_offset": part.length, "kv_length": part.length + part.num_rows,
            })
            for part in self._parts
        ]  # fmt: skip

    def attend(self, module: Any, query: Any, masks: list[Any], **kwargs: Any) -> list[Any]:
        """Attention of each part's rows, one after another: [1, num_rows, heads, head_dim] each."""
        held, self._held = self._held, None
        if held is None:
            raise NotImplementedError(f"{type(module).__name__} keeps no keys of its own")
        inner = _attention_of(self._attention, module)
        rows = zip(query.split(self._sizes, -2), held, masks, strict=True)
        return [inner(module, mine, key, value, mask, **kwargs)[0] for mine, (key, value), mask in rows]


_under_way: ContextVar[SideBySide] = ContextVar("side by side")


@contextmanager
def side_by_side(parts: Seq[Stretch], config: Any) -> Iterator[SideBySide]:
    """A cache for one forward of all parts. Replaces the attention in the decoder's `config` meanwhile."""
    _register()
    attention = config._attn_implementation
    token = _under_way.set(SideBySide(parts, attention))
    config._attn_implementation = _SIDE_BY_SIDE
    try:
        yield _under_way.get()
    finally:
        config._attn_implementation = attention
        _under_way.reset(token)


@cache
def _register() -> None:
    import torch
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> tuple[Any, None]:
        return torch.cat(_under_way.get().attend(module, query, attention_mask, **kwargs), 1), None

    ALL_ATTENTION_FUNCTIONS.register(_SIDE_BY_SIDE, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_SIDE_BY_SIDE, lambda **kwargs: _under_way.get().masks(**kwargs))


def _attention_of(name: str, module: Any) -> Any:
    """The model's own attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name == "eager":  # of which each model has its own
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


TAKES = frozenset({"num_threads", "device", "dtype", "quantization"})
KIND = EngineKind(
    "a transformers checkpoint",
    lambda spec, path, options: TransformersEngine(path, options, name=spec),
    takes=TAKES | {"adapter"},
    claims=Path.is_dir,
    general=True,
)
