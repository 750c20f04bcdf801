"""What faults cost: generations whose server is killed or stopped at random, and memory under careless clients.

    python -m bench.faults kills [--generations N]   toy pair: SIGKILL, SIGSTOP and restarts at random moments
    python -m bench.faults memory                    a toy server, and an edge that goes on alone for 16,000 tokens

`kills` compares each text with the undisturbed one, token by token; of a gated text that fell back, its length. Toys,
since what is tried is the protocol: nothing here depends on the size of a model.
"""

from __future__ import annotations

import argparse
import random
import signal
import threading
import time
from contextlib import closing
from pathlib import Path

import skydraft
from bench.server import ServerProcess
from skydraft import DecodingParams, make_plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.toy import open_toy

PLANS = {
    "lossless": make_plan("lossless", k=4, hand_back="agree:2"),
    "cloud": make_plan("cloud"),
    "quality": make_plan("quality", k=4, hand_back="4"),  # agree:M depends on what crosses a stop
}
_LENGTH = 400  # tokens: long enough for a server to die in


def written(plan: str, seed: int, cloud: skydraft.Engine | Cloud) -> skydraft.Generation:
    params = DecodingParams(max_new_tokens=_LENGTH, min_new_tokens=_LENGTH, temperature=0.8 * (seed % 2), seed=seed)
    edge = open_toy("toy:drift=0.2")
    return skydraft.generate("语速", edge=edge, cloud=cloud, plan=PLANS[plan], params=params).run()


def torment(server: ServerProcess, over: threading.Event, rng: random.Random, done: dict[str, int]) -> None:
    """Kill and start again, or stop for a moment, until it is over."""
    while not over.wait(rng.uniform(0.2, 1.5)):
        if rng.random() < 0.5:
            server.kill()
            time.sleep(rng.uniform(0, 0.3))
            server.start()
            done["kills"] += 1
        else:
            server.signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0.05, 1.0))
            server.signal(signal.SIGCONT)
            done["stops"] += 1


def kills(num_generations: int) -> None:
    rng, over, done = random.Random(1), threading.Event(), {"kills": 0, "stops": 0}
    server = ServerProcess("toy")
    cloud = skydraft.connect(server.address, timeout_s=60)
    thread = threading.Thread(target=torment, args=(server, over, rng, done))
    thread.start()
    num_wrong = num_tokens = num_fallback = 0
    for number in range(num_generations):
        plan = tuple(PLANS)[number % 3]
        got, want = written(plan, number, cloud), written(plan, number, open_toy("toy"))
        num_tokens += len(got.token_ids)
        num_fallback += got.origins.count("edge-fallback")
        fell_back = "edge-fallback" in got.origins
        is_right = len(got.token_ids) == _LENGTH if fell_back else got.token_ids == want.token_ids
        num_wrong += not is_right or (fell_back and plan != "quality")
    over.set()
    thread.join()
    cloud.close()
    server.stop()
    print(f"{num_generations} generations, {num_tokens} tokens, {done['kills']} kills, {done['stops']} stops: "
          f"{num_wrong} texts wrong, {num_fallback} tokens written alone in gated texts")  # fmt: skip


def memory() -> None:
    """A server whose clients open, ask once and close, or leave in the middle of a stream."""
    server, edge = ServerProcess("toy"), open_toy("toy:drift=0.2")
    with closing(skydraft.connect(server.address)) as cloud:
        for what, plan, num_tokens, times in (
            ("5,000 sessions of a token", "lossless", 1, 5000),
            ("2,000 streams left after a token", "cloud", 400, 2000),
        ):
            before, params = (server.resident_mb, server.num_files), DecodingParams(max_new_tokens=num_tokens)
            for _ in range(times):
                with skydraft.generate("语速", edge=edge, cloud=cloud, plan=PLANS[plan], params=params) as generation:
                    next(generation.rounds())
            time.sleep(1)
            grown = f"{before[0]:.0f} -> {server.resident_mb:.0f} MB, {before[1]} -> {server.num_files} files"
            print(f"{what}: {grown}", flush=True)
    server.stop()
    alone()


def alone() -> None:
    """An edge whose cloud is gone, for 16,000 tokens."""
    cloud = skydraft.connect("127.0.0.1:9", timeout_s=1)
    params = DecodingParams(max_new_tokens=16_000, min_new_tokens=16_000, temperature=1.0)
    edge = open_toy("toy:drift=0.2", 20_000)
    before = own_mb()
    generation = skydraft.generate("语速", edge=edge, cloud=cloud, plan=PLANS["quality"], params=params).run()
    num_alone = generation.origins.count("edge-fallback")
    print(f"16,000 tokens without a cloud, {num_alone} of them by falling back: {before:.0f} -> {own_mb():.0f} MB")
    cloud.close()


def own_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "memory"])
    parser.add_argument("--generations", type=int, default=200)
    given = parser.parse_args()
    if given.what == "kills":
        kills(given.generations)
    else:
        memory()


if __name__ == "__main__":
    main()
