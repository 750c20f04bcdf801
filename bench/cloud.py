"""What the link costs and whether it loses anything.

    python -m bench.cloud [overhead] [identity] [payload] [faults]

overhead: 2,000 rounds of toys over loopback and in process, beyond both models' time. identity: remote against local
on the real pair, lossless and gated. payload: bytes of messages a token, k = 5, all dev prompts; and bytes on the
socket with TLS. faults: kill, cuts, a stall and an outage on the real pair, against the undisturbed run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import skydraft
from bench.server import ServerProcess
from bench.workload import machine, prompts
from skydraft import Engine, Generation, StepRecord, decoding_params, make_plan
from skydraft.decoding.stats import percentile
from skydraft.edge.cloud import Cloud
from skydraft.engines.toy import open_toy
from skydraft.evaluation.emulated_link import EmulatedLink, LinkShape
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


def beyond_models(record: StepRecord) -> float:
    """Milliseconds of a round that neither model's forwards took."""
    return record.wall_ms - record.draft.forward_ms - record.target.forward_ms


def overhead(num_rounds: int = 2000) -> None:
    """Toys: the models take next to no time, so what is left is ours. Over the link and not, in turns, text by text."""
    edge, toy = open_toy("toy:drift=0.1"), open_toy("toy")
    server = ServerProcess("toy")
    cloud = skydraft.connect(server.address)
    ways: dict[str, Engine | Cloud] = {"over the link": cloud, "in process": toy}
    print(f"\noverhead a round beyond both models' forwards, toy pair, k=5, {num_rounds} rounds, ms")
    print(f"{'':<24}{'p50':>8}{'p99':>8}{'wire p50':>10}{'queue p50':>11}")
    for temperature in (0.0, 0.8):
        records: dict[str, list[StepRecord]] = {name: [] for name in ways}
        seed = 0
        while min(map(len, records.values())) < num_rounds:
            seed += 1
            params = decoding_params(
                max_new_tokens=400, min_new_tokens=400, temperature=temperature, seed=seed, repetition_penalty=1.0
            )
            for name, target in ways.items():
                plan = make_plan(k=5)
                with skydraft.generate(f"语速{seed}", edge=edge, cloud=target, plan=plan, params=params) as generation:
                    records[name] += generation.run().records[1:]  # the first one opens the session
        for name, found in records.items():
            ours = [beyond_models(record) for record in found]
            wire = [record.link.rtt_ms - record.target.queue_ms - record.target.forward_ms for record in found]
            queue = [record.target.queue_ms for record in found]
            print(
                f"{name + f', T={temperature}':<24}{percentile(ours, 50):>8.3f}{percentile(ours, 99):>8.3f}"
                f"{max(percentile(wire, 50) or 0, 0):>10.3f}{percentile(queue, 50):>11.3f}"
            )
    cloud.close()
    server.stop()


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
    """Bytes of messages a generated token over all dev prompts, and on the socket with TLS over twelve of them."""
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
    on_the_socket(edge, num_tokens)


def on_the_socket(edge: Engine, num_tokens: int = 128) -> None:
    """Bytes on the socket with TLS and a token, of twelve prompts over one connection, handshake included."""
    dev = prompts(12)
    with tempfile.TemporaryDirectory() as folder:
        ca, options = certificates(Path(folder))
        server = ServerProcess(default_pair().target, *options)
        with EmulatedLink(("127.0.0.1", server.port)) as link:
            cloud = skydraft.connect(link.address, tls_ca=ca, token="a-token-of-24-characters")
            tokens = sum(len(run(prompt, edge, cloud, "lossless", num_tokens, 5).token_ids) for prompt in dev)
            cloud.close()
        print(
            f"  on the socket with TLS and a token, {len(dev)} prompts over one connection, handshake included: "
            f"{(link.bytes_up + link.bytes_down) / tokens:.1f} bytes a token ({link.bytes_up / tokens:.1f} up, "
            f"{link.bytes_down / tokens:.1f} down), {tokens} tokens"
        )
        server.stop()


def certificates(folder: Path) -> tuple[bytes, list[str]]:
    """(authority in PEM, options for a server) of a certificate for loopback, with a token file."""
    import trustme

    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    cert, key, tokens = folder / "cert.pem", folder / "key.pem", folder / "tokens"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    tokens.write_text("bench a-token-of-24-characters\n")
    return authority.cert_pem.bytes(), ["--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(tokens)]


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
    parser.add_argument("parts", nargs="*", default=["overhead", "identity", "payload", "faults"])
    parts = parser.parse_args().parts
    print(machine())
    if "overhead" in parts:
        overhead()
    if {"identity", "payload", "faults"} & set(parts):
        edge = skydraft.load(default_pair().draft)
        for name, part in (("identity", identity), ("payload", payload), ("faults", faults)):
            if name in parts:
                part(edge)


if __name__ == "__main__":
    main()
