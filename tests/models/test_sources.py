from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from skydraft.errors import MissingDependency, NetworkUnavailable
from skydraft.models import sources
from skydraft.models.manifest import Part

from .published import Published


@pytest.fixture
def part(published: Published) -> Part:
    return published.model.parts[0]


@pytest.fixture
def local_index(tmp_path: Path, published: Published, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's pip configuration: no network, wheels from a folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, data in published.wheels.items():
        (folder / name).write_bytes(data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def fail_with(error: Exception) -> object:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_wheel_that_pip_cannot_find(part: Part, local_index: Path, tmp_path: Path) -> None:
    (local_index / part.wheel).unlink()
    with pytest.raises(NetworkUnavailable, match=r"pip could not download tiny-part0 1\.0 \(.+\)") as raised:
        sources.pip_wheel(part, tmp_path / "pieces", lambda received: None)
    assert raised.value.hint and "\n" not in str(raised.value)
    assert not list((tmp_path / "pieces").glob("*.tmp"))


def test_an_interrupt_ends_pip_and_its_scratch(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []
    real = subprocess.Popen

    def sleeping(command: list[str], **options: object) -> object:
        processes.append(real(["sleep", "60"], **options))  # type: ignore[call-overload]
        return processes[0]

    def interrupt(received: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", sleeping)
    with pytest.raises(KeyboardInterrupt):
        sources.pip_wheel(part, tmp_path, interrupt)
    assert processes[0].poll() is not None
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_pip(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="ensurepip"):
        sources.pip_wheel(part, tmp_path, lambda received: None)


def test_hub_file_asks_once_before_it_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[str] = []
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *args: downloads.append("/".join(args)) or "/hf/file.gguf"
    )
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail_with(RuntimeError("no route\nto host")))
    with pytest.raises(NetworkUnavailable, match=r"org/name/file\.gguf \(no route to host\)"):
        sources.hub_file("org/name", "file.gguf")
    assert downloads == []
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: SimpleNamespace())
    assert sources.hub_file("org/name", "file.gguf") == Path("/hf/file.gguf")
    assert downloads == ["org/name/file.gguf"]


def test_hub_folder_falls_back_to_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def snapshot(repo: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        calls.append(local_files_only)
        assert "*.safetensors" in allow_patterns and "*.bin" not in allow_patterns
        return "/hf/snapshot"

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail_with(OSError("no route")))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert sources.hub_folder("org/name", False) == Path("/hf/snapshot")
    assert sources.hub_folder("org/name", True) == Path("/hf/snapshot")
    assert calls == [True, True]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail_with(LocalEntryNotFoundError("none")))
    with pytest.raises(NetworkUnavailable, match="no route"):
        sources.hub_folder("org/name", False)
    with pytest.raises(NetworkUnavailable, match="offline"):
        sources.hub_folder("org/name", True)


def test_hub_cached_tells_a_known_absence_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, expected in [(None, None), (object(), None), ("/hf/file", Path("/hf/file"))]:
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, answer=answer: answer)
        assert sources.hub_cached("org/name", "file") == expected


def test_pip_downloads_one_wheel_without_what_it_needs(part: Part, local_index: Path, tmp_path: Path) -> None:
    # The fake wheels have no metadata, which pip asks for.
    with zipfile.ZipFile(local_index / part.wheel, "a") as wheel:
        info = "tiny_part0-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-part0\nVersion: 1.0\nRequires-Dist: a\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    received: list[int] = []
    sources.pip_wheel(part, tmp_path / "pieces", received.append)
    assert received == sorted(received) and received  # pip takes longer than one look
    (found,) = (tmp_path / "pieces").iterdir()
    assert found.name == part.wheel and found.read_bytes() == (local_index / part.wheel).read_bytes()
