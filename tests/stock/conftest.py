"""One server of each kind for all tests that leave it as it was."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from typing import Any, TypeAlias

import pytest

import skydraft
from skydraft import Generation
from tests.engines.conftest import gguf_path  # noqa: F401
from tests.hostile.texts import TARGET, write
from tests.stock.fakes import GENERATING, Fake, fake
from tests.stock.faults import Fault

# `write` a text with this plan while the server answers so; gives it and how many requests it took.
Spoilt: TypeAlias = Callable[..., tuple[Generation, int]]


def num_asked(server: Fake) -> int:
    return sum(asked.path in GENERATING for asked in server.model.asked)


@pytest.fixture(scope="module")
def spoilt() -> Iterator[Spoilt]:
    """A text from a server of the kind `api`, and how many requests it took."""
    with ExitStack() as stack:

        @cache
        def met(api: str) -> tuple[Fake, Any]:
            server = stack.enter_context(fake("openai" if api == "chat" else api, TARGET))
            cloud = skydraft.connect(server.url, timeout_s=20, api=api, model="toy")
            stack.enter_context(closing(cloud))
            write(cloud, "cloud", raw=api != "chat").run()
            return server, cloud

        @cache
        def spoil(api: str, plan: str, fault: Fault | None = None) -> tuple[Generation, int]:
            server, cloud = met(api)
            begun = num_asked(server)
            server.fault_of = lambda path: fault if path in GENERATING else None
            try:
                return write(cloud, plan, raw=api != "chat").run(), num_asked(server) - begun
            finally:
                server.wait_until_idle()
                server.fault_of = lambda path: None

        yield spoil
