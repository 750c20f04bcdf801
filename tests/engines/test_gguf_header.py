"""GGUF files that would end the process in llama.cpp are refused by their header, and no header ends it."""

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from skydraft.engines.llama.library import _builds, check_gguf, load_library
from skydraft.errors import BrokenModel

from ..mutating import flipped

EPSILON = "qwen2.attention.layer_norm_rms_epsilon"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def packed(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    kind, form = (4, "I") if isinstance(value, int) else (6, "f")
    return struct.pack(f"<I{form}", kind, value)


def gguf(layers: Any = 2, **more: Any) -> bytes:
    """A header of a model with so many layers."""
    fields = {"general.architecture": "qwen2", "qwen2.block_count": layers, "qwen2.embedding_length": 8, **more}
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(fields))
    return header + b"".join(text(name) + packed(value) for name, value in fields.items())


@pytest.fixture
def check(tmp_path: Path) -> Any:
    def check(data: bytes) -> None:
        (tmp_path / "m.gguf").write_bytes(data)
        check_gguf(load_library(), tmp_path / "m.gguf")

    if not _builds():
        pytest.skip("there is no llama.cpp")
    return check


BROKEN = {
    "no layers": gguf(0), "layers": gguf(2**32 - 1), "epsilon": gguf(**{EPSILON: -1.0}),
    "nan": gguf(**{EPSILON: float("nan")}), "cut": gguf()[:80], "an embedding model": gguf(**{"qwen2.pooling_type": 3}),
    "magic": b"GGML" + gguf()[4:], "empty": b"", "fields": gguf()[:16] + b"\xff" * 8 + gguf()[24:],
}  # fmt: skip


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_what_no_model_has_is_refused(data: bytes, check: Any) -> None:
    with pytest.raises(BrokenModel) as refused:
        check(data)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_no_header_ends_the_process_or_raises_anything_else(check: Any) -> None:
    for judged_by_llama_cpp in (gguf(), gguf(**{"qwen2.other": 0}), gguf("24")):
        check(judged_by_llama_cpp)
    rng, num_refused, num = random.Random(28), 0, 1000
    for _ in range(num):
        try:
            check(flipped(gguf(), rng))
        except BrokenModel:
            num_refused += 1
    assert 0 < num_refused < num
