"""Many texts that wait behind one address are no flood: none of them is shut out, and none goes on alone."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.edge.channel import Channel
from skydraft.engines.toy import open_toy
from skydraft.protocol import codec
from skydraft.protocol.values import OpenCall, Opening
from skydraft.types import Prompt

from ..serving import PATIENCE_S, RawSession, serving
from .test_session_streams import Slow

GATED = make_plan(gate="entropy:0.3", k=4)
HEALTH = "/grpc.health.v1.Health/Check"


def test_waiting_texts_of_one_device_share_one_ping_and_stay_with_the_cloud(
    unhurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, called, sound = Slow(), Counter[str](), Channel.call

    async def call(self: Channel, path: str, timeout_s: float) -> bytes:
        called[path] += 1
        return await sound(self, path, timeout_s)

    monkeypatch.setattr(Channel, "call", call)
    with serving(slow.engine, max_sessions=8) as server, ThreadPoolExecutor(150) as texts:
        cloud = skydraft.connect(server.address)
        edge = open_toy("toy:drift=0.2", 512, 160)
        params = DecodingParams(max_new_tokens=4, min_new_tokens=4)

        def write(number: int) -> Any:
            with skydraft.generate("语速", edge=edge, cloud=cloud, plan=GATED, params=params) as generation:
                return generation.run().origins

        waiting = [texts.submit(write, number) for number in range(150)]
        server.wait_until(lambda: called[HEALTH] > 0)
        called.clear()
        began = time.monotonic()
        time.sleep(1.5)
        num_pings, took_s = called[HEALTH], time.monotonic() - began
        slow.may_go_on.set()
        origins = Counter(origin for text in waiting for origin in text.result(2 * PATIENCE_S))
        cloud.close()
    assert num_pings <= 2 + took_s / 0.3
    assert origins.total() == 600 and origins["edge-fallback"] == 0


def test_pings_of_devices_with_a_session_never_count_as_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty devices behind one address: their sessions wait for a seat, or have one."""
    monkeypatch.setattr("skydraft.cloud.access._CALLS_PER_S", 40)
    slow = Slow()
    with serving(slow.engine) as server:
        alone = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.insecure_channel(server.address, alone) for _ in range(30)]
        opening = Opening(server.server.info().fingerprint, Prompt((1,)))
        sessions = [RawSession(channel) for channel in channels]
        for number, session in enumerate(sessions, 1):
            session.send(codec.encode_open(OpenCall(number, 0, opening)))
        server.wait_until(lambda: len(server.server._service.ports()) == 30)
        for _ in range(2):  # while all wait, and when all have been answered
            for _ in range(5):
                for channel in channels:
                    assert channel.unary_unary(HEALTH)(b"", timeout=PATIENCE_S)
            if not slow.may_go_on.is_set():
                slow.may_go_on.set()
                for session in sessions:
                    session.answer()
        refused = [channels[0].unary_unary(HEALTH).future(b"", timeout=PATIENCE_S).exception() for _ in range(200)]
        assert any("Too many calls" in str(error) for error in refused)  # one of them that does flood
        assert channels[1].unary_unary(HEALTH)(b"", timeout=PATIENCE_S)
        for session, channel in zip(sessions, channels, strict=True):
            session.end()
            channel.close()
