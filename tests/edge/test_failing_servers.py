"""Servers that are gone, silent, forgetful or wrong about themselves: the edge says so soon and keeps nothing. And what
it asks a server of itself: once, not for each text."""

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import repeat
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

import skydraft
from skydraft import make_plan
from skydraft.edge.channel import Channel
from skydraft.edge.session import OwnServer
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudError, CloudFailure, CloudLost, SessionNotFound
from skydraft.protocol.codec import encode_info

from ..hostile.own import refuses
from ..serving import Relay, Serving, ran_s, serving
from .texts import begin

AUTO = make_plan("lossless")


@pytest.fixture
def server() -> Iterator[Serving]:
    with serving(open_toy("toy")) as running:
        yield running


def write(cloud: Any, plan: Any = AUTO) -> tuple[int, ...]:
    return begin(cloud, plan).run().token_ids


def test_what_a_gated_plan_asks_first_takes_a_second_at_most(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(self: Channel, timeout_s: float) -> float:
        await asyncio.sleep(min(timeout_s, 5))
        raise CloudLost("no sign of life")

    monkeypatch.setattr(Channel, "ping", silent)
    with closing(skydraft.connect(server.address)) as cloud:
        began = ran_s()
        generation = begin(cloud, make_plan(gate="entropy:0.3"))
        assert ran_s() - began < 2
        generation.close()
        assert cloud.facts(0) is None


def test_a_generation_that_cannot_begin_leaves_no_seat_behind(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnServer, "info", AsyncMock(side_effect=CloudFailure("no")))
    with closing(skydraft.connect(server.address, timeout_s=2, open_ahead=True, require=True)) as cloud:
        with pytest.raises(CloudFailure):
            write(cloud, make_plan("auto", gate="calibrated:0.85"))
        time.sleep(0.3)  # one that was left would be there by now, and stay
        server.wait_until(lambda: server.num_sessions == 0)


def test_a_server_that_forgets_every_session_is_not_asked_without_a_pause(server: Serving) -> None:
    """Each opening feeds the whole prompt again."""
    alone = {"timeout_s": 1.5, "require": True}
    with Relay(server.address) as relay, closing(skydraft.connect(relay.address, **alone)) as cloud:
        relay.faults = repeat(refuses(SessionNotFound))
        with pytest.raises(CloudError):
            write(cloud, make_plan(k=5))
    assert 3 <= sum(name == "verify" for name, _ in relay.requests) <= 12


def test_nonsense_that_a_server_says_of_itself_is_its_failure(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    said = encode_info(dataclasses.replace(server.server.info(), max_sessions=0))
    sound = Channel.call

    async def call(self: Channel, path: str, timeout_s: float) -> bytes:
        return said if path.endswith("GetInfo") else await sound(self, path, timeout_s)

    monkeypatch.setattr(Channel, "call", call)
    with closing(skydraft.connect(server.address, timeout_s=1)) as cloud:
        for ask in (cloud.info, lambda: cloud.facts(None)):
            with pytest.raises(CloudFailure, match="invalid description"):
                ask()


def test_what_a_server_costs_is_asked_once(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    with Relay(server.address) as relay, closing(skydraft.connect(relay.address)) as cloud:

        def num_asked() -> int:
            return sum(name == "GetInfo" for name, _ in relay.requests)

        assert {write(cloud) for _ in range(3)} == {write(open_toy("toy"))} and num_asked() == 1  # who it is
        now = time.monotonic
        monkeypatch.setattr("skydraft.edge.cloud.time", SimpleNamespace(monotonic=lambda: now() + 3600))
        write(cloud)
        assert num_asked() == 1
