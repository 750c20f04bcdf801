"""GGUF files that would end the process in llama.cpp are refused by their header, and no header ends it."""

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from skydraft.engines.llama_library import check_gguf, load_library
from skydraft.errors import BrokenModel, MissingDependency

from ..mutating import flipped

U32, FLOAT, STRING = 4, 6, 8
GOOD: dict[str, tuple[int, Any]] = {
    "general.architecture": (STRING, "qwen2"), "qwen2.block_count": (U32, 24), "qwen2.context_length": (U32, 4096),
    "qwen2.attention.layer_norm_rms_epsilon": (FLOAT, 1e-6),
}  # fmt: skip


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf(**changes: tuple[int, Any]) -> bytes:
    """A header and one small matrix; values of qwen2 by their names, as (type, value)."""
    fields = GOOD | {f"qwen2.{name.replace('__', '.')}": value for name, value in changes.items()}
    data = b"GGUF" + struct.pack("<IQQ", 3, 1, len(fields))
    for name, (kind, value) in fields.items():
        packed = string(value) if kind == STRING else struct.pack({U32: "<I", FLOAT: "<f"}[kind], value)
        data += string(name) + struct.pack("<I", kind) + packed
    data += string("token_embd.weight") + struct.pack("<I2QIQ", 2, 8, 3, 0, 0)
    return data + bytes(-len(data) % 32) + bytes(96)


@pytest.fixture
def check(tmp_path: Path) -> Any:
    try:
        lib = load_library()
    except MissingDependency as error:
        pytest.skip(str(error))

    def check(data: bytes) -> None:
        (tmp_path / "m.gguf").write_bytes(data)
        check_gguf(lib, tmp_path / "m.gguf")

    return check


BROKEN = {
    "no layers": gguf(block_count=(U32, 0)), "layers": gguf(block_count=(U32, 2**32 - 1)),
    "epsilon": gguf(attention__layer_norm_rms_epsilon=(FLOAT, -1.0)),
    "nan": gguf(attention__layer_norm_epsilon=(FLOAT, float("nan"))), "cut": gguf()[:80],
    "magic": b"GGML" + gguf()[4:], "empty": b"", "fields": gguf()[:16] + b"\xff" * 8 + gguf()[24:],
}  # fmt: skip


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_what_no_model_has_is_refused(data: bytes, check: Any) -> None:
    with pytest.raises(BrokenModel) as refused:
        check(data)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_no_header_ends_the_process_or_raises_anything_else(check: Any) -> None:
    for judged_by_llama_cpp in (gguf(), gguf(other=(U32, 0)), gguf(block_count=(STRING, "24"))):
        check(judged_by_llama_cpp)
    rng, num_refused, num = random.Random(28), 0, 1000
    for _ in range(num):
        try:
            check(flipped(gguf(), rng))
        except BrokenModel:
            num_refused += 1
    assert 0 < num_refused < num
