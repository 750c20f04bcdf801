"""The part of llama.h that the engine calls, as ctypes, for the llama.cpp build of this machine.

It tries llama-cpp-python (compiled here, fastest), then xllamacpp (ready made). Builds with kernels for AMX are
skipped: on some machines a forward of several rows crashes the process (llama.cpp #20824).
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_float,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any

from skydraft.errors import BrokenModel, MissingDependency

TOKEN_ATTR_UNUSED = 1 << 1
Progress = ctypes.CFUNCTYPE(c_bool, c_float, c_void_p)
_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)
# A C function without effect. A Python callback would receive signals, and lose them.
_SILENT = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, _Log)
_WAIT_POLICY, _SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
_STAT = Path("/proc/stat")
_NUM_LOOKS, _LOOK_S, _BUSY_SHARE = 5, 0.01, 0.75
_F16 = 1
_U32, _F32, _STRING = 4, 6, 8  # types of values in a GGUF header
_OPTIONAL = ("model_quantize", "gguf_init_empty", "gguf_set_kv", "gguf_write")  # missing in some ready-made builds
_MAX_LAYERS = 512  # llama.cpp's limit
_AMX = b"AMX_INT8 = 1"
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
_WITHOUT_AMX = f"-DCMAKE_C_FLAGS='{_NO_AMX}' -DCMAKE_CXX_FLAGS='{_NO_AMX}'"
_CPU_INFO = Path("/proc/cpuinfo")


class ModelParams(ctypes.Structure):
    """The fields of llama_model_params up to the last one that we set. The rest keeps its defaults."""

    _fields_ = (
        ("devices", c_void_p), ("tensor_buft_overrides", c_void_p), ("n_gpu_layers", c_int32),
        ("split_mode", c_int32), ("load_mode", c_int32), ("lazy_mode", c_int32), ("main_gpu", c_int32),
        ("tensor_split", c_void_p), ("progress_callback", Progress), ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p), ("vocab_only", c_bool), ("rest", c_uint8 * 183),
    )  # fmt: skip


class ContextParams(ctypes.Structure):
    """Like ModelParams. After the types, versions differ in their fields."""

    _fields_ = (
        ("n_ctx", c_uint32), ("n_batch", c_uint32), ("n_ubatch", c_uint32), ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32), ("n_outputs_max", c_uint32), ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32), ("n_threads_batch", c_int32), ("ctx_type", c_int32), ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32), ("attention_type", c_int32), ("flash_attn_type", c_int32), ("rope", c_float * 6),
        ("yarn_orig_ctx", c_uint32), ("defrag_thold", c_float), ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p), ("type_k", c_int32), ("type_v", c_int32), ("rest", c_uint8 * 256),
    )  # fmt: skip


class QuantizeParams(ctypes.Structure):
    """Like ModelParams."""

    _fields_ = (
        ("nthread", c_int32), ("ftype", c_int32), ("output_tensor_type", c_int32), ("token_embedding_type", c_int32),
        ("allow_requantize", c_bool), ("quantize_output_tensor", c_bool), ("only_copy", c_bool), ("pure", c_bool),
        ("rest", c_uint8 * 120),
    )  # fmt: skip


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", POINTER(c_float)), ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(c_int8)),
    )  # fmt: skip


class GgufParams(ctypes.Structure):
    _fields_ = (("no_alloc", c_bool), ("ctx", c_void_p))


_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # result type, argument types
    "backend_init": (None,), "log_set": (None, _Log, c_void_p), "print_system_info": (c_char_p,),
    "supports_gpu_offload": (c_bool,), "model_default_params": (ModelParams,),
    "model_load_from_file": (c_void_p, c_char_p, ModelParams), "model_chat_template": (c_char_p, c_void_p, c_char_p),
    "model_desc": (c_int32, c_void_p, c_char_p, c_size_t), "model_n_params": (c_uint64, c_void_p),
    "model_free": (None, c_void_p), "model_get_vocab": (c_void_p, c_void_p), "model_n_ctx_train": (c_int32, c_void_p),

    "model_quantize_default_params": (QuantizeParams,),
    "model_quantize": (c_uint32, c_char_p, c_char_p, POINTER(QuantizeParams)),
    "context_default_params": (ContextParams,), "init_from_model": (c_void_p, c_void_p, ContextParams),
    "free": (None, c_void_p), "adapter_lora_init": (c_void_p, c_void_p, c_char_p),
    "set_adapters_lora": (c_int32, c_void_p, POINTER(c_void_p), c_size_t, POINTER(c_float)),
    "get_memory": (c_void_p, c_void_p),
    "memory_seq_rm": (c_bool, c_void_p, c_int32, c_int32, c_int32), "memory_seq_pos_max": (c_int32, c_void_p, c_int32),
    "state_seq_get_size": (c_size_t, c_void_p, c_int32),
    "state_seq_get_data": (c_size_t, c_void_p, c_void_p, c_size_t, c_int32),
    "state_seq_set_data": (c_size_t, c_void_p, c_void_p, c_size_t, c_int32),
    "batch_init": (Batch, c_int32, c_int32, c_int32), "batch_free": (None, Batch), "decode": (c_int32, c_void_p, Batch),
    "get_logits": (POINTER(c_float), c_void_p),
    "vocab_n_tokens": (c_int32, c_void_p), "vocab_bos": (c_int32, c_void_p), "vocab_eos": (c_int32, c_void_p),
    "vocab_get_add_bos": (c_bool, c_void_p), "vocab_get_attr": (c_int32, c_void_p, c_int32),
    "vocab_is_control": (c_bool, c_void_p, c_int32), "vocab_is_eog": (c_bool, c_void_p, c_int32),
    "token_to_piece": (c_int32, c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool),
    "tokenize": (c_int32, c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool),
    "gguf_init_from_file": (c_void_p, c_char_p, GgufParams), "gguf_free": (None, c_void_p),
    "gguf_find_key": (c_int64, c_void_p, c_char_p), "gguf_get_kv_type": (c_int32, c_void_p, c_int64),
    "gguf_get_val_u32": (c_uint32, c_void_p, c_int64), "gguf_get_val_f32": (c_float, c_void_p, c_int64),
    "gguf_get_val_str": (c_char_p, c_void_p, c_int64), "gguf_init_empty": (c_void_p,),
    "gguf_set_kv": (None, c_void_p, c_void_p), "gguf_write_to_file": (c_bool, c_void_p, c_char_p, c_bool),
}  # fmt: skip


class Library:
    """Each function of `_FUNCTIONS` is a method, without the prefix llama_. `name` is the build's name and version."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        with _patient_threads():
            library = ctypes.CDLL(os.fspath(path))
        for function, (result, *arguments) in _FUNCTIONS.items():
            name = function if function.startswith("gguf_") else f"llama_{function}"
            if function.startswith(_OPTIONAL) and not hasattr(library, name):
                continue
            found = getattr(library, name)
            found.restype, found.argtypes = result, arguments
            setattr(self, function, found)
        self.log_set(_SILENT, None)  # first: a GPU build prints its devices at the first call
        self._check_layout()
        self.backend_init()

    def __getattr__(self, function: str) -> Any:
        raise AttributeError(f"{self.name} has no function llama_{function}")

    def _check_layout(self) -> None:
        """Raise ValueError unless the structures have their defaults at the expected places."""
        model, context = self.model_default_params(), self.context_default_params()
        loading = (model.n_gpu_layers, model.split_mode, model.load_mode, model.lazy_mode, model.main_gpu)
        sizes = (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max, context.n_outputs_max)
        kinds = (context.flash_attn_type, context.defrag_thold, context.type_k, context.type_v)
        if (loading, sizes, kinds) != ((-1, 1, -1, 1, 0), (512, 2048, 512, 1, 0), (-1, -1.0, _F16, _F16)):
            raise ValueError("its structures differ")


@contextmanager
def _patient_threads() -> Iterator[None]:
    """Make the threads of an OpenMP library that is loaded in the block sleep sooner while they wait for each other.

    By default they spin, even while another process keeps the awaited thread from its core: a forward takes ten times
    as long. Sleeping at once is best beside busy processes, but takes half as long again on a quiet machine. The
    variables are set only during loading, since other libraries and children have their own OpenMP. The user's own
    settings stay.
    """
    given = {_WAIT_POLICY, _SPINS} & os.environ.keys()
    name, value = (_WAIT_POLICY, "passive") if is_busy() else (_SPINS, "10000")
    if not given:
        os.environ[name] = value
    try:
        yield
    finally:
        if not given:
            del os.environ[name]


def is_busy() -> bool:
    """Whether other processes want most cores at this moment; False if the system does not report it."""
    wanting = []
    for _ in range(_NUM_LOOKS):
        try:
            wanting.append(int(_STAT.read_text().partition("procs_running ")[2].split()[0]))
        except (OSError, ValueError, IndexError):
            return False
        time.sleep(_LOOK_S)
    return sorted(wanting)[_NUM_LOOKS // 2] - 1 >= _BUSY_SHARE * (os.cpu_count() or 1)  # one is this process


@cache
def load_library() -> Library:
    """Load the first build that fits. Raises MissingDependency if none does."""
    faults = []
    for path, name in _builds():
        try:
            library = Library(path, name)
        except (OSError, AttributeError, ValueError) as error:
            faults.append(f"; {name}: {str(error).splitlines()[0]}")
            continue
        if _AMX not in library.print_system_info():
            return library
        faults.append(f'; {name}: its kernels for AMX may crash; compile it with CMAKE_ARGS="{_WITHOUT_AMX}"')
    says = f"GGUF models need llama.cpp, and no build of it {'fits' if faults else 'was found'} here{''.join(faults)}."
    hint = "Run: pip install 'skydraft[prebuilt]'. Faster, but compiled for minutes: 'skydraft[llamacpp]'."
    raise MissingDependency(says, hint=hint)


def _builds() -> list[tuple[Path, str]]:
    found = _files("llama_cpp", "llama-cpp-python", f"lib/libllama.{'dylib' if sys.platform == 'darwin' else 'so'}")
    # Ready-made builds crash on x86 processors without AVX2.
    if platform.machine() in ("x86_64", "AMD64") and _CPU_INFO.exists() and " avx2 " not in _CPU_INFO.read_text():
        return found
    return found + _files("xllamacpp", "xllamacpp", "xllamacpp.*.so")


def _files(package: str, project: str, pattern: str) -> list[tuple[Path, str]]:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    paths = [path for folder in folders or () for path in sorted(Path(folder).glob(pattern))]
    return [(path, f"{project} {importlib.metadata.version(project)}") for path in paths]


@contextmanager
def _header(lib: Library, path: Path) -> Iterator[Any]:
    """Yield the header of a file, read by llama.cpp's own safe reader. Raises BrokenModel for a file that is not GGUF,
    or whose header would crash llama.cpp later."""
    header = lib.gguf_init_from_file(os.fsencode(path), GgufParams(no_alloc=True))
    try:
        if fault := _fault(lib, header) if header else "its header cannot be read":
            raise BrokenModel(f"{path} cannot be used: {fault}.", hint="Download it again, or give another model.")
        yield header
    finally:
        lib.gguf_free(header)


def check_gguf(lib: Library, path: Path) -> None:
    """Raise BrokenModel for a file that llama.cpp must not load."""
    with _header(lib, path):
        pass


def without_matrices(lib: Library, path: Path) -> bytes:
    """Return a file with the same header but no matrices; empty if this build cannot write it. Raises BrokenModel."""
    if not hasattr(lib, "gguf_set_kv"):
        return b""
    with _header(lib, path) as header, tempfile.TemporaryDirectory() as folder:
        copy, file = lib.gguf_init_empty(), Path(folder) / "header.gguf"
        try:
            lib.gguf_set_kv(copy, header)
            lib.gguf_write_to_file(copy, os.fsencode(file), True)
            return file.read_bytes()
        finally:
            lib.gguf_free(copy)


def kv_facts(lib: Library, path: Path) -> tuple[int, int]:
    """Return (trained context length, bytes of KV a token at 16 bits); 0 if unknown. Layers that keep less, such as
    sliding windows, count as full ones. Raises BrokenModel."""
    with _header(lib, path) as header:
        names = ("context_length", "block_count", "embedding_length", "attention.head_count")
        context, layers, width, heads = (_of_architecture(lib, header, name) or 0 for name in names)
        kv_heads = _of_architecture(lib, header, "attention.head_count_kv") or heads
        size = width // heads if heads else 0
        sides = [_of_architecture(lib, header, f"attention.{side}_length") or size for side in ("key", "value")]
    return context, layers * kv_heads * sum(sides) * 2


def rope_depends(lib: Library, path: Path) -> bool:
    """Whether keys may depend on the context's length, so that they cannot be copied to another context."""
    with _header(lib, path) as header:
        return bool(_of_architecture(lib, header, "rope.scaling.original_context_length"))


def _of_architecture(lib: Library, header: Any, name: str, kind: int = _U32) -> Any:
    architecture = _value(lib, header, b"general.architecture", _STRING) or b""
    return _value(lib, header, architecture + f".{name}".encode(), kind)


def _fault(lib: Library, header: Any) -> str | None:
    layers = _of_architecture(lib, header, "block_count")
    if layers is not None and not 1 <= layers <= _MAX_LAYERS:
        return f"its block_count is {layers}"
    if _of_architecture(lib, header, "pooling_type"):
        return "it is an embedding model"
    for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        small = _of_architecture(lib, header, f"attention.{name}", _F32)
        if small is not None and not 0 <= small < 1:  # also refuses NaN
            return f"its {name} is no small number"
    return None


def _value(lib: Library, header: Any, name: bytes, kind: int) -> Any:
    """Return a value of the header; None if it is missing or of another type, which llama.cpp refuses itself."""
    at = lib.gguf_find_key(header, name)
    if at < 0 or lib.gguf_get_kv_type(header, at) != kind:
        return None
    read = {_U32: lib.gguf_get_val_u32, _F32: lib.gguf_get_val_f32, _STRING: lib.gguf_get_val_str}
    return read[kind](header, at)
