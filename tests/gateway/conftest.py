"""One gateway for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .running import Running, gateway


@pytest.fixture(scope="session")
def served() -> Iterator[Running]:
    """A gateway over a toy pair."""
    with gateway() as running:
        yield running
