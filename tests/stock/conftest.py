"""One server of each kind for all tests that leave it as it was."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from typing import Any, TypeAlias

import pytest

import skydraft
from skydraft import Generation
from tests import toys
from tests.engines.conftest import gguf_path  # noqa: F401
from tests.hostile.texts import TARGET, write
from tests.stock.fakes import IDS, Fake, fake
from tests.stock.faults import Fault

# `write` a text with this plan while the server answers so; gives it and how many requests it took.
Spoilt: TypeAlias = Callable[..., tuple[Generation, int]]


SEED = 17


@pytest.fixture(scope="module")
def clouds() -> Iterator[dict[str, Any]]:
    """A connection to each kind of server that is sent ids; it was started with penalties of its own."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr("skydraft.edge.stock.connection.SAMPLE", toys.PROMPT)  # this vocabulary can read no other text
        found = {}
        for dialect in IDS:
            server = stack.enter_context(fake(dialect, engine=toys.toy(SEED)))
            server.model.usual = {"repetition_penalty": 1.3, "presence_penalty": 1.5}
            found[dialect] = stack.enter_context(closing(skydraft.connect(server.url, require=True)))
        yield found


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
            begun = len(server.generating)
            server.storm(fault)
            try:
                return write(cloud, plan, raw=api != "chat").run(), len(server.generating) - begun
            finally:
                server.wait_until_idle()
                server.storm(None)

        yield spoil


def said(*texts: str) -> list[Any]:
    """Events of a chat."""
    return [{"choices": [{"index": 0, "delta": {"content": each}}]} for each in texts]
