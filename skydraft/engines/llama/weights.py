"""Weights and vocabulary of a GGUF file in llama.cpp, and its conversion to another type."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from skydraft.config import num_cores
from skydraft.engines.adapter import read_adapter
from skydraft.engines.checkpoints.engine import weights_fingerprint
from skydraft.engines.llama.library import TOKEN_ATTR_UNUSED, Progress, check_gguf, load_library
from skydraft.engines.vocab import Vocab
from skydraft.errors import BrokenModel, EngineError, MissingDependency, OptionError, RecordsError

TYPES = {"q4_0": 2, "q8_0": 7}  # numbers of llama.h
_TARGET_PARAMS = 1e9


@contextmanager
def interrupts_kept() -> Iterator[list[int]]:
    """Delay KeyboardInterrupt to the end of the block; yields a list that gets each Ctrl-C at once.

    llama.cpp calls Python meanwhile, and an exception in such a call is lost. SIGTERM is delayed too if it raises
    KeyboardInterrupt, as in servers. Other threads and other handlers are not affected.
    """
    seen: list[int] = []
    ends = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    raising = [number for number in ends if signal.getsignal(number) is signal.default_int_handler]
    for number in raising:
        signal.signal(number, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        for number in raising:
            signal.signal(number, signal.default_int_handler)
        if seen:
            raise KeyboardInterrupt


def load_model(lib: Any, path: Path, gpu_layers: int, *, vocab_only: bool = False) -> Any:
    """Load a model; Ctrl-C ends the loading. Raises BrokenModel."""
    params = lib.model_default_params()
    params.n_gpu_layers, params.vocab_only = gpu_layers, vocab_only
    with interrupts_kept() as interrupts:
        params.progress_callback = Progress(lambda *_: not interrupts)
        model = lib.model_load_from_file(os.fsencode(path), params)
        if model and interrupts:
            lib.model_free(model)
    if not model:
        says = f"llama.cpp cannot load {path}: the file is damaged, or of a kind this version does not know."
        raise BrokenModel(says, hint="Download or copy it again.")
    return model


class Weights:
    """The weights of one file, shared by engines that each have their own context. Freed with the last engine."""

    def __init__(self, lib: Any, path: Path, gpu_layers: int, name: str) -> None:
        if gpu_layers and not lib.supports_gpu_offload():
            says = f"--gpu-layers {gpu_layers} needs a llama.cpp with a GPU: {lib.name} has none here."
            raise OptionError(says, hint="docs/try.md says how to compile it for a GPU.")
        check_gguf(lib, path)
        self.fingerprint, self._name = weights_fingerprint([path]), name
        self.model = load_model(lib, path, gpu_layers)
        self._lib, self._num_users = lib, 0
        self._lock = threading.Lock()
        _forget_mapped_pages(path)
        self.vocab = _read_vocab(lib, self.model, self._check_open)

    def _check_open(self) -> None:
        if self.model is None:
            raise EngineError(f"{self._name} is closed.")

    def lend(self) -> Self:
        """Share the weights with one more engine. Raises EngineError if the last engine has freed them."""
        with self._lock:
            self._check_open()
            self._num_users += 1
        return self

    def load_adapter(self, path: Path) -> tuple[Any, str]:
        """Load an adapter; returns (adapter, fingerprint of weights and adapter). It is freed with the weights: new
        contexts walk through all adapters, so freeing one would need a lock around each first forward. Raises
        OptionError or RecordsError."""
        adapter = read_adapter(path)
        adapter.card.check_base(self.fingerprint, self._name)
        with self._lock:
            loaded = self._lib.adapter_lora_init(self.model, os.fsencode(path))
        if not loaded:
            raise RecordsError(f"{path} does not fit {self._name}.", hint="Train another.")
        return loaded, adapter.fingerprint

    def give_back(self) -> None:
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                self._lib.model_free(self.model)
                self.model = None


def read_vocabulary(content: bytes) -> Vocab:
    """Read the vocabulary of a GGUF file without matrices. Raises BrokenModel and MissingDependency."""
    lib = load_library()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        path.write_bytes(content)
        model = load_model(lib, path, 0, vocab_only=True)
    vocab = _read_vocab(lib, model, lambda: None)
    weakref.finalize(vocab, lib.model_free, model)
    return vocab


def quantize(source: Path, target: Path, kind: str, *, force: bool = False) -> None:
    """Write all matrices of `source` in one type to `target`. Raises OptionError for a model above 1 billion parameters
    unless `force`, MissingDependency, and BrokenModel for a file that llama.cpp cannot quantize."""
    if kind not in TYPES:
        raise OptionError(f"The type must be one of {', '.join(TYPES)}, not {kind!r}.")
    lib = load_library()
    if not hasattr(lib, "model_quantize"):
        raise MissingDependency(f"{lib.name} cannot quantize.", hint="Run: pip install 'skydraft[llamacpp]'.")
    check_gguf(lib, source)
    model = load_model(lib, source, 0)
    num_params = lib.model_n_params(model)
    lib.model_free(model)
    if num_params > _TARGET_PARAMS and not force:
        says = f"{source.name} has {num_params / 1e9:.1f} billion parameters, as a target has. In another type it is"
        hint = "A draft model may change, since the target checks it. For a target, give --force."
        raise OptionError(f"{says} another model, which writes other texts.", hint=hint)
    params = lib.model_quantize_default_params()
    params.nthread, params.ftype, params.allow_requantize, params.pure = num_cores(), TYPES[kind], True, True
    part = target.with_name(f"{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    statuses = list[int]()
    both = os.fsencode(source), os.fsencode(part)
    # In another thread, since Ctrl-C would otherwise wait for the end, which may take minutes.
    work = threading.Thread(
        target=lambda: statuses.append(lib.model_quantize(*both, ctypes.byref(params))), daemon=True
    )
    work.start()
    try:
        work.join()
        if statuses != [0]:
            hint = "Choose another type, or check the free space."
            raise BrokenModel(f"llama.cpp cannot write {source} as {kind}.", hint=hint)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _forget_mapped_pages(path: Path) -> None:
    """Release the file's mapped pages. Weights that llama.cpp has repacked would otherwise be resident twice, 0.6 GB
    for the demo pair. Linux only."""
    with suppress(OSError, AttributeError):
        madvise, lines = ctypes.CDLL(None).madvise, Path("/proc/self/maps").read_text().splitlines()
        for span, access, *_, name in (line.split(maxsplit=5) for line in lines):
            if name == str(path.resolve()) and "w" not in access:
                start, end = (int(address, 16) for address in span.split("-"))
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 4)  # MADV_DONTNEED


def _read_vocab(lib: Any, model: Any, check_open: Callable[[], None]) -> Vocab:
    vocab = lib.model_get_vocab(model)
    pieces = _read_pieces(lib, vocab)
    bos, eos = lib.vocab_bos(vocab), lib.vocab_eos(vocab)
    templates = (lib.model_chat_template(model, name) for name in (None, b"tool_use"))
    template, tool_template = (text.decode() if text else None for text in templates)

    def encode(text: str) -> list[int]:
        check_open()  # the model may be freed
        data = text.encode()
        room = len(data) + 8  # never more tokens than bytes
        token_ids = (ctypes.c_int32 * room)()
        num_tokens = lib.tokenize(vocab, data, len(data), token_ids, room, False, True)
        assert num_tokens >= 0, "there is room for a token of each byte"
        return list(token_ids[:num_tokens])

    return Vocab(
        pieces, encode, special_ids=(i for i in range(len(pieces)) if lib.vocab_is_control(vocab, i)),
        end_ids=(i for i in range(len(pieces)) if lib.vocab_is_eog(vocab, i)),
        chat_template=template, tool_template=tool_template,
        bos_text=pieces[bos].decode() if lib.vocab_get_add_bos(vocab) and bos >= 0 else "",
        eos_text=pieces[eos].decode() if eos >= 0 else "",
    )  # fmt: skip


def _read_pieces(lib: Any, vocab: Any) -> list[bytes]:
    size = lib.vocab_n_tokens(vocab)
    while size and lib.vocab_get_attr(vocab, size - 1) & TOKEN_ATTR_UNUSED:
        size -= 1  # rows that only pad the matrix
    buffer = ctypes.create_string_buffer(4096)
    pieces = []
    for token_id in range(size):
        num_bytes = lib.token_to_piece(vocab, token_id, buffer, len(buffer), 0, True)
        pieces.append(ctypes.string_at(buffer, max(num_bytes, 0)))
    return pieces
