"""Texts of several servers behind one name, while these are killed, stopped and drained."""

import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count, repeat

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy

from ..serving import Process

NUM_SERVERS, NUM_EDGES = 3, 8
PLANS = {
    "lossless": make_plan("lossless", k=4, hand_back="agree:2"),
    "cloud": make_plan("cloud"),
    "gated": make_plan("fluency", hand_back="4"),  # agree:M depends on what crosses a stop
}
_LENGTH = 120  # tokens
_LATEST_S = 180.0  # after which no more faults are waited for


def written(plan: str, seed: int, cloud: Engine | Cloud) -> Generation:
    params = DecodingParams(max_new_tokens=_LENGTH, min_new_tokens=_LENGTH, temperature=0.8 * (seed % 2), seed=seed)
    edge = open_toy("toy:drift=0.2")
    return skydraft.generate("语速", edge=edge, cloud=cloud, plan=PLANS[plan], params=params).run()


def torment(server: Process, over: threading.Event, rng: random.Random, done: Counter[str], pause_s: float) -> None:
    """Kill, stop or drain a server now and then until it is over; it is there at the end."""
    while not over.wait(pause_s * rng.uniform(0.2, 1.0)):
        what = rng.choice(["killed", "stopped", "drained"])
        done[what] += 1
        if what == "stopped":
            server.signal(signal.SIGSTOP)
            over.wait(rng.uniform(0.1, 4.0))
            server.signal(signal.SIGCONT)
            continue
        server.kill() if what == "killed" else server.stop()
        time.sleep(rng.uniform(0.0, 1.0))
        server.start()


def faults(num_texts: int, num_faults: int, pause_s: float) -> tuple[list[tuple[str, int, Generation]], Counter[str]]:
    """The texts of eight edges, by plan and seed, while their servers come and go, and what was done to these.

    On a fast machine the texts may be done before anything was, so more are written until `num_faults` were.
    """
    over, done, found = threading.Event(), Counter[str](), list[tuple[str, int, Generation]]()
    servers = [Process("--grace", "2") for _ in range(NUM_SERVERS)]
    clouds = [skydraft.connect([each.address for each in servers], timeout_s=60) for _ in range(NUM_EDGES)]
    for cloud in clouds:
        cloud.info()  # a gated text does not begin at a cloud that was never reached

    def work(number: int) -> None:
        with closing(clouds[number]) as cloud:
            for index in count(number, NUM_EDGES):
                is_late = time.monotonic() > began + _LATEST_S
                if index >= num_texts and (sum(done.values()) >= num_faults or is_late):
                    return
                plan, seed = tuple(PLANS)[index % 3], index // 3 % 8
                found.append((plan, seed, written(plan, seed, cloud)))

    began = time.monotonic()
    with ThreadPoolExecutor(NUM_EDGES + NUM_SERVERS) as pool:
        chances = [random.Random(1 + place) for place in range(NUM_SERVERS)]
        torments = [pool.submit(torment, *each, done, pause_s) for each in zip(servers, repeat(over), chances)]
        try:
            list(pool.map(work, range(NUM_EDGES)))
        finally:
            over.set()
            for server, ended in zip(servers, torments, strict=True):
                ended.result()
                server.stop()
    return found, done
