"""A gateway over several servers: its answers spread, and a server that ends takes none of them with it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

import skydraft
from skydraft.engines.toy import open_toy
from skydraft.errors import ServersDiffer
from skydraft.gateway.pair import Pair

from ..serving import free_port, serving
from .running import PATIENCE_S, gateway


def test_answers_spread_over_servers_and_survive_the_end_of_one() -> None:
    ports = [free_port(), free_port()]
    lines: list[str] = []
    with (
        serving(open_toy("toy"), metrics_port=ports[0]) as first,
        serving(open_toy("toy"), metrics_port=ports[1]) as second,
        closing(skydraft.connect([first.address, second.address], timeout_s=PATIENCE_S, notify=lines.append)) as cloud,
    ):
        pair = Pair(open_toy("toy:drift=0.2", 4096, 6), connect=cloud.beside, calibrated=False)
        with gateway(pair, max_running=4, max_waiting=50) as running, ThreadPoolExecutor(4) as pool:

            def ask(number: int) -> str:
                reply = running.chat(model="skydraft-lossless", seed=number % 3, temperature=0.8, max_tokens=24)
                assert reply.status_code == 200, reply.text
                return str(reply.json()["choices"][0]["message"]["content"])

            texts = list(pool.map(ask, range(24)))
            tokens = [each.metric('generated_tokens_total{model="toy"}') for each in (first, second)]
            assert min(tokens) > 0 and texts[:3] * 8 == texts
            first.stop()
            assert list(pool.map(ask, range(24))) == texts
            assert running.v1 and pair.cloud_state() == "up"
            running.wait_until(lambda: len(lines) == 1)
            assert first.address in lines[0]  # said once, for all connections
            second.stop()
            assert running.chat(model="skydraft-quality").status_code == 200  # alone


def test_a_gateway_does_not_start_with_servers_that_differ() -> None:
    with (
        serving(open_toy("toy")) as first,
        serving(open_toy("toy:drift=0.4")) as odd,
        closing(skydraft.connect([first.address, odd.address], timeout_s=PATIENCE_S)) as cloud,
    ):
        pair = Pair(open_toy("toy:drift=0.2"), connect=cloud.beside)
        with pytest.raises(ServersDiffer, match=odd.address):
            pair.look()
        pair.close()
