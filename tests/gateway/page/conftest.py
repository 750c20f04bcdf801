"""The fake gateway as the place where the page is."""

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright.sync_api")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from .browsing import chromium, expected, open_page, page, problems  # noqa: F401
from .fake_gateway import FakeGateway


@pytest.fixture(scope="session")
def server() -> Iterator[FakeGateway]:
    server = FakeGateway()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def fake(server: FakeGateway) -> FakeGateway:
    server.reset()
    return server


@pytest.fixture
def gateway(fake: FakeGateway) -> str:
    return fake.url
