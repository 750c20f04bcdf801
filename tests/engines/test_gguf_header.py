"""GGUF files that would end the process in llama.cpp, or never end there, are refused by their header."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from skydraft.engines.gguf_header import check_gguf
from skydraft.errors import BrokenModel
from skydraft.models.resolve import resolve

from ..mutating import flipped

U32, FLOAT, STRING, ARRAY, U64 = 4, 6, 8, 9, 10
GOOD: dict[str, tuple[int, Any]] = {
    "general.architecture": (STRING, "qwen2"), "qwen2.block_count": (U32, 24), "qwen2.context_length": (U32, 4096),
    "qwen2.embedding_length": (U32, 896), "qwen2.attention.head_count": (U32, 14),
    "qwen2.attention.head_count_kv": (U32, 2), "qwen2.rope.freq_base": (FLOAT, 1e6), "a.large": (U64, 2**40),
    "tokenizer.ggml.tokens": (ARRAY, ["a", "名", ""]),
}  # fmt: skip


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def field(name: str, kind: int, value: Any) -> bytes:
    simple = {U32: "<I", FLOAT: "<f", U64: "<Q"}
    if kind == ARRAY and value and isinstance(value[0], int):
        data = struct.pack(f"<IQ{len(value)}I", U32, len(value), *value)
    elif kind == ARRAY:
        data = struct.pack("<IQ", STRING, len(value)) + b"".join(map(string, value))
    else:
        data = string(value) if kind == STRING else struct.pack(simple[kind], value)
    return string(name) + struct.pack("<I", kind) + data


def gguf(
    dims: tuple[int, ...] = (896, 3), num_tensors: int = 1, num_fields: int | None = None, **changes: Any
) -> bytes:
    fields = GOOD | {f"qwen2.{name.replace('__', '.')}": value for name, value in changes.items()}
    data = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(fields) if num_fields is None else num_fields)
    data += b"".join(field(name, *value) for name, value in fields.items())
    data += string("token_embd.weight") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, 0)
    return data + bytes(400)


BROKEN = {
    "no layers": gguf(block_count=(U32, 0)), "layers": gguf(block_count=(U32, 2**32 - 1)),
    "no heads": gguf(attention__head_count=(U32, 0)), "no context": gguf(context_length=(U32, 0)),
    "width": gguf(embedding_length=(U32, 0)), "text": gguf(block_count=(STRING, "24")),
    "a layer": gguf(attention__head_count=(ARRAY, [14, 0, 14])), "fields": gguf(num_fields=2**60),
    "tensors": gguf(num_tensors=2**62), "epsilon": gguf(attention__layer_norm_rms_epsilon=(FLOAT, -1.0)),
    "nan": gguf(attention__layer_norm_rms_epsilon=(FLOAT, float("nan"))), "dims": gguf(dims=(2**63, 2)),
    "no dim": gguf(dims=(0, 3)),
    "five dims": gguf(dims=(1, 1, 1, 1, 1)), "cut": gguf()[:-450], "magic": b"GGML" + gguf()[4:], "empty": b"",
    "version": gguf()[:4] + b"\x09\0\0\0" + gguf()[8:],
}  # fmt: skip


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_what_no_model_has_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(BrokenModel) as refused:
        check_gguf(tmp_path / "m.gguf")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize("data", [gguf(), gguf(feed_forward_length=(ARRAY, [0, 64])), gguf(other=(U32, 0))])
def test_what_a_model_may_have_is_not(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    check_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("num", [2000, pytest.param(30_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_no_header_takes_long_or_much_or_raises_anything_else(num: int, tmp_path: Path) -> None:
    rng, path, num_refused, slowest = random.Random(28), tmp_path / "m.gguf", 0, 0.0
    tracemalloc.start()
    try:
        for _ in range(num):
            path.write_bytes(flipped(gguf(), rng))
            began = time.process_time()
            try:
                check_gguf(path)
            except BrokenModel:
                num_refused += 1
            slowest = max(slowest, time.process_time() - began)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()
    assert slowest < 0.5 and 0 < num_refused < num


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(BrokenModel, match="not a regular file"):
        resolve(str(tmp_path / "m.gguf"), tmp_path)
