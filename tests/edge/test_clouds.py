"""Three server processes that are killed, stopped, drained and started again: `bench.clouds`, small."""

from __future__ import annotations

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.edge.connection import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy

from ..serving import PATIENCE_S, Process

PLANS = {"lossless": make_plan("lossless", k=4), "cloud": make_plan("cloud"), "quality": make_plan("quality", k=4)}
LENGTH, NUM_EDGES, NUM_TEXTS = 100, 4, 60


def written(number: int, cloud: Engine | Cloud) -> Generation:
    seed, plan = number % 6, PLANS[tuple(PLANS)[number % 3]]
    params = DecodingParams(max_new_tokens=LENGTH, min_new_tokens=LENGTH, temperature=0.8 * (seed % 2), seed=seed)
    return skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, plan=plan, params=params).run()


def torment(server: Process, over: threading.Event, first_s: float, acts: list[str]) -> None:
    """Do these things to a server, one after the other, or fewer where it is over before; it runs in the end."""
    pause_s = first_s
    for act in acts:
        if over.wait(pause_s):
            return
        pause_s = 0.7
        if act == "stop":
            server.send(signal.SIGSTOP)
            over.wait(2.5)
            server.send(signal.SIGCONT)
            continue
        server.end(signal.SIGKILL if act == "kill" else signal.SIGTERM)
        server.start()


@pytest.mark.parametrize("seed", [1])
def test_texts_of_many_edges_are_the_undisturbed_ones_while_servers_come_and_go(seed: int) -> None:
    rng, over = random.Random(seed), threading.Event()
    expected = [written(number, open_toy("toy")).token_ids for number in range(6)]
    with ThreadPoolExecutor(3) as pool:
        servers = list(pool.map(lambda _: Process("--grace", "1"), range(3)))
    addresses, lines = [server.address for server in servers], list[str]()

    def work(edge: int) -> list[tuple[int, Generation]]:
        with closing(skydraft.connect(addresses, timeout_s=2 * PATIENCE_S, notify=lines.append)) as cloud:
            return [(number, written(number, cloud)) for number in range(edge, NUM_TEXTS, NUM_EDGES)]

    acts = [rng.sample(["kill", "stop", "drain"], 3) for _ in servers]
    tormentors = [
        threading.Thread(target=torment, args=(server, over, 0.2 + 0.4 * place, acts[place]))
        for place, server in enumerate(servers)
    ]
    try:
        for tormentor in tormentors:
            tormentor.start()
        began = time.monotonic()
        with ThreadPoolExecutor(NUM_EDGES) as pool:
            texts = [text for found in pool.map(work, range(NUM_EDGES)) for text in found]
        assert time.monotonic() - began < 2 * PATIENCE_S
    finally:
        over.set()
        for tormentor in tormentors:
            tormentor.join()
        for server in servers:
            server.end(signal.SIGKILL)
    assert sorted(number for number, _ in texts) == list(range(NUM_TEXTS))
    num_compared = 0
    for number, text in texts:
        if "edge-fallback" in text.origins:  # in a moment without any server, which only a gated text may bridge
            assert number % 3 == 2 and len(text.token_ids) == LENGTH
            continue
        assert text.token_ids == expected[number % 6]
        num_compared += 1
    assert num_compared > NUM_TEXTS / 2
    assert sum("is left out" in line for line in lines) >= 3
