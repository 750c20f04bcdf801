"""The header of a GGUF file, read before llama.cpp does: what is impossible in it would end the process or never end.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from skydraft.errors import BrokenModel

_SIMPLE = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_BYTES, _BLOCK = 2**28, 2**20
_MAX_LAYERS, _MAX_DIMS = 512, 4  # those of llama.cpp
# Fields of an architecture that no model has as 0, with the most that one has.
_COUNTS = {
    "block_count": _MAX_LAYERS, "context_length": 2**31 - 1, "embedding_length": 2**20, "feed_forward_length": 2**24,
    "attention.head_count": 2**16, "attention.head_count_kv": 2**16, "attention.key_length": 2**16,
    "attention.value_length": 2**16,
}  # fmt: skip
_MAY_BE_0 = {"feed_forward_length", "attention.head_count_kv"}  # in some layers, where they are lists


def check_gguf(path: Path) -> None:
    """Raise BrokenModel for a file whose header llama.cpp would not survive."""
    try:
        with path.open("rb") as file:  # mapped, a file system that hangs would stop the whole process
            _Header(file, path.stat().st_size).check()
    except (OSError, ValueError, TypeError, struct.error, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BrokenModel(
            f"{path} is damaged: {reason}.", hint="Fetch it again, or check it with: skydraft doctor."
        ) from error


class _Header:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._data = file, bytearray()  # what was read of it
        self._at, self._num_bytes, self._size = 0, size, min(size, _MAX_BYTES)

    def check(self) -> None:
        if self._take(4) != b"GGUF" or not 2 <= self._number("I") <= 3:
            raise ValueError("it is not GGUF of version 2 or 3")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        fields = dict(self._field() for _ in range(self._fits(num_fields, 13)))
        for _ in range(self._fits(num_tensors, 25)):
            self._check_tensor()
        architecture = fields.get("general.architecture")
        for name, most in _COUNTS.items():
            value = fields.get(f"{architecture}.{name}")
            least = 0 if name in _MAY_BE_0 and isinstance(value, list) else 1
            for each in value if isinstance(value, list) else [value]:
                if each is not None and not (isinstance(each, int) and least <= each <= most):
                    raise ValueError(f"its {name} is {str(each)[:20]}")
        for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
            if not 0 <= fields.get(f"{architecture}.attention.{name}", 0.0) < 1:  # nan neither
                raise ValueError(f"its {name} is no small number")
        heads, width = (fields.get(f"{architecture}.{name}") for name in ("attention.head_count", "embedding_length"))
        if isinstance(heads, int) and isinstance(width, int) and heads > width:
            raise ValueError(f"it has {heads} heads for {width} numbers")

    def _field(self) -> tuple[str, Any]:
        return self._string().decode("utf-8", "replace"), self._value(self._number("I"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string().decode("utf-8", "replace")
        if kind != _ARRAY:
            return self._number(_kind(kind))
        inner, count = self._number("I"), self._number("Q")
        if inner == _STRING:
            self._skip_strings(self._fits(count, 8))
            return None
        size = struct.calcsize(f"<{_kind(inner)}")
        data = self._take(self._fits(count, size) * size)
        return list(struct.unpack(f"<{count}{_kind(inner)}", data)) if count <= _MAX_LAYERS else None

    def _skip_strings(self, count: int) -> None:
        at, read, data = self._at, struct.Struct("<Q").unpack_from, self._data
        for _ in range(count):  # some hundred thousand
            if at + 8 > len(data):
                self._read_to(at + 8)
            at += 8 + read(data, at)[0]
        self._at = at

    def _check_tensor(self) -> None:
        name, num_dims = self._string(), self._number("I")
        if not 0 < len(name) < 64 or num_dims > _MAX_DIMS:
            raise ValueError("a tensor has no name or too many dimensions")
        dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims))
        self._take(4)  # its type
        if not all(0 < dim < 2**31 for dim in dims) or self._number("Q") >= self._num_bytes:
            raise ValueError("a tensor is larger than the file")

    def _string(self) -> bytes:
        return self._take(self._number("Q"))

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))
        return value

    def _take(self, num_bytes: int) -> bytes:
        begin, self._at = self._at, self._at + self._fits(num_bytes, 1)
        self._read_to(self._at)
        return bytes(self._data[begin : self._at])

    def _read_to(self, end: int) -> None:
        if end > self._size:
            raise ValueError("its header ends early")
        while len(self._data) < end:
            if not (block := self._file.read(max(end - len(self._data), _BLOCK))):
                raise ValueError("its header ends early")
            self._data += block

    def _fits(self, count: int, least_bytes: int) -> int:
        """`count`, if so many things of at least so many bytes can follow."""
        if count * least_bytes > self._size - self._at:
            raise ValueError("its header ends early")
        return count


def _kind(number: int) -> str:
    if number not in _SIMPLE:
        raise ValueError(f"its header has a value of type {number}")
    return _SIMPLE[number]
