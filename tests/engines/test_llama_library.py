"""The library of llama.cpp: which of several builds is taken, and what is said where none fits; and GGUF files that
would end the process in it are refused by their header."""

import ctypes
import os
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skydraft.engines.llama import library as llama_library
from skydraft.engines.llama.library import Library, _builds, check_gguf, load_library
from skydraft.errors import BrokenModel, MissingDependency

from ..mutating import flipped

BUILDS = llama_library._builds()
EPSILON = "qwen2.attention.layer_norm_rms_epsilon"


@pytest.fixture
def fresh() -> Iterator[None]:
    load_library.cache_clear()
    yield
    load_library.cache_clear()


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


@pytest.mark.parametrize(("path", "name"), BUILDS, ids=[name for _, name in BUILDS])
def test_each_build_that_is_installed_fits(path: Path, name: str) -> None:
    library = Library(path, name)
    assert library.name == name and "CPU" in library.print_system_info().decode()


LIBC = "libc.so.6" if sys.platform == "linux" else "libSystem.dylib"


@pytest.mark.parametrize(("name", "says"), [
    ("gone.so", "gone.so"), ("no_library.so", "no_library.so"), (LIBC, "llama_backend_init"),
    ("of others", "structures differ"),
])  # fmt: skip
def test_the_fault_of_a_build_is_told(
    name: str, says: str, fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "no_library.so").write_bytes(b"no library")
    path = {LIBC: Path(name), "of others": BUILDS[0][0]}.get(name, tmp_path / name)
    monkeypatch.setattr(llama_library, "_builds", lambda: [(path, "a copy")])
    if name == "of others":
        monkeypatch.setattr(llama_library, "_F16", 7)
    with pytest.raises(MissingDependency, match=says):
        load_library()


@pytest.mark.parametrize("others", [["good"], []])
def test_a_build_with_amx_is_passed_over(others: list[str], fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the process at the first forward of three rows on a machine with AMX (llama.cpp #20824)."""

    def build(path: Path, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, print_system_info=lambda: b"CPU : AMX_INT8 = 1" if name == "amx" else b"CPU")

    monkeypatch.setattr(llama_library, "Library", build)
    monkeypatch.setattr(llama_library, "_builds", lambda: [(Path(name), name) for name in ("amx", *others)])
    if others:
        assert load_library().name == "good"
        return
    with pytest.raises(MissingDependency, match="amx: its kernels for AMX may crash; compile it with CMAKE_ARGS="):
        load_library()


PASSIVE, SOON = {"OMP_WAIT_POLICY": "passive"}, {"GOMP_SPINCOUNT": "10000"}


@pytest.mark.parametrize(("running", "user", "told"), [  # of four cores
    ("4", {}, PASSIVE), ("3", {}, SOON), ("x", {}, SOON), (None, {}, SOON),
    *(("4", user, user) for user in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"})),
])  # fmt: skip
def test_threads_that_wait_sleep_sooner_on_a_busy_machine_and_nobody_else_is_told(
    running: str | None, user: dict[str, str], told: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With threads that spin, another busy process makes a forward ten times as long (NOTES.md)."""
    found, cdll = list[object](), ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda path: found.append({**os.environ}) or cdll(path))
    monkeypatch.setattr(os, "environ", {**user})
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(llama_library, "_STAT", tmp_path / "stat")
    if running is not None:
        (tmp_path / "stat").write_text(f"cpu 1 2 3\nprocs_running {running}\nprocs_blocked 0\n")
    Library(*BUILDS[0])
    assert found == [told] and os.environ == user


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
