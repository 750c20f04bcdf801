"""The page at a real gateway: a toy pair whose target is a server that can be killed and started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api")

import skydraft
from skydraft.engines.toy import open_toy
from skydraft.gateway.pair import Pair

from ...serving import Serving, free_port
from ..page.browsing import chromium, expected, open_page, page, problems  # noqa: F401
from ..running import gateway as running


def slow(engine: Any, forward_s: Callable[[], float]) -> Any:
    """The engine, whose forwards take so long as it says then."""
    sound = engine.forward

    def forward(feeds: Any, *, want_logits: bool) -> Any:
        time.sleep(forward_s())
        return sound(feeds, want_logits=want_logits)

    engine.forward = forward
    return engine


class Target:
    """A server of the target, on a port of its own. While it `lags` it is slower than its tokens are read, so that the
    text is not written to its end when the server dies."""

    def __init__(self) -> None:
        self.port = free_port()
        self.lags = False
        self._serving: Serving | None = None
        self.start()

    def start(self) -> None:
        from skydraft.cloud.server import ServeOptions

        engine = slow(open_toy("toy", 4096, 8), lambda: 0.015 * self.lags)
        self._serving = self._serving or Serving(engine, ServeOptions(port=self.port))

    def kill(self) -> None:
        if self._serving is not None:
            self._serving.stop()
            self._serving = None


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    target = Target()
    yield target
    target.kill()


@pytest.fixture(scope="module")
def address(target: Target) -> Iterator[str]:
    edge = slow(open_toy("toy:drift=0.2", 4096, 6), lambda: 0.01)
    cloud = skydraft.connect(f"127.0.0.1:{target.port}", timeout_s=2.0)
    with closing(cloud), running(Pair(edge, cloud)) as served:
        yield served.url


@pytest.fixture
def gateway(address: str, target: Target) -> str:
    target.lags = False
    target.start()
    return address
