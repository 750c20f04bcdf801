"""One binding over several builds of llama.cpp: which one is taken, and what is said where none fits."""

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from skydraft.engines.llama import library as llama_library
from skydraft.engines.llama.library import Library, load_library
from skydraft.errors import MissingDependency

BUILDS = llama_library._builds()


@pytest.mark.parametrize(("path", "name"), BUILDS, ids=[name for _, name in BUILDS])
def test_each_build_that_is_installed_fits(path: Path, name: str) -> None:
    library = Library(path, name)
    assert library.name == name and "CPU" in library.print_system_info().decode()


@pytest.fixture
def fresh() -> Iterator[None]:
    load_library.cache_clear()
    yield
    load_library.cache_clear()


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
