"""Memory under careless clients: of a toy server, and of an edge that goes on alone for 16,000 tokens.

    python -m bench.faults

Toys, since what is tried is the protocol: nothing here depends on the size of a model.
"""

import argparse
import time
from contextlib import closing
from pathlib import Path

import skydraft
from bench.clouds import PLANS
from bench.server import ServerProcess
from skydraft import DecodingParams
from skydraft.engines.toy import open_toy


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
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    memory()


if __name__ == "__main__":
    main()
