"""What tests of the edge share."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

import skydraft
from skydraft.engines.toy import open_toy

from .. import toys
from ..serving import Relay, serving
from .texts import Start

SEEDS = (4, 17, 33)


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda engine=None, **options: stack.enter_context(serving(engine or open_toy("toy"), **options))


@pytest.fixture
def relay() -> Iterator[Relay]:
    with serving(open_toy("toy")) as server, Relay(server.address) as running:
        yield running


@pytest.fixture(scope="module")
def clouds() -> Iterator[dict[int, Any]]:
    """A connection to a server for each target; it is waited for, since a busy machine is no fault of the link."""
    with ExitStack() as stack:
        servers = {seed: stack.enter_context(serving(toys.toy(seed))) for seed in SEEDS}
        connected = {seed: skydraft.connect(server.address, require=True) for seed, server in servers.items()}
        for each in connected.values():
            stack.enter_context(closing(each))
        yield connected
