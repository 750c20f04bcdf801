"""Checkpoints that transformers can load, text in and text out. Each sequence has its own KV cache."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from skydraft.engines.adapter import AdaptedModel
from skydraft.engines.base import Engine, Feeds, Sequence
from skydraft.engines.checkpoints.engine import failing, load_checkpoint, load_library, read_vocab, weights_fingerprint
from skydraft.engines.options import EngineOptions
from skydraft.engines.probe import cpu_model, profile_of
from skydraft.engines.vocab import Rows, TokenIds, Vocab
from skydraft.errors import BrokenModel, EngineError

_WEIGHTS = ("*.safetensors", "*.bin", "config.json")
_SMALL_MODEL = 50_000_000  # parameters
_GROWING, _SLIDING, _EMPTY = "DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"


@dataclass(slots=True)
class Slot:
    """The KV cache of one sequence: a `DynamicCache` that keeps every position in every layer."""

    cache: Any


class TransformersEngine(Engine):
    """A checkpoint in transformers. Several sequences are fed one after another. `num_threads` other than 0 sets
    torch's threads for the whole process."""

    can_copy = True
    default_execution = "throughput"  # rounding depends on the number of rows in a forward
    _model_class: ClassVar[str] = "AutoModelForCausalLM"
    _unused: ClassVar[tuple[str, ...]] = ()  # parts of the model to drop after loading

    def __init__(
        self, path: Path, options: EngineOptions, *, name: str = "", base: TransformersEngine | None = None,
        adapter: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name or path.name)
        torch, _ = self._torch, self._transformers = load_library()
        self.path, self._options = path, options
        if options.num_threads:
            torch.set_num_threads(options.num_threads)
        self._model, self.vocab, self._adapted = base.loaded() if base else self._load()
        # Threads of a small model would only wait for each other.
        is_small = self._model.num_parameters() < _SMALL_MODEL and not options.num_threads
        self._num_threads = 1 if is_small else torch.get_num_threads()
        self.fingerprint, self._label = self._adapted.fingerprint, ""
        if adapter:
            self._label, self.fingerprint = self._adapted.add(adapter, self.name)
        model, self._device = self._model, self._model.device
        self.on_gpu = self._device.type == "cuda"
        config = model.config.get_text_config(decoder=True)
        if config.vocab_size < self.vocab.size:
            says = f"The tokenizer in {path} has {self.vocab.size} tokens, the model only {config.vocab_size}."
            raise BrokenModel(says)
        self.context_len = min(options.context_len, getattr(config, "max_position_embeddings", options.context_len))
        self.max_sequences = options.max_sequences
        self._check_cache()
        self.is_full_precision = options.dtype == "float32"
        self.profile = profile_of(self, self._profile_key(options), options)

    def _load(self) -> tuple[Any, Vocab, AdaptedModel]:
        model, tokenizer = load_checkpoint(self.path, self._model_class, self._options, unused=self._unused)
        fingerprint = weights_fingerprint(file for kind in _WEIGHTS for file in self.path.glob(kind))
        return model, read_vocab(tokenizer, model.generation_config), AdaptedModel(model, fingerprint)

    def loaded(self) -> tuple[Any, Vocab, AdaptedModel]:
        """Return the parts that another engine on the same weights shares."""
        self.lock.check_open()
        return self._model, self.vocab, self._adapted

    def open_adapted(self, adapter: Path) -> TransformersEngine:
        return TransformersEngine(self.path, self._options, name=self.name, base=self, adapter=adapter)

    def _check_cache(self) -> None:
        with failing(self._transformers, "makes no KV cache", EngineError):
            kinds = {type(layer).__name__ for layer in self._new_cache().layers}
        if unfit := sorted(kinds - {_GROWING, _EMPTY}):
            says = f"The KV cache of {self.name} cannot be rolled back: it has layers of the kind {unfit[0]}."
            raise EngineError(says, hint="Use a model without recurrent layers.")

    def _profile_key(self, options: EngineOptions) -> str:
        torch, on_gpu = self._torch, self._device.type == "cuda"
        processor = torch.cuda.get_device_name(self._device) if on_gpu else torch.backends.cpu.get_cpu_capability()
        versions = (torch.__version__, self._transformers.__version__)
        how = (self._device, options.dtype, self._num_threads)
        return "|".join(map(str, (self.fingerprint, *versions, *how, cpu_model(), processor)))

    def allocate(self, num_tokens: int) -> Slot:
        return Slot(self._new_cache())

    def _new_cache(self) -> Any:
        cache = self._transformers.DynamicCache(config=self._model.config)
        growing = self._transformers.cache_utils.DynamicLayer
        # A sliding layer forgets tokens that a rollback may need. The mask hides tokens before the window anyway.
        cache.layers = [growing() if type(layer).__name__ == _SLIDING else layer for layer in cache.layers]
        return cache

    def forward(self, feeds: Feeds, *, want_logits: bool) -> list[Rows]:
        does = f"refused a forward of {sum(len(token_ids) for _, token_ids in feeds)} rows"
        with (
            failing(self._transformers, does, EngineError),
            ExitStack() as after, self._torch.inference_mode(), self._adapted.using(self._label),
        ):  # fmt: skip
            after.callback(self._torch.set_num_threads, self._torch.get_num_threads())
            self._torch.set_num_threads(self._num_threads)
            rows = [self._run_one(*feed, want_logits) for feed in feeds]
            # 16 bits become float32 without loss. Copying waits for the forward, so that its time is measured.
            return [each[:, : self.vocab.size].float().cpu().numpy() for each in rows]

    def _run_one(self, sequence: Sequence, token_ids: Seq[int] | TokenIds, want_logits: bool) -> Any:
        positions = self._position_ids(sequence.length, len(token_ids))
        num_wanted = len(token_ids) if want_logits else 1
        return self._run(self._inputs(sequence, token_ids), positions, sequence.slot.cache, num_wanted)

    def _inputs(self, sequence: Sequence, token_ids: Seq[int] | TokenIds) -> Any:
        """Return the model's input for the next tokens: ids [1, num_rows], or embeddings [1, num_rows, hidden_size]."""
        return self._torch.tensor(np.array([token_ids], np.int64), device=self._device)

    def _run(self, inputs: Any, position_ids: Any, cache: Any, num_wanted: int) -> Any:
        """Return the last rows of logits [num_wanted, padded vocabulary] as a torch tensor."""
        output = self._model(
            input_ids=inputs, position_ids=position_ids, use_cache=True, logits_to_keep=num_wanted,
            **{cache_argument(self._model.__class__): cache},
        )  # fmt: skip
        return output.logits[0]

    def _position_ids(self, base: int, num_rows: int) -> Any:
        return self._torch.arange(base, base + num_rows, device=self._device)[None]

    def copy(self, source: Sequence, target: Sequence, length: int) -> None:
        cache = self._new_cache()
        for index, layer in enumerate(source.slot.cache.layers):
            if getattr(layer, "keys", None) is not None:
                # [1, heads, length, head_dim]; copied, so that the source can be freed
                cache.update(layer.keys[..., :length, :].clone(), layer.values[..., :length, :].clone(), index)
        target.slot.cache = cache

    def roll_back(self, sequence: Sequence, length: int) -> None:
        # Not by `crop`, which is relative: after a failed forward the layers may differ in length.
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
        if self._label:
            self._adapted.remove(self._label)
        self._model = None


@functools.cache
def cache_argument(model: Callable[..., Any]) -> str:
    """Return the name of the KV cache argument in a model class's forward; transformers renamed it in 5.24."""
    return "cache" if "cache" in inspect.signature(getattr(model, "forward")).parameters else "past_key_values"  # noqa: B009


def _written(slot: Slot) -> list[Any]:
    return [layer for layer in slot.cache.layers if getattr(layer, "keys", None) is not None]
