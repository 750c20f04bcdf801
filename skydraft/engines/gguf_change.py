"""Changing some matrices of a GGUF file: all else is copied byte for byte, so that nothing else is rounded again.

A changed matrix is dequantised, changed, and quantised to the type it had, by llama.cpp's own `ggml_quantize_chunk`
(what `llama_model_quantize` calls for each tensor): the file keeps its layout, and its tensors their places.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from skydraft.errors import BrokenModel, MissingDependency, OptionError

Matrix = npt.NDArray[np.float32]
_STRING = 8  # type of a value in the header
_CHUNK_BYTES = 1 << 22
# Architectures whose matrices lie in a GGUF file as they do in a checkpoint: those of llama permute q and k.
_PLAIN = ("qwen2", "qwen3")
_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_changed(base: Path, out: Path, changes: Mapping[str, Callable[[], Matrix]], notes: Mapping[str, str]) -> None:
    """Write `base` with `changes`, by the matrix names of the checkpoint, added to it, and `notes` in its header.

    Raises BrokenModel for a file that cannot be read, OptionError for one that cannot be changed so, and OSError.
    """
    reader, quantize = _reader(base), _quantizer()
    architecture = reader.fields["general.architecture"].contents()
    if architecture not in _PLAIN:
        raise OptionError(
            f"{base.name} is a {architecture}, and adapters go into GGUF files of {' or '.join(_PLAIN)}.",
            hint="Use the model's checkpoint folder.",
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    wanted = {_gguf_name(name): change for name, change in changes.items()}
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise OptionError(f"{base.name} has no matrix {missing[0]}.", hint="The adapter is of another model.")
    header = _with_notes(base, reader, notes)
    with base.open("rb") as source, out.open("wb") as target:
        target.write(header)
        source.seek(reader.data_offset)
        for name, tensor in sorted(tensors.items(), key=lambda item: int(item[1].data_offset)):
            if name in wanted:
                _copy(source, target, int(tensor.data_offset) - source.tell())
                target.write(_changed(tensor, wanted[name](), quantize))
                source.seek(int(tensor.n_bytes), os.SEEK_CUR)
        _copy(source, target, base.stat().st_size - source.tell())


def _reader(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingDependency(
            "Changing a GGUF file needs the package gguf, which is not installed.",
            hint="Run: pip install 'skydraft[learn]'.",
        ) from error
    try:
        return GGUFReader(path)
    except Exception as error:  # whatever its parts say of a damaged file
        raise BrokenModel(f"{path} cannot be read as GGUF: {error}.", hint="Fetch it again.") from error


def _quantizer() -> Any:
    """`ggml_quantize_chunk` of the library that llama-cpp-python brings."""
    from skydraft.engines.llamacpp import load_library

    load_library()
    from llama_cpp import _ggml

    quantize = _ggml.libggml.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    quantize.argtypes = [ctypes.c_int, pointer, pointer, long, long, long, pointer]
    return quantize


def _gguf_name(name: str) -> str:
    """`blk.3.attn_q.weight` for `model.layers.3.self_attn.q_proj`."""
    number, _, part = name.partition("layers.")[2].partition(".")
    return f"blk.{number}.{_PARTS.get(part, part)}.weight"


def _changed(tensor: Any, change: Matrix, quantize: Any) -> bytes:
    from gguf.quants import dequantize

    weights = np.ascontiguousarray(
        dequantize(tensor.data, tensor.tensor_type).reshape(change.shape) + change, np.float32
    )
    data = (ctypes.c_uint8 * int(tensor.n_bytes))()
    kind, (num_rows, row_len) = int(tensor.tensor_type), weights.shape
    written = quantize(kind, weights.ctypes.data, ctypes.addressof(data), 0, num_rows, row_len, None)
    if written != tensor.n_bytes:
        raise OptionError(f"{tensor.name} cannot be quantised to {tensor.tensor_type.name} again.")
    return bytes(data)


def _with_notes(path: Path, reader: Any, notes: Mapping[str, str]) -> bytes:
    """All before the tensors' data, with more strings in the header.

    These are filled up with spaces to a multiple of the alignment, so that the padding before the data stays right.
    """
    with path.open("rb") as file:
        old = file.read(reader.data_offset)
    entries = [(key.encode(), value.encode()) for key, value in notes.items()]
    size = sum(8 + len(key) + 4 + 8 + len(value) for key, value in entries)
    last_key, last_value = entries[-1]
    entries[-1] = last_key, last_value + b" " * (-size % reader.alignment)
    added = b"".join(
        struct.pack("<Q", len(key)) + key + struct.pack("<IQ", _STRING, len(value)) + value for key, value in entries
    )
    # magic, version, number of tensors, number of entries
    (num_entries,) = struct.unpack_from("<Q", old, 16)
    return old[:16] + struct.pack("<Q", num_entries + len(entries)) + added + old[24:]


def _copy(source: BinaryIO, target: BinaryIO, num_bytes: int) -> None:
    while num_bytes and (chunk := source.read(min(num_bytes, _CHUNK_BYTES))):
        target.write(chunk)
        num_bytes -= len(chunk)
