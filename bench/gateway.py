"""What the gateway costs, and what it keeps: identity, reuse of KV between turns, time to the first token.

    python -m bench.gateway overhead              toy pair: first token through the gateway and from the Python API
    python -m bench.gateway identity [--prompts N]   real pair: lossless through the gateway against `generate`
    python -m bench.gateway turns [--repeats N]      real pair: the second turn of a 1,000-token conversation
    python -m bench.gateway conversations [--repeats N]   real pair: conversations on too few seats, against fresh ones

Compared runs take turns. `identity` asks each prompt at T = 0 and 0.8, alone, then as the third turn of a conversation
while four other requests run.
"""

import argparse
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx

import skydraft
from bench.workload import drafting, machine, prompts
from skydraft import DecodingParams, EngineOptions, make_plan
from skydraft.engines.toy import open_toy
from skydraft.gateway.app import Gateway, GatewayOptions
from skydraft.gateway.pair import Pair
from skydraft.gateway.requests import Defaults
from skydraft.gateway.server import Entrance, ListenOptions, listen, server_of
from skydraft.models import default_pair

Messages = list[dict[str, str]]


@contextmanager
def gateway(pair: Pair) -> Iterator[str]:
    """The URL of a gateway over `pair`, in this process."""
    made = Gateway(pair, Defaults(DecodingParams()), GatewayOptions(max_running=5))
    listening = listen(ListenOptions(port=0))
    server = server_of(Entrance(made), ListenOptions(port=0))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1/chat/completions"
    finally:
        server.should_exit = True
        thread.join()
        made.close()


@contextmanager
def started(*options: str) -> Iterator[int]:
    """The port of a gateway in a process of its own, as users have it."""
    command = [sys.executable, "-m", "skydraft.cli.main", "gateway", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        while not (found := re.search(r"http://localhost:(\d+)", child.stderr.readline())):
            pass
        try:
            yield int(found[1])
        finally:
            child.terminate()
            child.stderr.read()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def overhead(repeats: int) -> None:
    edge, cloud = open_toy("toy:drift=0.2", 4096, 6), open_toy("toy", 4096, 6)
    plan, params = make_plan("quality"), DecodingParams(max_new_tokens=16)
    direct, through = [], []
    body = {"model": "skydraft-quality", "messages": [user("语速")], "max_tokens": 16, "stream": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    with started("--edge-model", "toy:drift=0.2", "--cloud-model", "toy") as port:
        client = socket.create_connection(("127.0.0.1", port))
        for _ in range(repeats):
            began = time.perf_counter()
            with skydraft.generate("语速", edge=edge, cloud=cloud, plan=plan, params=params) as generation:
                next(generation.rounds())
                direct.append((time.perf_counter() - began) * 1e3)
            began, took, seen = time.perf_counter(), 0.0, b""
            client.sendall(head.encode() + content)
            while b"[DONE]" not in seen:  # a client's parser is not the gateway's
                seen += client.recv(65536)
                if not took and b'"origin"' in seen:
                    took = (time.perf_counter() - began) * 1e3
            through.append(took)
        client.close()
    medians = statistics.median(direct), statistics.median(through)
    print(f"first token, p50 of {repeats}: Python API {medians[0]:.2f} ms, gateway {medians[1]:.2f} ms, "
          f"{medians[1] - medians[0]:.2f} ms more")  # fmt: skip


def load_real() -> Pair:
    pair, options = default_pair(), EngineOptions(max_sequences=6, context_len=2048)
    return Pair(skydraft.load(pair.draft, options), skydraft.load(pair.target, options))


def alone(pair: Pair, talk: Messages, temperature: float) -> skydraft.Generation:
    """What `generate --mode lossless --k 5` gives: a prompt read anew, nothing reused."""
    params = DecodingParams(max_new_tokens=24, temperature=temperature, seed=3)
    plan, sides = drafting("lossless"), {"edge": pair.edge, "cloud": pair.cloud}
    with skydraft.generate(messages=talk, plan=plan, params=params, **sides) as generation:
        return generation.run()


def asked(url: str, talk: Messages, temperature: float) -> list[int]:
    body: dict[str, Any] = {"model": "skydraft-lossless", "messages": talk, "max_tokens": 24, "seed": 3}
    body |= {"temperature": temperature, "skydraft": {"token_ids": True, "k": 5}}
    found: list[int] = httpx.post(url, json=body, timeout=600).json()["skydraft"]["token_ids"]
    return found


def identity(num_prompts: int) -> None:
    print(machine())
    pair, dev, rng = load_real(), prompts(num_prompts), random.Random(1)
    same, total = 0, 0
    with gateway(pair) as url:

        def check(talk: Messages, temperature: float) -> str:
            nonlocal same, total
            want = alone(pair, talk, temperature)
            got = asked(url, talk, temperature)
            same += sum(mine == theirs for mine, theirs in zip(got, want.token_ids, strict=False))
            total += max(len(got), len(want.token_ids))
            return want.text

        for prompt in dev:
            for temperature in (0.0, 0.8):
                check([user(prompt)], temperature)
        print(f"alone: {same} of {total} tokens equal", flush=True)
        stop = threading.Event()

        def flood(number: int) -> None:
            while not stop.is_set():
                body = {"model": "skydraft-quality", "messages": [user(rng.choice(dev))], "max_tokens": 8}
                httpx.post(url, json=body, timeout=600)

        floods = [threading.Thread(target=flood, args=(number,)) for number in range(4)]
        for thread in floods:
            thread.start()
        same = total = 0
        for index, prompt in enumerate(dev):
            talk = [user(dev[index - 1]), {"role": "assistant", "content": "好的。"}, user(dev[index - 2])]
            talk += [{"role": "assistant", "content": "我明白了。"}, user(prompt)]
            asked(url, talk[:1], 0.0)
            asked(url, talk[:3], 0.0)
            check(talk, (0.0, 0.8)[index % 2])
        stop.set()
        for thread in floods:
            thread.join()
        print(f"as a third turn, beside four other requests: {same} of {total} tokens equal")


def turns(repeats: int) -> None:
    print(machine())
    pair, rows = load_real(), list[tuple[float, float]]()
    text = "".join(prompts()) * 2
    for number in range(repeats):
        talk = [user(f"{number}。请总结：" + text[number * 10 : number * 10 + 1750])]
        plan, params = drafting("lossless"), DecodingParams(max_new_tokens=48)
        sides: dict[str, Any] = {"edge": pair.edge, "cloud": pair.cloud, "plan": plan, "params": params}
        first = skydraft.generate(messages=talk, cache_scope="bench", **sides).run()
        talk += [{"role": "assistant", "content": first.text}, user("请再用一句话说明理由。")]
        reused = skydraft.generate(messages=talk, cache_scope="bench", **sides).run()
        fresh = skydraft.generate(messages=talk, **sides).run()
        if reused.token_ids != fresh.token_ids:
            print("the texts differ")
        cached, length = reused.stats.cached_tokens, reused.num_prompt_tokens
        new = length - first.num_prompt_tokens
        ratio = (reused.stats.ttft_ms or 0) / (fresh.stats.ttft_ms or 1)
        rows.append((ratio, reused.stats.ttft_ms or 0))
        print(json.dumps({
            "prompt": length, "new": new, "fed_edge": length - cached.edge, "fed_cloud": length - cached.cloud,
            "ttft_ms": reused.stats.ttft_ms, "ttft_ms_fresh": fresh.stats.ttft_ms, "ratio": round(ratio, 3),
        }), flush=True)  # fmt: skip
    print(
        f"time to the first token, second turn with reuse / without: median {statistics.median(r for r, _ in rows):.3f}"
    )


def conversations(num_talks: int) -> None:
    """Talks of three turns each, in random order, on six seats of each model: reused against read anew."""
    print(machine())
    pair, rng = load_real(), random.Random(5)
    dev = prompts()
    talks: list[Messages] = [[user(rng.choice(dev) * 15)] for _ in range(num_talks)]
    left = [number for number in range(num_talks) for _ in range(3)]
    rng.shuffle(left)
    same = total = num_cached = 0
    for number in left:
        talk = talks[number]
        plan = drafting(rng.choice(["lossless", "quality"]))
        params = DecodingParams(max_new_tokens=8, temperature=rng.choice([0.0, 0.8]), seed=number)
        sides: dict[str, Any] = {"edge": pair.edge, "cloud": pair.cloud, "plan": plan, "params": params}
        reused = skydraft.generate(messages=talk, cache_scope="bench", **sides).run()
        fresh = skydraft.generate(messages=talk, **sides).run()
        same += sum(mine == theirs for mine, theirs in zip(reused.token_ids, fresh.token_ids, strict=False))
        total += max(len(reused.token_ids), len(fresh.token_ids))
        num_cached += reused.stats.cached_tokens.edge + reused.stats.cached_tokens.cloud
        talk += [{"role": "assistant", "content": reused.text}, user(rng.choice(dev))]
        print(f"conversation {number}: {same} of {total} tokens equal, {num_cached} reused so far", flush=True)
    print(f"{num_talks} conversations, {len(left)} turns: {same} of {total} tokens equal, {num_cached} tokens reused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "identity", "turns", "conversations"])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=0)
    given = parser.parse_args()
    if given.what == "overhead":
        overhead(given.repeats or 300)
    elif given.what == "identity":
        identity(given.prompts)
    elif given.what == "turns":
        turns(given.repeats or 3)
    else:
        conversations(given.repeats or 10)


if __name__ == "__main__":
    main()
