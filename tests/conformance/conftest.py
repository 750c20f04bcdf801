"""One gateway for all clients."""

from collections.abc import Iterator

import pytest

from tests.gateway.interfaces import call_text
from tests.gateway.running import Running, gateway, scripted_pair

from .asking import speaking_pair


@pytest.fixture(scope="session")
def served() -> Iterator[Running]:
    """A gateway over a toy pair."""
    with gateway(speaking_pair()) as running:
        yield running


@pytest.fixture(scope="session")
def called() -> Iterator[Running]:
    """A gateway over a pair that answers a question by a call."""
    steps = [call_text("pick_city", {"city": "上海", "days": 3}), "done"]
    with gateway(scripted_pair(steps)) as running:
        yield running
