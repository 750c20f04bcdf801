"""One gateway for all clients."""

from collections.abc import Iterator

import pytest

from tests.gateway.running import Running, gateway

from .asking import calling_pair, speaking_pair


@pytest.fixture(scope="session")
def served() -> Iterator[Running]:
    """A gateway over a toy pair."""
    with gateway(speaking_pair()) as running:
        yield running


@pytest.fixture(scope="session")
def called() -> Iterator[Running]:
    """A gateway over a pair that answers a question by a call."""
    with gateway(calling_pair("pick_city", {"city": "上海", "days": 3})) as running:
        yield running
