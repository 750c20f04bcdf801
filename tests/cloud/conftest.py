"""What tests of servers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skydraft.engines.toy import open_toy

from ..serving import Serving, serving


@pytest.fixture
def server() -> Iterator[Serving]:
    with serving(open_toy("toy")) as running:
        yield running
