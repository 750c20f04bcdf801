from pathlib import Path

import pytest

from .published import FakeWorld, Published, publish


@pytest.fixture
def published() -> Published:
    return publish()


@pytest.fixture
def world(published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWorld:
    """The index has all wheels, the hub cannot be reached, the Hugging Face cache is empty."""
    world = FakeWorld(published, tmp_path / "home", dict(published.wheels))
    world.answer(monkeypatch)
    return world
