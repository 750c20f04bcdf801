from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from skydraft.errors import HashMismatch, UnknownModel
from skydraft.models import cache_dir, installed, verify
from skydraft.models.fetch import fetch_model

from .published import FakeWorld, Published, publish


def test_skydraft_home_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.setenv("SKYDRAFT_HOME", "relative")
    assert cache_dir() == Path.cwd() / "relative"
    monkeypatch.setenv("SKYDRAFT_HOME", "~/models")
    assert cache_dir() == Path.home() / "models"


@pytest.mark.parametrize("home", [None, ""])
def test_the_users_cache_folder_otherwise(monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    monkeypatch.delenv("SKYDRAFT_HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("SKYDRAFT_HOME", home)
    assert cache_dir() == Path(platformdirs.user_cache_dir("skydraft"))


def test_installed_lists_present_and_missing(published: Published, world: FakeWorld, cache: Path) -> None:
    other = publish("other").model
    models = {"tiny": published.model, "other": other}
    assert [row.present for row in installed(cache, models)] == [False, False]
    path = fetch_model(published.model, cache, sources=world.sources())
    tiny, missing = installed(cache, models)
    assert (tiny.name, tiny.present, tiny.bytes, tiny.path, tiny.license) == (
        "tiny",
        True,
        len(published.content),
        path,
        "Apache-2.0",
    )
    assert (missing.name, missing.present, missing.bytes) == ("other", False, other.bytes)


def test_installed_knows_the_packaged_models(cache: Path) -> None:
    assert [row.name for row in installed(cache)] == ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]


def test_verify_finds_a_flipped_byte(published: Published, world: FakeWorld, cache: Path) -> None:
    models = {"tiny": published.model}
    path = fetch_model(published.model, cache, sources=world.sources())
    verify(path, models)
    path.write_bytes(published.content[:-1] + b"?")
    assert installed(cache, models)[0].present  # by its size
    with pytest.raises(HashMismatch, match="skydraft models fetch tiny") as raised:
        verify(path, models)
    assert str(path) in str(raised.value)


def test_verify_needs_a_known_file(published: Published, cache: Path) -> None:
    with pytest.raises(UnknownModel, match="No published hash"):
        verify(cache / "other.gguf", {"tiny": published.model})
    with pytest.raises(UnknownModel, match="skydraft models fetch tiny"):
        verify(cache / "models" / "tiny.gguf", {"tiny": published.model})
