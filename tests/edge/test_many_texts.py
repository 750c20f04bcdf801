"""Many texts that wait over one connection share a ping, and none goes on alone."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.edge.channel import Channel
from skydraft.engines.toy import open_toy

from ..serving import PATIENCE_S, serving, waiting

GATED = make_plan(gate="entropy:0.3", k=4)
HEALTH = "/grpc.health.v1.Health/Check"


class Slow:
    """`engine` waits with each forward until it may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.engine = waiting(open_toy("toy"), lambda: self.may_go_on.wait(PATIENCE_S))


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
