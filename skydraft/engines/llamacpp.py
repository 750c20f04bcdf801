"""GGUF models in llama.cpp. One context, many sequences."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from skydraft.config import num_cores
from skydraft.engines.adapter import read_adapter
from skydraft.engines.base import Engine, Sequence
from skydraft.engines.checkpoint import weights_fingerprint
from skydraft.engines.gguf_header import check_gguf
from skydraft.engines.llama_library import TOKEN_ATTR_UNUSED, Progress, load_library
from skydraft.engines.options import EngineOptions
from skydraft.engines.pace import Pace
from skydraft.engines.probe import cpu_model, profile_of
from skydraft.engines.registry import EngineKind
from skydraft.engines.rows import Rows
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.errors import BrokenModel, EngineError, OptionError

_MAX_OUTPUT_ROWS = 16  # a row of logits is 0.6 MB
_PREFILL_ROWS = 128  # compute buffers for 512 take 0.1 GB more a pair, and are no faster on a CPU
_FLASH_ATTENTION_ON = 1
_TYPE_F16, _TYPE_BF16 = 1, 30
_SILENCE_S, _LOOK_S, _LAST_S = 120.0, 0.1, 2.0  # of a load
T = TypeVar("T")


@contextmanager
def interrupts_kept() -> Iterator[list[int]]:
    """Have Ctrl-C raise KeyboardInterrupt at the end of the block; yields a list that notes Ctrl-C at once.

    llama.cpp calls Python meanwhile, for its log, and an exception in such a call is lost. Does nothing
    where Ctrl-C would not raise KeyboardInterrupt: outside of the main thread, or with another handler.
    """
    seen: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield seen
        return
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if seen:
            raise KeyboardInterrupt


def patiently(path: Path, load: Callable[[Callable[..., bool]], T]) -> T:
    """What `load` returns, which runs in a thread that is left behind if it gives no sign of life for two minutes.

    For a sign of life it calls what it gets, whose answer is whether it shall go on. Raises EngineError.
    """
    result: Future[T] = Future()
    num_signs, is_over = 0, False

    def goes_on(*_: object) -> bool:
        nonlocal num_signs
        num_signs += 1
        return not is_over

    def run() -> None:
        try:
            result.set_result(load(goes_on))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="loading", daemon=True).start()
    try:
        seen, silent_s = -1, 0.0  # not by the clock: who was stopped meanwhile has waited for nothing
        while silent_s < _SILENCE_S:
            if wait([result], _LOOK_S).done:
                return result.result()
            silent_s = silent_s + _LOOK_S if seen == num_signs else 0.0
            seen = num_signs
    except BaseException:
        is_over = True
        wait([result], _LAST_S)
        raise
    is_over = True
    raise EngineError(
        f"{path} does not load: nothing has come of it for {_SILENCE_S:g} seconds.",
        hint="Look whether its disk or network file system hangs, or copy the file to a local disk.",
    )


class LlamaCppEngine(Engine):
    """One GGUF model in one llama.cpp context. A slot is a llama.cpp sequence id.

    The KV cache holds K in float16 and V in bfloat16. With equal types llama.cpp splits a single row's keys over
    threads from 512 cells on, so that one row and two rows at a time give other bits; with these it never does.
    """

    def __init__(self, path: Path, options: EngineOptions, *, name: str = "") -> None:
        super().__init__(name or path.stem)
        self._lib = load_library()
        self.max_output_rows, self.max_batch_rows = _MAX_OUTPUT_ROWS, _PREFILL_ROWS
        self.path = path
        self._num_threads = options.num_threads or num_cores()
        self._model, self.fingerprint = patiently(path, lambda goes_on: self._load_model(path, options, goes_on))
        self._adapter = self._load_adapter(options.adapter) if options.adapter else None
        _forget_mapped_pages(path)
        self.vocab = self.own(_read_vocab(self._lib, self._model))
        self.context_len = min(options.context_len, self._lib.model_n_ctx_train(self._model))
        self._context = self._open_context(options)
        self._memory = self._lib.get_memory(self._context)
        self._num_rows_padded = self._lib.vocab_n_tokens(self._lib.model_get_vocab(self._model))
        self._batch = self._lib.batch_init(self.max_batch_rows, 0, 1)
        self.max_sequences = options.max_sequences
        self._free_slots = list(range(options.max_sequences))[::-1]
        self._shares_cache = options.shared_cache
        self._pace: Pace | None = None
        profile = self._profile = profile_of(self, self._profile_key(options), options)
        if self._lib.threads_spin and not options.gpu_layers:
            self._pace = Pace(profile.forward_ms[0], self._num_threads, options.notify)

    def _load_model(self, path: Path, options: EngineOptions, goes_on: Callable[..., bool]) -> tuple[Any, str]:
        """The model and its fingerprint. Raises BrokenModel."""
        check_gguf(path)
        fingerprint = weights_fingerprint([path])
        params = self._lib.model_default_params()
        params.n_gpu_layers = options.gpu_layers
        progress = Progress(goes_on)
        params.progress_callback = progress
        model = self._lib.model_load_from_file(os.fsencode(path), params)
        if model and not goes_on():
            self._lib.model_free(model)
        if not model:
            raise BrokenModel(
                f"llama.cpp cannot load {path}: the file is damaged, or of a kind this version does not know.",
                hint="Fetch it again, or check it with: skydraft doctor.",
            )
        return model, fingerprint

    def _load_adapter(self, path: Path) -> Any:
        """An adapter of this model, and the fingerprint of both. Raises OptionError for an adapter of another base."""
        adapter = read_adapter(path)
        adapter.check_base(self.fingerprint, self.name)
        self.fingerprint = adapter.fingerprint
        loaded = self._lib.adapter_lora_init(self._model, os.fsencode(path))
        if not loaded:
            raise OptionError(f"{path} does not fit {self.name}.", hint="Train another.")
        return loaded

    def _open_context(self, options: EngineOptions) -> Any:
        params = self._lib.context_default_params()
        params.n_seq_max = options.max_sequences + (options.max_sequences > 1)  # one for the beginning of prompts
        params.n_ctx = self.context_len * params.n_seq_max
        params.n_batch = params.n_ubatch = self.max_batch_rows
        params.set_unified(options.shared_cache)
        # The default reserves logits for whole prompts, 300 MB; less than a row for each sequence ends the process.
        params.n_outputs_max = max(_MAX_OUTPUT_ROWS, params.n_seq_max)
        params.n_threads = params.n_threads_batch = self._num_threads
        params.flash_attn_type = _FLASH_ATTENTION_ON
        params.type_k, params.type_v = _TYPE_F16, _TYPE_BF16
        with interrupts_kept():
            context = self._lib.init_from_model(self._model, params)
        if not context:
            raise EngineError(
                f"llama.cpp cannot open a context of {params.n_ctx} tokens for {self.name}.", hint="Lower --context."
            )
        if self._adapter:  # a context has one at a time; other contexts of the model may have others
            self._lib.set_adapters_lora(context, (ctypes.c_void_p * 1)(self._adapter), 1, (ctypes.c_float * 1)(1.0))
        return context

    def _profile_key(self, options: EngineOptions) -> str:
        stat = self.path.stat()
        file = (self.path.name, stat.st_size, int(stat.st_mtime), self.fingerprint)
        kinds = f"{_TYPE_F16}/{_TYPE_BF16}, {'one cache' if options.shared_cache else 'streams'}"
        system = (self._lib.name, cpu_model(), self._lib.print_system_info().decode())
        return "|".join(map(str, (*file, *system, kinds, self._num_threads, options.gpu_layers)))

    def allocate(self) -> int:
        if not self._free_slots:
            raise EngineError(f"All sequences of {self.name} are in use.", hint="Close one first.")
        return self._free_slots.pop()

    def forward(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]], *, want_logits: bool) -> list[Rows]:
        batch, row = self._batch, 0
        num_rows = sum(len(token_ids) for _, token_ids in feeds)
        if num_rows > (self.max_output_rows if want_logits else self.max_batch_rows):
            raise EngineError(f"{num_rows} rows are too many for one forward.")
        for sequence, token_ids in feeds:
            position = sequence.length
            for token_id in token_ids:
                batch.token[row] = token_id
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence.slot
                batch.logits[row] = want_logits
                row += 1
                position += 1
        batch.n_tokens = num_rows
        began = time.perf_counter()
        status = self._lib.decode(self._context, batch)
        if num_rows == 1 and self._pace and self._pace.observe((time.perf_counter() - began) * 1e3):
            self._lib.set_n_threads(self._context, self._pace.num_threads, self._pace.num_threads)
        if status != 0:
            for sequence, _ in feeds:
                self.roll_back(sequence, sequence.length)
            raise EngineError(f"llama.cpp refused a forward of {num_rows} rows (status {status}).")
        return self._rows(feeds, num_rows) if want_logits else [None] * len(feeds)

    def _rows(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]], num_rows: int) -> list[Rows]:
        pointer = self._lib.get_logits(self._context)
        # [num_rows, padded vocabulary], not copied: valid until the next forward
        logits = np.ctypeslib.as_array(pointer, shape=(num_rows, self._num_rows_padded))[:, : self.vocab.size]
        ends = np.cumsum([len(token_ids) for _, token_ids in feeds])
        return [logits[end - len(token_ids) : end] for end, (_, token_ids) in zip(ends, feeds, strict=True)]

    def allocate_beginning(self) -> int | None:
        return self.max_sequences if self.max_sequences > 1 else None

    def copy(self, source: Sequence, target: Sequence, length: int) -> None:
        # Between streams llama.cpp copies whole buffers or nothing; in a cache for all, cells may belong to several.
        end = length if self._shares_cache else -1
        self._lib.memory_seq_cp(self._memory, source.slot, target.slot, 0 if self._shares_cache else -1, end)
        self.roll_back(target, length)

    def roll_back(self, sequence: Sequence, length: int) -> None:
        if not self._lib.memory_seq_rm(self._memory, sequence.slot, length, -1):
            raise EngineError(
                f"The KV cache of {self.name} cannot be rolled back to {length}.",
                hint="Use a model without recurrent layers.",
            )

    def release(self, sequence: Sequence) -> None:
        self._lib.memory_seq_rm(self._memory, sequence.slot, -1, -1)
        self._free_slots.append(sequence.slot)

    def kv_length(self, sequence: Sequence) -> int:
        return int(self._lib.memory_seq_pos_max(self._memory, sequence.slot)) + 1

    def free(self) -> None:
        self._lib.batch_free(self._batch)
        self._lib.free(self._context)
        self._lib.model_free(self._model)


_MADV_DONTNEED = 4


def _forget_mapped_pages(path: Path) -> None:
    """Let go of the pages of a mapped file; those still needed come back from the page cache when they are touched.

    Weights that llama.cpp has repacked would otherwise be resident twice: 0.6 GB for the demo pair. Linux only.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return
    for line in lines:
        span, access, *_, name = line.split(maxsplit=5)
        if name == str(path.resolve()) and "w" not in access:
            start, end = (int(address, 16) for address in span.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _read_vocab(lib: Any, model: Any) -> Vocab:
    vocab = lib.model_get_vocab(model)
    pieces = _read_pieces(lib, vocab)
    bos, eos = lib.vocab_bos(vocab), lib.vocab_eos(vocab)
    template = lib.model_chat_template(model, None)
    return Vocab(
        pieces,
        lambda text: _tokenize(lib, vocab, text),
        special_ids=(i for i in range(len(pieces)) if lib.vocab_is_control(vocab, i)),
        end_ids=(i for i in range(len(pieces)) if lib.vocab_is_eog(vocab, i)),
        chat_template=template.decode() if template else None,
        bos_text=pieces[bos].decode() if lib.vocab_get_add_bos(vocab) and bos >= 0 else "",
        eos_text=pieces[eos].decode() if eos >= 0 else "",
    )


def _read_pieces(lib: Any, vocab: Any) -> list[bytes]:
    size = lib.vocab_n_tokens(vocab)
    while size and lib.vocab_get_attr(vocab, size - 1) & TOKEN_ATTR_UNUSED:
        size -= 1  # rows that only pad the matrix to a round number
    buffer = ctypes.create_string_buffer(4096)
    pieces = []
    for token_id in range(size):
        num_bytes = lib.token_to_piece(vocab, token_id, buffer, len(buffer), 0, True)
        pieces.append(ctypes.string_at(buffer, max(num_bytes, 0)))
    return pieces


def _tokenize(lib: Any, vocab: Any, text: str) -> list[int]:
    data = text.encode()
    room = len(data) + 8  # never more tokens than bytes
    token_ids = (ctypes.c_int32 * room)()
    num_tokens = lib.tokenize(vocab, data, len(data), token_ids, room, False, True)
    if num_tokens < 0:
        raise EngineError("llama.cpp cannot tokenize this text.")
    return list(token_ids[:num_tokens])


KIND = EngineKind(
    "a GGUF model",
    lambda spec, path, options: LlamaCppEngine(path, options, name=spec),
    takes=frozenset({"num_threads", "gpu_layers", "adapter"}),
    claims=Path.is_file,
)
