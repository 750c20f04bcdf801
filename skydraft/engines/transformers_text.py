"""Checkpoints that transformers can load, text in and text out. Each sequence has a KV cache of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from skydraft.engines.base import Engine, EngineOptions, RowProfile, Rows, Sequence
from skydraft.engines.probe import PROBED_LEN, cpu_model, probe, remembered
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.engines.weights import weights_fingerprint
from skydraft.errors import BrokenModel, EngineError, MissingDependency, OptionError

_DTYPES = ("float32", "bfloat16", "float16")
_WEIGHTS = ("*.safetensors", "*.bin", "config.json")
# What the forward of a model must take for its logits to be a function of the tokens alone.
_NEEDED = {"position_ids", "past_key_values", "logits_to_keep"}
_GROWING, _SLIDING, _EMPTY = "DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"


def load_library() -> tuple[Any, Any]:
    """The modules torch and transformers. Raises MissingDependency when one is not installed."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingDependency(
            f"Checkpoint folders need torch and transformers, and {error.name or 'one of them'} is not installed.",
            hint="Run: pip install 'skydraft[transformers]'.",
        ) from error
    return torch, transformers


class TransformersEngine(Engine):
    """One causal language model. A slot is a `DynamicCache` that keeps every position in every layer.

    Sequences are limited by memory only. A forward runs its feeds one after another, each in a batch of one without
    padding: `extend_batch` gives the bits of one by one, and takes as long. `num_threads` other than 0 sets the
    threads of torch for the whole process. Rows have the dtype of the model, lie on its device, and stay valid
    after later forwards.
    """

    def __init__(self, path: Path, options: EngineOptions, *, name: str = "") -> None:
        torch, transformers = self._torch, self._transformers = load_library()
        self.name = name or path.name
        self.path = path
        self.fingerprint = weights_fingerprint(self._weight_files())
        self._device = _check_device(torch, options.device)
        if options.num_threads:
            torch.set_num_threads(options.num_threads)
        model, tokenizer = _load(torch, transformers, path, options.dtype)
        self._model = model.to(self._device)
        _check_forward(self.name, model)
        self.vocab = read_vocab(tokenizer, model.generation_config)
        config = model.config.get_text_config(decoder=True)
        if config.vocab_size < self.vocab.size:
            raise BrokenModel(
                f"The tokenizer in {path} has {self.vocab.size} tokens, the model only {config.vocab_size}."
            )
        self.context_len = min(options.context_len, getattr(config, "max_position_embeddings", options.context_len))
        self._check_cache()
        self._profile = remembered(self._profile_key(options), options.profile_path, self._measure)

    def _measure(self) -> RowProfile:
        profile = probe(self)
        # 16 bits round most differences away, so rows that are equal in a probe need not be equal later.
        return profile if self._model.dtype == self._torch.float32 else replace(profile, invariant_rows=1)

    def _check_cache(self) -> None:
        kinds = {type(layer).__name__ for layer in self.allocate().layers}
        if unfit := sorted(kinds - {_GROWING, _EMPTY}):
            raise EngineError(
                f"The KV cache of {self.name} cannot be rolled back: it has layers of the kind {unfit[0]}.",
                hint="Models with recurrent layers cannot be used for speculation.",
            )

    def _weight_files(self) -> list[Path]:
        return sorted(file for kind in _WEIGHTS for file in self.path.glob(kind))

    def _profile_key(self, options: EngineOptions) -> str:
        torch, files = self._torch, self._weight_files()
        stats = [(file.name, file.stat().st_size, int(file.stat().st_mtime)) for file in files]
        on_gpu = self._device.type == "cuda"
        processor = torch.cuda.get_device_name(self._device) if on_gpu else torch.backends.cpu.get_cpu_capability()
        versions = (torch.__version__, self._transformers.__version__)
        probed_len = min(self.context_len, PROBED_LEN)
        parts = (
            probed_len,
            self.path.resolve(),
            *stats,
            *versions,
            self._device,
            options.dtype,
            torch.get_num_threads(),
        )
        return "|".join(map(str, (*parts, cpu_model(), processor)))

    def allocate(self) -> Any:
        cache = self._transformers.DynamicCache(config=self._model.config)
        growing = self._transformers.cache_utils.DynamicLayer
        # A sliding layer forgets what a rollback would need. The mask hides what lies before the window all the same.
        cache.layers = [growing() if type(layer).__name__ == _SLIDING else layer for layer in cache.layers]
        return cache

    def forward(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]], *, want_logits: bool) -> list[Rows]:
        num_rows = sum(len(token_ids) for _, token_ids in feeds)
        if num_rows > (self.max_output_rows if want_logits else self.max_batch_rows):
            raise EngineError(f"{num_rows} rows are too many for one forward.")
        try:
            with self._torch.inference_mode():
                return [self._feed(sequence, token_ids, want_logits) for sequence, token_ids in feeds]
        except BaseException as error:
            for sequence, _ in feeds:
                self.roll_back(sequence, sequence.length)
            if isinstance(error, Exception):
                raise EngineError(f"transformers refused a forward of {num_rows} rows: {_first_line(error)}") from error
            raise

    def _feed(self, sequence: Sequence, token_ids: Seq[int] | TokenIds, want_logits: bool) -> Rows:
        num_rows = len(token_ids)
        output = self._model(
            input_ids=self._torch.tensor(np.array([token_ids], np.int64), device=self._device),
            position_ids=self._position_ids(sequence.length, num_rows),
            past_key_values=sequence.slot,
            use_cache=True,
            logits_to_keep=num_rows if want_logits else 1,
        )
        # [num_rows, vocab.size]; rows of the head beyond the tokenizer are padding
        return output.logits[0, :, : self.vocab.size] if want_logits else None

    def _position_ids(self, base: int, num_rows: int) -> Any:
        """Positions of the next tokens, [1, num_rows]."""
        return self._torch.arange(base, base + num_rows, device=self._device)[None]

    def roll_back(self, sequence: Sequence, length: int) -> None:
        # Not by `crop`: it is relative, and after a forward that failed half-way the layers differ in length.
        if length == 0:
            sequence.slot = self.allocate()
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

    def close(self) -> None:
        self._model = None


def _written(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]


def _check_device(torch: Any, name: str) -> Any:
    kind, _, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or not (index.isdecimal() or name == "cuda")):
        raise OptionError(f"--device must be cpu or cuda, not '{name}'.", hint="A second GPU is cuda:1.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise OptionError(f"torch sees no device {name} here.", hint="Use --device cpu.")
    return torch.device(name)


def _load(torch: Any, transformers: Any, path: Path, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer of a local folder; nothing is asked of a network and no code in the folder is run."""
    if dtype not in _DTYPES:
        raise OptionError(f"--dtype must be one of {', '.join(_DTYPES)}, not '{dtype}'.")
    given = {"local_files_only": True, "trust_remote_code": False}
    try:
        with _quiet(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **given)
            model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), output_loading_info=True, **given
            )
    except Exception as error:
        raise BrokenModel(
            f"transformers cannot load {path}: {_first_line(error)}",
            hint="Give a folder with config.json, weights and tokenizer of a causal language model.",
        ) from error
    # transformers would make up both: an empty vocabulary, random weights
    if not any((path / file).is_file() for file in tokenizer.vocab_files_names.values()):
        raise BrokenModel(f"{path} has no tokenizer.", hint="Add its tokenizer.json.")
    if missing := sorted(map(str, [*loaded["missing_keys"], *loaded["mismatched_keys"]])):
        raise BrokenModel(
            f"{path} lacks weights of its model: {missing[0]} and {len(missing) - 1} more.", hint="Fetch it again."
        )
    return model.eval(), tokenizer


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    logging = transformers.utils.logging
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def _check_forward(name: str, model: Any) -> None:
    if missing := sorted(_NEEDED - set(signature(model.forward).parameters)):
        raise EngineError(
            f"{name} is a {type(model).__name__}, whose forward takes no {missing[0]}.",
            hint="Use a decoder-only model with attention.",
        )


def read_vocab(tokenizer: Any, generation_config: Any) -> Vocab:
    """The vocabulary of a fast tokenizer. Raises BrokenModel when the bytes of its tokens cannot be told.

    End tokens are those of the generation config and of the tokenizer. A BOS text is set only where the tokenizer
    adds one by itself. Ids that no token has add no text.
    """
    if not tokenizer.is_fast:
        raise BrokenModel(f"{type(tokenizer).__name__} is no fast tokenizer.", hint="Add its tokenizer.json.")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    pieces = _read_pieces(tokenizer, backend)
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    unused = {token_id for token_id, piece in enumerate(pieces) if not piece}
    template = tokenizer.chat_template
    adds_bos = backend.encode("a").ids[:1] == [tokenizer.bos_token_id]
    return Vocab(
        pieces,
        lambda text: list(backend.encode(text, add_special_tokens=False).ids),
        special_ids=special | unused,
        end_ids=_end_ids(tokenizer, generation_config),
        chat_template=template.get("default") if isinstance(template, dict) else template,
        bos_text=tokenizer.bos_token if adds_bos else "",
        eos_text=tokenizer.eos_token or "",
    )


def _end_ids(tokenizer: Any, generation_config: Any) -> set[int]:
    configured = getattr(generation_config, "eos_token_id", None)
    ends = configured if isinstance(configured, list) else [configured]
    return {int(token_id) for token_id in (*ends, tokenizer.eos_token_id) if token_id is not None}


def _read_pieces(tokenizer: Any, backend: Any) -> list[bytes]:
    decoder = json.dumps(json.loads(backend.to_str())["decoder"], ensure_ascii=False)
    if '"ByteLevel"' in decoder:
        to_bytes = _byte_level
    elif '"ByteFallback"' in decoder or '"Metaspace"' in decoder or "▁" in decoder:
        to_bytes = _sentence_piece
    else:
        raise BrokenModel(
            f"{type(tokenizer).__name__} is neither byte-level nor sentencepiece: its bytes are unknown.",
            hint="Use another model.",
        )
    ids = backend.get_vocab(with_added_tokens=True)
    added = {token_id: token.content.encode() for token_id, token in tokenizer.added_tokens_decoder.items()}
    pieces = [b""] * (max(ids.values()) + 1)
    for text, token_id in ids.items():
        pieces[token_id] = added[token_id] if token_id in added else to_bytes(text)
    return pieces


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE (encoder.py of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


_BYTE_OF = _byte_alphabet()


def _byte_level(text: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in text)
    except KeyError:  # a token that was put into the vocabulary as plain text
        return text.encode()


def _sentence_piece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace("▁", " ").encode()
