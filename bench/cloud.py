"""What the link costs and whether it loses anything.

    python -m bench.cloud [identity] [payload] [faults]

identity: remote against local on the real pair, lossless and gated. payload: bytes of messages a token, k = 5, all dev
prompts. faults: kill, cuts, a stall and an outage on the real pair, against the undisturbed run. `bench.beside` has the
bytes on the socket.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable

import skydraft
from bench.emulated_link import EmulatedLink, LinkShape
from bench.server import ServerProcess
from bench.workload import machine, prompts
from skydraft import Engine, Generation, decoding_params, make_plan
from skydraft.edge.cloud import Cloud
from skydraft.models import default_pair

QUALITY = make_plan("quality", hand_back="4")  # agree:M depends on what crosses a stop


def run(
    prompt: str, edge: Engine, cloud: Engine | Cloud, mode: str, num_tokens: int, k: int | None = None, seed: int = 0
) -> Generation:
    """One finished generation; greedy without a seed."""
    params = decoding_params(max_new_tokens=num_tokens, temperature=0.8 if seed else 0.0, seed=seed)
    plan = QUALITY if mode == "quality" else make_plan(mode, k=k)
    with skydraft.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=params) as generation:
        return generation.run()


def identity(edge: Engine, num_prompts: int = 20, num_tokens: int = 40) -> None:
    """Remote against in-process: same ids, same origins."""
    dev = prompts(num_prompts)
    cases: list[tuple[str, int | None, int]] = [("lossless", 5, 0), ("lossless", 3, 7), ("quality", None, 0)]
    near = skydraft.load(default_pair().target)
    local = {case: [run(prompt, edge, near, case[0], num_tokens, case[1], case[2]) for prompt in dev] for case in cases}
    near.close()
    server = ServerProcess(default_pair().target)
    cloud = skydraft.connect(server.address)
    print(f"\nremote == in process, real pair, {num_prompts} prompts, up to {num_tokens} tokens")
    for case, expected in local.items():
        num_equal = num_all = 0
        for prompt, other in zip(dev, expected, strict=True):
            far = run(prompt, edge, cloud, case[0], num_tokens, case[1], case[2])
            num_all += len(other.token_ids)
            same = far.token_ids == other.token_ids and far.origins == other.origins
            num_equal += len(other.token_ids) if same else 0
        temperature = 0.8 if case[2] else 0.0
        print(f"  {case[0]}, k={case[1] or 'preset'}, T={temperature}: {num_equal} of {num_all} tokens in equal texts")
    cloud.close()
    server.stop()


def payload(edge: Engine, num_tokens: int = 128) -> None:
    """Bytes of messages a generated token over all dev prompts."""
    server = ServerProcess(default_pair().target)
    cloud = skydraft.connect(server.address)
    dev = prompts()
    stats = [run(prompt, edge, cloud, "lossless", num_tokens, 5).stats for prompt in dev]
    up, down, tokens = (sum(getattr(s, name) for s in stats) for name in ("bytes_up", "bytes_down", "num_tokens"))
    print(f"\npayload, lossless, k=5, {len(dev)} dev prompts, up to {num_tokens} tokens, {tokens} tokens generated")
    print(f"  {(up + down) / tokens:.2f} bytes a token (<= 16): {up / tokens:.2f} up, {down / tokens:.2f} down")
    gated = [run(prompt, edge, cloud, "quality", num_tokens).stats for prompt in dev[:12]]
    tokens = sum(s.num_tokens for s in gated)
    print(f"  quality, 12 prompts: {sum(s.bytes_up + s.bytes_down for s in gated) / tokens:.2f} bytes a token")
    cloud.close()
    server.stop()


def faults(edge: Engine, num_tokens: int = 60) -> None:
    """Each fault once on the real pair; the undisturbed run is the reference."""
    prompt = prompts()[49]  # one with a long answer
    server = ServerProcess(default_pair().target)
    print(f"\nfaults on the real pair, one prompt, up to {num_tokens} tokens, against the undisturbed run")

    def disturbed(name: str, shape: LinkShape, at: dict[int, Callable[[EmulatedLink], None]]) -> None:
        with EmulatedLink(("127.0.0.1", server.port), shape) as link:
            cloud = skydraft.connect(link.address)
            params = decoding_params(max_new_tokens=num_tokens)
            generation = skydraft.generate(prompt, edge=edge, cloud=cloud, plan=make_plan(k=5), params=params)
            began = time.perf_counter()
            for number, _ in enumerate(generation.rounds()):
                if number in at:
                    at[number](link)
            took = time.perf_counter() - began
            same = generation.token_ids == calm.token_ids
            print(
                f"  {name:<34} {'same' if same else 'DIFFERENT'} {len(generation.token_ids)} tokens, {took:.1f} s, "
                f"{link.num_connections} connections"
            )
            cloud.close()

    cloud = skydraft.connect(server.address)
    calm = run(prompt, edge, cloud, "lossless", num_tokens, 5)
    cloud.close()

    def kill(link: EmulatedLink) -> None:
        server.kill()
        threading.Thread(target=server.start).start()

    disturbed("undisturbed, through the proxy", LinkShape(), {})
    disturbed("killed (SIGKILL) and restarted", LinkShape(), {4: kill})
    disturbed("10 % of chunks cut the connection", LinkShape(cut_rate=0.1, seed=1), {})
    disturbed("stall of 2 s", LinkShape(), {4: lambda link: link.stall(2.0)})
    disturbed("50 ms each way, 20 ms jitter", LinkShape(delay_ms=50, jitter_ms=20, seed=1), {})
    fallback(edge, server, prompt, num_tokens)
    server.stop()


def fallback(edge: Engine, server: ServerProcess, prompt: str, num_tokens: int) -> None:
    """How long a gated run waits for a cloud that is gone, by the way it went."""
    for name, break_ in (
        ("connection refused", EmulatedLink.down),
        ("silence (black hole)", lambda link: link.stall(3600)),
    ):
        with EmulatedLink(("127.0.0.1", server.port)) as link:
            cloud = skydraft.connect(link.address)
            params = decoding_params(max_new_tokens=num_tokens)
            plan = make_plan(gate="entropy:0.5", k=5)
            generation = skydraft.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=params)
            for number, _ in enumerate(generation.rounds()):
                if number == 2:
                    break_(link)
            lost = [record for record in generation.records if record.outcome == "fallback"]
            waits = [record.wall_ms - record.draft.forward_ms for record in lost]
            print(
                f"  {name:<34} fallback after {max(waits):.0f} ms (<= 1000), then {statistics.median(waits):.1f} ms a "
                f"round; {generation.stats.num_fallback_tokens} of {len(generation.token_ids)} tokens edge-fallback"
            )
            cloud.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["identity", "payload", "faults"])
    parts = parser.parse_args().parts
    print(machine())
    edge = skydraft.load(default_pair().draft)
    for name, part in (("identity", identity), ("payload", payload), ("faults", faults)):
        if name in parts:
            part(edge)


if __name__ == "__main__":
    main()
