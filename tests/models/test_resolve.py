"""Where a model comes from: the manifest of the known ones, the file or folder that a user names, and what the hub and
pip are asked."""

import errno
import importlib.util
import os
import subprocess
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from pydantic import ValidationError

from skydraft.errors import (
    BrokenModel,
    MissingDependency,
    NetworkUnavailable,
    NotEnoughDisk,
    SkydraftError,
    UnknownModel,
)
from skydraft.models import KNOWN, default_pair, sources
from skydraft.models.manifest import KnownModel, Part
from skydraft.models.resolve import resolve

from .published import FakeWorld, Published, publish


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of every sort, and the working directory."""
    folder = tmp_path / "place"
    for file in (
        "good.gguf", "checkpoint/config.json", "checkpoint/model.gguf", "single/only.gguf", "single/README.md",
        "many/a.gguf", "many/b.gguf", "many/sub/README.md", "nothing/README.md", "tiny/config.json",
    ):  # fmt: skip
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"GGUF\x03" if file.endswith("gguf") else b"{}")
    (folder / "bad.gguf").write_bytes(b"<html>")
    (folder / "empty.gguf").touch()
    os.mkfifo(folder / "pipe.gguf")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def part(published: Published) -> Part:
    return published.model.parts[0]


def fail_with(error: BaseException) -> object:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_the_packaged_models_are_whole() -> None:
    assert list(KNOWN) == ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"] == [default_pair().draft, default_pair().target]
    wheels = [part.wheel for model in KNOWN.values() for part in model.parts]
    assert len(wheels) == len(set(wheels))
    for name, model in KNOWN.items():
        assert name == model.name and sum(part.bytes for part in model.parts) == model.bytes
        for part in model.parts:
            stem = part.package.replace("-", "_")
            assert part.wheel == f"{stem}-{part.version}-py3-none-any.whl" and part.member.startswith(f"{stem}/")


@pytest.mark.parametrize(("field", "values"), [
    ("sha256", ["ABC"]), ("file", ["../escape.gguf", ".hidden"]), ("mirror", ["x"]),
    *((field, ["../x", "a/b", "-r", ""]) for field in ("wheel", "package", "version")),
])  # fmt: skip
def test_a_wrong_model_does_not_parse_and_no_part_names_a_path_or_an_option(field: str, values: list[str]) -> None:
    model = publish().model
    kind, given = (Part, model.parts[0]) if field in Part.model_fields else (KnownModel, model)
    for value in values:
        with pytest.raises(ValidationError, match=field):
            kind.model_validate(given.model_dump() | {field: value})


@pytest.mark.parametrize(("spec", "path"), [
    ("toy", None), ("toy:drift=0.4", None), ("toy:{place}/good.gguf", None),
    ("good.gguf", "good.gguf"),
    ("./good.gguf", "good.gguf"), ("{place}/good.gguf", "{place}/good.gguf"),
    ("checkpoint", "checkpoint"), ("./tiny", "tiny"), ("single/", "single/only.gguf"),
])  # fmt: skip
def test_local_specs(place: Path, world: FakeWorld, spec: str, path: str | None) -> None:
    spec = spec.format(place=place)
    expected = None if path is None else Path(path.format(place=place))
    assert resolve(spec, world.cache) == expected
    assert world.asked == []


@pytest.mark.parametrize(("spec", "error", "match"), [
    ("gone.gguf", UnknownModel, "no file gone.gguf"), ("many/sub/gone.gguf", UnknownModel, "no file"),
    ("pipe.gguf", BrokenModel, "not a regular file"), ("bad.gguf", BrokenModel, "does not start with GGUF"),
    ("empty.gguf", BrokenModel, "is empty"), ("many", BrokenModel, r"2 \.gguf files.*a\.gguf"),
    ("nothing", BrokenModel, r"no config\.json"), ("tinny", UnknownModel, r"Did you mean tiny\? Known: tiny"),
    ("toys", UnknownModel, r"Known: tiny\. Or give .*tiny-omni-cloud, toy, a \.gguf file"),
    ("other:x", UnknownModel, "not a known model"), ("", UnknownModel, "Known"),
    ("a/b/c", UnknownModel, "not a known model"), ("https://example.org/x.gguf", UnknownModel, "no file https://"),
])  # fmt: skip
def test_specs_of_nothing(place: Path, world: FakeWorld, spec: str, error: type[SkydraftError], match: str) -> None:
    with pytest.raises(error, match=match) as raised:
        resolve(spec, world.cache)
    assert raised.value.hint and "\n" not in str(raised.value)
    assert world.asked == []


def test_a_known_name_is_fetched_even_beside_a_folder_of_that_name(place: Path, world: FakeWorld) -> None:
    assert resolve("tiny", world.cache) == world.target
    assert world.target.read_bytes() == world.published.content


@pytest.mark.parametrize("offline", [False, True])
def test_the_hub_is_asked_for_what_is_not_here(place: Path, world: FakeWorld, offline: bool) -> None:
    for spec in ("org/name", "org/name/file.gguf"):
        with pytest.raises(NetworkUnavailable, match=r"nothing is downloaded offline|no hub"):
            resolve(spec, world.cache, offline=offline)
    assert world.asked == [f"org/name offline={offline}", *["org/name/file.gguf"] * (not offline)]
    world.folders |= {"org/name": place / "checkpoint", "org/name-GGUF": place / "nothing"}
    assert resolve("org/name", world.cache, offline=offline) == place / "checkpoint"
    with pytest.raises(BrokenModel, match=r"org/name/file\.gguf"):
        resolve("org/name-GGUF", world.cache, offline=offline)


@pytest.mark.parametrize("file", ["org/name/good.gguf", "org/name/sub/good.gguf"])
def test_a_hub_file(place: Path, world: FakeWorld, file: str) -> None:
    world.hub |= {file: place / "good.gguf", "org/name/bad.gguf": place / "bad.gguf"}
    assert resolve(file, world.cache) == place / "good.gguf"
    with pytest.raises(BrokenModel):
        resolve("org/name/bad.gguf", world.cache)
    world.hub_cache[file] = place / "good.gguf"
    assert resolve(file, world.cache, offline=True) == place / "good.gguf"
    assert world.asked == [file, "org/name/bad.gguf"]


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
