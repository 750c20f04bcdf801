"""What tests of the edge share."""

from __future__ import annotations

import pytest

from ..serving import Unhurried


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gated runs wait three times as long as they do before they go on alone."""
    monkeypatch.setattr("skydraft.edge.connection.Patience", Unhurried)
