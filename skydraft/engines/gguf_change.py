"""Changing some matrices of a GGUF file: all else is copied byte for byte, so that nothing else is rounded again.

A changed matrix that was packed into fewer than 8 bits becomes one of Q8_0 (one scale for 32 weights), and any other
keeps its type: what training changes is often smaller than half a step of 4 or 5 bits, and would be rounded away.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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
    reader = _reader(base)
    architecture = reader.fields["general.architecture"].contents()
    if architecture not in _PLAIN:
        raise OptionError(
            f"{base.name} is a {architecture}, and adapters go into GGUF files of {' or '.join(_PLAIN)}.",
            hint="Use the model's checkpoint folder.",
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    wanted = {gguf_name(name): change for name, change in changes.items()}
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise OptionError(f"{base.name} has no matrix {missing[0]}.", hint="The adapter is of another model.")
    places = _places(reader, wanted)
    with base.open("rb") as source, out.open("wb") as target:
        target.write(_header(source.read(reader.data_offset), reader, places, notes))
        start = target.tell()
        for place in places:
            target.write(bytes(start + place.offset - target.tell()))  # padding
            if place.tensor.name in wanted:
                target.write(_changed(place, wanted[place.tensor.name]()))
            else:
                source.seek(int(place.tensor.data_offset))
                _copy(source, target, place.num_bytes)


class _Place(NamedTuple):
    """Where a tensor goes, counted from the beginning of the data, and as what."""

    tensor: Any
    kind: Any
    offset: int
    num_bytes: int


def _places(reader: Any, changed: Container[str]) -> list[_Place]:
    """Every tensor of a file in the order of its data."""
    places, offset = [], 0
    for tensor in sorted(reader.tensors, key=lambda each: int(each.data_offset)):
        kind, num_bytes = tensor.tensor_type, int(tensor.n_bytes)
        if tensor.name in changed:
            kind, num_bytes = _finer(tensor)
        places.append(_Place(tensor, kind, offset, num_bytes))
        offset += num_bytes + -num_bytes % reader.alignment
    return places


def _finer(tensor: Any) -> tuple[Any, int]:
    """(type, bytes) in which a matrix can hold a small change."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind, row_len = tensor.tensor_type, int(tensor.shape[0])
    if kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16):
        kind = GGMLQuantizationType.Q8_0
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    if row_len % block_len:
        raise OptionError(f"{tensor.name} has rows of {row_len} weights, which {kind.name} cannot hold.")
    return kind, int(tensor.n_elements) // block_len * block_bytes


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


def gguf_name(name: str) -> str:
    """What a GGUF file calls a matrix of a checkpoint: `blk.3.attn_q.weight` for `model.layers.3.self_attn.q_proj`."""
    number, _, part = name.partition("layers.")[2].partition(".")
    return f"blk.{number}.{_PARTS.get(part, part)}.weight"


def _changed(place: _Place, change: Matrix) -> bytes:
    from gguf.quants import dequantize, quantize

    weights = dequantize(place.tensor.data, place.tensor.tensor_type).reshape(change.shape) + change
    data: bytes = quantize(np.ascontiguousarray(weights, np.float32), place.kind).tobytes()
    return data


def _header(old: bytes, reader: Any, places: Sequence[_Place], notes: Mapping[str, str]) -> bytes:
    """All before the tensors' data: their types and offsets as they are now, and more strings.

    These are filled up with spaces to a multiple of the alignment, so that the padding before the data stays right.
    """
    data = bytearray(old)
    for place in places:
        # length of the name, name, number of dimensions, dimensions, type, offset
        name_len, name, _, dims = place.tensor.field.parts[:4]
        at = place.tensor.field.offset + name_len.nbytes + name.nbytes + 4 + dims.nbytes
        struct.pack_into("<IQ", data, at, int(place.kind), place.offset)
    entries = [(key.encode(), value.encode()) for key, value in notes.items()]
    size = sum(8 + len(key) + 4 + 8 + len(value) for key, value in entries)
    last_key, last_value = entries[-1]
    entries[-1] = last_key, last_value + b" " * (-size % reader.alignment)
    added = b"".join(
        struct.pack("<Q", len(key)) + key + struct.pack("<IQ", _STRING, len(value)) + value for key, value in entries
    )
    # magic, version, number of tensors, number of entries
    (num_entries,) = struct.unpack_from("<Q", data, 16)
    return bytes(data[:16]) + struct.pack("<Q", num_entries + len(entries)) + added + bytes(data[24:])


def _copy(source: BinaryIO, target: BinaryIO, num_bytes: int) -> None:
    while num_bytes and (chunk := source.read(min(num_bytes, _CHUNK_BYTES))):
        target.write(chunk)
        num_bytes -= len(chunk)
