"""What tests of the edge share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from skydraft.engines.toy import open_toy

from ..serving import Unhurried, serving
from .several_servers import Start


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gated runs wait three times as long as they do before they go on alone."""
    monkeypatch.setattr("skydraft.edge.cloud.Patience", Unhurried)
    monkeypatch.setattr("skydraft.edge.recovery.MOVE_S", 3.0)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a server, which ends with the test."""
    with ExitStack() as stack:
        yield lambda engine=None, **options: stack.enter_context(serving(engine or open_toy("toy"), **options))
