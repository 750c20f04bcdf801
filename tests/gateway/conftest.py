"""One gateway for all tests that leave it as it was, and OpenAI's client of it."""

from collections.abc import Iterator

import pytest

from ..later import later
from .running import PATIENCE_S, Running, gateway

openai = later("openai")


@pytest.fixture(scope="session")
def served() -> Iterator[Running]:
    with gateway() as running:
        yield running


@pytest.fixture(scope="session")
def client(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client
