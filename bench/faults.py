"""What faults cost: generations whose server is killed or stopped at random, and memory under abuse.

    python -m bench.faults kills [--generations N]   toy pair: SIGKILL, SIGSTOP and restarts at random moments
    python -m bench.faults memory                    a toy server, and an edge that goes on alone for 16,000 tokens
    python -m bench.faults owners [--seconds S]      legal calls of one owner in any order, beside texts of another

`kills` compares each text with the undisturbed one, token by token; of a gated text that fell back, its length. Toys,
since what is tried is the protocol: nothing here depends on the size of a model.
"""

from __future__ import annotations

import argparse
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import skydraft
from bench.server import ServerProcess
from skydraft import DecodingParams, make_plan
from skydraft.edge.connection import Cloud
from skydraft.edge.link import Link, LinkOptions
from skydraft.edge.token_stream import TokenStream
from skydraft.engines.toy import open_toy
from skydraft.errors import SkydraftError
from skydraft.protocol import codec
from skydraft.protocol.codec import short_fingerprint
from skydraft.protocol.values import Opening, SessionCall, VerifyCall
from skydraft.types import Prompt

PLANS = {"lossless": make_plan("lossless", k=4), "cloud": make_plan("cloud"), "quality": make_plan("quality", k=4)}
_LENGTH = 400  # tokens: long enough for a server to die in
FINGERPRINT = short_fingerprint(open_toy("toy").vocab.fingerprint)


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


def opened(number: int, length: int = 3) -> bytes:
    return codec.encode_session_call(SessionCall(number, 1, Opening(FINGERPRINT, Prompt((1,) * length))))


def memory() -> None:
    server = ServerProcess("toy")
    link = Link(LinkOptions(server.address))
    abuses: list[tuple[str, Callable[[], None]]] = [
        ("5,000 times open and close", lambda: open_and_close(link, 5000)),
        ("2,000 streams left after a token", lambda: leave_streams(link, 2000)),
        ("20 s of big openings that are cancelled", lambda: cancel_openings(server.address, 20)),
    ]
    for what, work in abuses:
        work_before = server.resident_mb, server.num_files
        work()
        time.sleep(1)
        grown = f"{work_before[0]:.0f} -> {server.resident_mb:.0f} MB, {work_before[1]} -> {server.num_files} files"
        print(f"{what}: {grown}", flush=True)
    link.close()
    server.stop()
    alone()


def open_and_close(link: Link, times: int) -> None:
    for number in range(1, times + 1):
        link.call("Open", opened(number), 10)
        link.call("Close", codec.encode_close(number), 10)


def leave_streams(link: Link, times: int) -> None:
    for number in range(1, times + 1):
        stream = TokenStream(link, opened(number), 10)
        next(stream.messages(10, 5))
        stream.cancel()


def cancel_openings(address: str, seconds: float) -> None:
    until = time.monotonic() + seconds

    def flood(first: int) -> None:
        link, number = Link(LinkOptions(address)), first
        while time.monotonic() < until:
            started = link.start("Open", opened(number, 4000), 10)
            number += 1
            with suppress(SkydraftError):
                time.sleep(0.002)
                started.cancel()
        link.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(flood, (1, 100_001, 200_001, 300_001)))


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


def owners(seconds: float) -> None:
    """One owner opens, verifies, streams, cancels and closes at random on few numbers; another one writes texts."""
    with TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        tokens.write_text(f"friend {'f' * 24}\nenemy {'e' * 24}\n")
        tokens.chmod(0o600)
        server = ServerProcess("toy", "--token-file", str(tokens))
        until, done = time.monotonic() + seconds, Counter[str]()
        threads = [
            threading.Thread(target=annoy, args=(LinkOptions(server.address, token="e" * 24), seed, until, done))
            for seed in range(4)
        ]
        for thread in threads:
            thread.start()
        cloud = skydraft.connect(server.address, token="f" * 24, timeout_s=60)
        wrong = number = 0
        while time.monotonic() < until:
            plan = ("lossless", "cloud")[number % 2]
            wrong += written(plan, number, cloud).token_ids != written(plan, number, open_toy("toy")).token_ids
            number += 1
        for thread in threads:
            thread.join()
        wrong += written("lossless", number, cloud).token_ids != written("lossless", number, open_toy("toy")).token_ids
        cloud.close()
        server.stop()
        print(f"{seconds:g} s, {dict(done)} of one owner; {number + 1} texts of another, {wrong} wrong")


def annoy(options: LinkOptions, seed: int, until: float, done: Counter[str]) -> None:
    """Calls in any order, on numbers that other threads use too."""
    link, rng = Link(options), random.Random(seed)
    streams: list[TokenStream] = []
    while time.monotonic() < until:
        number, what = rng.randrange(1, 9), rng.choice(["Open", "Verify", "stream", "cancel", "Close", "start", "junk"])
        epoch, prompt = rng.randrange(1, 5), Prompt((rng.randrange(1, 200),) * rng.randrange(1, 3000))
        begun = SessionCall(number, epoch, Opening(FINGERPRINT, prompt))
        with suppress(SkydraftError, ValueError, StopIteration):
            done[what] += 1
            if what == "Open":
                link.call("Open", codec.encode_session_call(begun), 5)
            elif what == "Verify":
                block = tuple(rng.randrange(200) for _ in range(rng.randrange(6)))
                call = VerifyCall(number, epoch, 0, (), block, rng.randrange(2**32), begun.opening)
                link.call("Verify", codec.encode_verify_call(call), 5)
            elif what == "stream":
                streams.append(TokenStream(link, codec.encode_session_call(begun), 5))
                next(streams[-1].messages(5, 2))
            elif what == "cancel":
                streams.pop(rng.randrange(len(streams))).cancel()
            elif what == "Close":
                link.call("Close", codec.encode_close(number), 5)
            elif what == "start":
                link.start("Open", codec.encode_session_call(begun), 5).cancel()
            else:
                link.call("Verify", rng.randbytes(rng.randrange(60)), 5)
    link.close()


def own_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "memory", "owners"])
    parser.add_argument("--generations", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    if given.what == "kills":
        kills(given.generations)
    elif given.what == "owners":
        owners(given.seconds)
    else:
        memory()


if __name__ == "__main__":
    main()
