"""Several servers behind one name: how evenly sessions spread, and texts while servers are killed, stopped and drained.

    python -m bench.clouds [--generations N] [--sessions N]   three toy servers, eight edges, toy pair

Each server is a process of its own, and has a thread of its own that kills it (SIGKILL), stops it for a while
(SIGSTOP) or drains it (SIGTERM) at random, and starts it again. Each text of `lossless` and `cloud` is compared with
the undisturbed one, token by token, and so is a gated one that never went on alone; of the others, the length.
Toys, since what is tried is the protocol.
"""

import argparse
import random
import re
import signal
import socket
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count

import skydraft
from bench.server import ServerProcess
from skydraft import DecodingParams, Generation, make_plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.toy import open_toy

NUM_SERVERS, NUM_EDGES = 3, 8
PLANS = {
    "lossless": make_plan("lossless", k=4, hand_back="agree:2"),
    "cloud": make_plan("cloud"),
    "gated": make_plan("fluency", hand_back="4"),  # agree:M depends on what crosses a stop
}
_LENGTH = 120  # tokens
_NUM_TEXTS = 20  # different ones of each plan
_LATEST_S = 180.0  # after which no more faults are waited for


@dataclass(slots=True)
class Tally:
    """What came of the texts of one plan."""

    num_texts: int = 0
    num_tokens: int = 0
    num_wrong: int = 0
    num_alone: int = 0  # tokens written without the cloud
    num_failed: int = 0
    slowest_ms: float = 0.0  # of all rounds
    texts: dict[int, list[int]] = field(default_factory=dict)  # undisturbed, by seed


def written(plan: str, seed: int, cloud: skydraft.Engine | Cloud, length: int = _LENGTH) -> Generation:
    """The text of a plan and a seed."""
    params = DecodingParams(max_new_tokens=length, min_new_tokens=length, temperature=0.8 * (seed % 2), seed=seed)
    edge = open_toy("toy:drift=0.2")
    return skydraft.generate("语速", edge=edge, cloud=cloud, plan=PLANS[plan], params=params).run()


def torment(
    server: ServerProcess, over: threading.Event, rng: random.Random, done: Counter[str], pause_s: float
) -> None:
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


def judge(tally: Tally, lock: threading.Lock, plan: str, seed: int, cloud: Cloud) -> None:
    """Have one text written and compare it."""
    try:
        found = written(plan, seed, cloud)
    except skydraft.SkydraftError as error:
        print(f"{plan}, seed {seed}: {error}", flush=True)
        with lock:
            tally.num_failed += 1
        return
    is_right = found.token_ids == tally.texts[seed]
    num_alone = found.origins.count("edge-fallback")
    if num_alone and plan == "gated":
        is_right = len(found.token_ids) == _LENGTH
    with lock:
        tally.num_texts += 1
        tally.num_tokens += len(found.token_ids)
        tally.num_wrong += not is_right
        tally.num_alone += num_alone
        tally.slowest_ms = max(tally.slowest_ms, *(record.wall_ms for record in found.records))


def faults(
    num_generations: int, seed: int, pause_s: float = 5.0, num_faults: int = 0
) -> tuple[dict[str, Tally], Counter[str]]:
    """The texts of eight edges while their servers come and go, and what was done to these.

    On a fast machine the texts may be done before anything was, so more are written until `num_faults` were.
    """
    tallies, lock, over, done = {plan: Tally() for plan in PLANS}, threading.Lock(), threading.Event(), Counter[str]()
    for plan, tally in tallies.items():
        seeds = range(min(_NUM_TEXTS, num_generations // 3 + 1))
        tally.texts = {each: written(plan, each, open_toy("toy")).token_ids for each in seeds}
    servers = [ServerProcess("toy", "--grace", "2") for _ in range(NUM_SERVERS)]
    news: list[str] = []

    def work(number: int) -> None:
        with closing(skydraft.connect([each.address for each in servers], timeout_s=60, notify=news.append)) as cloud:
            for index in count(number, NUM_EDGES):
                is_late = time.monotonic() > began + _LATEST_S
                if index >= num_generations and (sum(done.values()) >= num_faults or is_late):
                    return
                plan = tuple(PLANS)[index % 3]
                judge(tallies[plan], lock, plan, index // 3 % len(tallies[plan].texts), cloud)

    tormentors = [
        threading.Thread(target=torment, args=(server, over, random.Random(seed + place), done, pause_s))
        for place, server in enumerate(servers)
    ]
    began = time.monotonic()
    for tormentor in tormentors:
        tormentor.start()
    with ThreadPoolExecutor(NUM_EDGES) as pool:
        list(pool.map(work, range(NUM_EDGES)))
    took_s = time.monotonic() - began
    over.set()
    for tormentor in tormentors:
        tormentor.join()
    for server in servers:
        server.stop()
    what = ", ".join(f"{number} times {how}" for how, number in sorted(done.items()))
    num_texts = sum(tally.num_texts for tally in tallies.values())
    print(f"\nfaults: {num_texts} texts of {_LENGTH} tokens in {took_s:.0f} s; servers {what}; "
          f"edges left one out {sum('left out' in line for line in news)} times")  # fmt: skip
    print(
        "| plan | texts | failed | tokens | texts that differ | tokens written alone | slowest round, ms |\n"
        + "|---" * 7
        + "|"
    )
    for plan, tally in tallies.items():
        print(f"| {plan} | {tally.num_texts} | {tally.num_failed} | {tally.num_tokens:,} | {tally.num_wrong} | "
              f"{tally.num_alone} | {tally.slowest_ms:,.0f} |")  # fmt: skip
    return tallies, done


def spread(num_sessions: int) -> None:
    """How many sessions each server gets from eight edges that know nothing of each other, as the servers count."""
    ports = [free_port() for _ in range(NUM_SERVERS)]
    servers = [ServerProcess("toy", "--metrics-port", str(port)) for port in ports]

    def work(number: int) -> None:
        with closing(skydraft.connect([each.address for each in servers])) as cloud:
            for index in range(number, num_sessions, NUM_EDGES):
                written("cloud", index, cloud, length=4)

    with ThreadPoolExecutor(NUM_EDGES) as pool:
        list(pool.map(work, range(NUM_EDGES)))
    counts = [num_requests(port) for port in ports]
    for server in servers:
        server.stop()
    even = num_sessions / NUM_SERVERS
    shares = ", ".join(f"{count} ({100 * (count / even - 1):+.1f} %)" for count in counts)
    print(
        f"spread: {sum(counts)} sessions of {NUM_EDGES} edges over {NUM_SERVERS} servers: {shares} of even", flush=True
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def num_requests(port: int) -> int:
    """Requests that a server has answered; a session of mode `cloud` is one."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        found = re.findall(r"^skydraft_requests_total\{.*\} (\S+)$", reply.read().decode(), re.M)
    return round(sum(map(float, found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=500)
    parser.add_argument("--sessions", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    spread(given.sessions)
    faults(given.generations, given.seed)


if __name__ == "__main__":
    main()
