"""One binding over several builds of llama.cpp: which one is taken, and what is said where none fits."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

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


@pytest.mark.parametrize("name", ["gone.so", "no_library.so", LIBC])
def test_the_fault_of_a_build_is_told(name: str, fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "no_library.so").write_bytes(b"no library")
    path = Path(name) if name == LIBC else tmp_path / name
    monkeypatch.setattr(llama_library, "_builds", lambda: [(path, "a copy")])
    with pytest.raises(MissingDependency, match="llama_backend_init" if name == LIBC else name):
        load_library()


def test_other_structures_are_refused(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_library, "_F16", 7)
    with pytest.raises(MissingDependency, match="structures differ"):
        load_library()


@pytest.mark.parametrize("others", [True, False])
def test_a_build_with_amx_is_passed_over(others: bool, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the process at the first forward of three rows on a machine with AMX (llama.cpp #20824)."""
    builds = [(path, f"{name}, a copy") for path, name in BUILDS[:1]] + BUILDS * others
    monkeypatch.setattr(llama_library, "_builds", lambda: builds)
    made = llama_library.Library

    def with_amx(path: Path, name: str) -> Library:
        library = made(path, name)
        if name.endswith("copy"):
            library.print_system_info = lambda: b"CPU : AMX_INT8 = 1"
        return library

    monkeypatch.setattr(llama_library, "Library", with_amx)
    if others:
        assert load_library().name == BUILDS[0][1]
        return
    with pytest.raises(MissingDependency, match="a copy: its kernels for AMX may crash; compile it with CMAKE_ARGS="):
        load_library()


@pytest.mark.parametrize(
    ("running", "user", "told"),
    [  # of four cores
        ("4", {}, ("passive", None)), ("3", {}, (None, "10000")), ("x", {}, (None, "10000")),
        (None, {}, (None, "10000")), ("4", {"OMP_WAIT_POLICY": "active"}, ("active", None)),
        ("4", {"GOMP_SPINCOUNT": "7"}, (None, "7")),
    ],
)  # fmt: skip
def test_threads_that_wait_sleep_sooner_on_a_busy_machine_and_nobody_else_is_told(
    running: str | None, user: dict[str, str], told: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With threads that spin, another busy process makes a forward ten times as long (NOTES.md)."""
    names, found = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"), []
    cdll = llama_library.ctypes.CDLL

    def opened(path: str) -> object:
        found.append(tuple(os.environ.get(name) for name in names))
        return cdll(path)

    monkeypatch.setattr(llama_library.ctypes, "CDLL", opened)
    monkeypatch.setattr(llama_library, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    if running is not None:
        (tmp_path / "stat").write_text(f"cpu 1 2 3\nprocs_running {running}\nprocs_blocked 0\n")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    Library(*BUILDS[0])
    assert found == [told] and {name: os.environ[name] for name in names if name in os.environ} == user
