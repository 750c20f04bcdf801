"""The demo pair, opened once. Without llama-cpp-python or the files these tests are skipped, and say why.

All are long but those of test_smoke.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import skydraft
from skydraft import DecodingParams, Engine, EngineOptions, Generation, make_plan
from skydraft.edge.cloud import Cloud
from skydraft.errors import NetworkUnavailable
from skydraft.models import default_pair

# Threads of llama.cpp spin while they wait for each other: on busy cores two of them may take minutes for what one
# does in seconds. Each context is probed up to its end, so a short one opens sooner; and for each number of sequences,
# so all files have the same two.
OPTIONS = EngineOptions(context_len=768, num_threads=1)
DRAFT_SEATS, TARGET_SEATS = 3, 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "real_pair" in item.nodeid:
            item.add_marker(pytest.mark.model)
            if item.path.name != "test_smoke.py":
                item.add_marker(pytest.mark.long)


def load(name: str, profile_path: Path | None = None) -> Engine:
    """A model of the pair, with as many seats as all have here. Skips the test where it is not on this machine."""
    pytest.importorskip("llama_cpp")
    max_sequences = DRAFT_SEATS if name == default_pair().draft else TARGET_SEATS
    try:
        options = replace(OPTIONS, max_sequences=max_sequences, profile_path=profile_path)
        return skydraft.load(name, options, offline=True)
    except NetworkUnavailable as error:
        pytest.skip(f"{name} is not on this machine: {error}")


@pytest.fixture(scope="package")
def edge(home: Path) -> Iterator[Engine]:
    with load(default_pair().draft) as engine:
        yield engine


@pytest.fixture(scope="package")
def cloud(home: Path) -> Iterator[Engine]:
    with load(default_pair().target) as engine:
        yield engine


def generate(
    prompt: str, mode: str, edge: Engine, cloud: Engine | Cloud, params: DecodingParams, k: int | None = None
) -> Generation:
    scope = "identity" if len(prompt) > 500 else ""  # a long prompt is read once: tests of conversations compare that
    plan = make_plan(mode, k=k)
    with skydraft.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=params, cache_scope=scope) as generation:
        return generation.run()
