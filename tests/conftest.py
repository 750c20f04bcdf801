"""Garbage is collected after each file, so that what its tests left open is said of them and not of others.

In tests `lossless` drafts blocks of five: by itself it lets the target go alone where that is faster, which with toys
it is, and the laws about it would hold of themselves. `as_shipped` gives a test the mode as users have it.
"""

from __future__ import annotations

import gc

import pytest

from skydraft.config import MODES, ModeSpec

_SHIPPED = MODES["lossless"]
MODES["lossless"] = ModeSpec("always", 5)


@pytest.fixture
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modes as users have them."""
    monkeypatch.setitem(MODES, "lossless", _SHIPPED)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of the real pair first: one file of them takes a third of the time, and two processes share it all."""
    items.sort(key=lambda item: "real_pair" not in item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
