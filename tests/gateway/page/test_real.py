"""The page at a real gateway: what holds anywhere, before a pair of toys."""

from collections.abc import Iterator

import pytest

from ..running import gateway as running
from .test_anywhere import test_a_conversation_of_two_turns  # noqa: F401

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    with running() as served:
        yield served.url
