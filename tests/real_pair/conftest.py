"""The demo pair, opened once. Without llama-cpp-python or the files these tests are skipped, and say why.

Each test has the engines to itself: the sequences that it leaves open, as one that fails does, are closed after it.
All are long but those of `_SHORT`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import skydraft
from skydraft import Engine, EngineOptions
from skydraft.engines.base import Sequence
from skydraft.errors import NetworkUnavailable
from skydraft.models import default_pair

# Threads of llama.cpp spin while they wait for each other: on busy cores two of them may take minutes for what one
# does in seconds. Each context is probed up to its end, so a short one opens sooner; and for each number of sequences,
# so all files have the same two.
OPTIONS = EngineOptions(context_len=768, num_threads=1)
DRAFT_SEATS, TARGET_SEATS = 3, 2
_SHORT = ("test_smoke.py",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "real_pair" in item.nodeid:
            item.add_marker(pytest.mark.model)
            if item.path.name not in _SHORT:
                item.add_marker(pytest.mark.long)


def load(name: str, profile_path: Path | None = None) -> Engine:
    """A model of the pair, with as many seats as all have here. Skips the test where it is not on this machine."""
    pytest.importorskip("llama_cpp")
    max_sequences = DRAFT_SEATS if name == default_pair().draft else TARGET_SEATS
    try:
        return skydraft.load(
            name, replace(OPTIONS, max_sequences=max_sequences, profile_path=profile_path), offline=True
        )
    except NetworkUnavailable as error:
        pytest.skip(f"{name} is not on this machine: {error}")


@contextmanager
def lent(engine: Engine) -> Iterator[Engine]:
    """`engine`, which at the end has all sequences back that were begun in the meantime."""
    begun: list[Sequence] = []
    begin = engine.begin

    def recorded(*args: object, **options: object) -> Sequence:
        begun.append(begin(*args, **options))  # type: ignore[arg-type]
        return begun[-1]

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "begin", recorded)
            yield engine
    finally:
        for sequence in begun:
            sequence.close()


@pytest.fixture(scope="package")
def draft_model(home: Path) -> Iterator[Engine]:
    with load(default_pair().draft) as engine:
        yield engine


@pytest.fixture(scope="package")
def target_model(home: Path) -> Iterator[Engine]:
    with load(default_pair().target) as engine:
        yield engine


@pytest.fixture
def edge(draft_model: Engine) -> Iterator[Engine]:
    """The draft model."""
    with lent(draft_model) as engine:
        yield engine


@pytest.fixture
def cloud(target_model: Engine) -> Iterator[Engine]:
    """The target model."""
    with lent(target_model) as engine:
        yield engine
