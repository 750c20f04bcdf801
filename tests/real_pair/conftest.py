"""The demo pair, opened once. Without llama-cpp-python or the files these tests are skipped, and say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import skydraft
from skydraft import Engine, EngineOptions
from skydraft.errors import NetworkUnavailable
from skydraft.models import default_pair


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "real_pair" in item.nodeid:
            item.add_marker(pytest.mark.model)


def load(name: str, options: EngineOptions | None = None) -> Engine:
    pytest.importorskip("llama_cpp")
    try:
        return skydraft.load(name, options, offline=True)
    except NetworkUnavailable as error:
        pytest.skip(f"not here and not to be had: {error}")


@pytest.fixture(scope="session")
def edge() -> Iterator[Engine]:
    """The draft model."""
    engine = load(default_pair().draft)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def cloud() -> Iterator[Engine]:
    """The target model."""
    engine = load(default_pair().target)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def three_seats() -> Iterator[Engine]:
    """The draft model with room for three sequences."""
    engine = load(default_pair().draft, EngineOptions(context_len=1024, max_sequences=3))
    yield engine
    engine.close()
