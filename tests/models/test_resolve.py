import os
from pathlib import Path

import pytest

from skydraft.errors import BrokenModel, NetworkUnavailable, SkydraftError, UnknownModel
from skydraft.models.resolve import resolve

from .published import FakeWorld


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
