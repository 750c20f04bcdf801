"""What the link costs and whether it loses anything.

    python -m bench.cloud [identity] [payload]

identity: remote against local on the real pair, lossless and gated. payload: bytes of messages a token, k = 5, all dev
prompts. `bench.beside` has the bytes on the socket.
"""

import argparse

import skydraft
from bench.server import ServerProcess
from bench.workload import machine, prompts
from skydraft import Engine, Generation, decoding_params, make_plan
from skydraft.edge.cloud import Cloud
from skydraft.models import default_pair

GATED = make_plan("fluency", hand_back="4")  # agree:M depends on what crosses a stop


def run(
    prompt: str, edge: Engine, cloud: Engine | Cloud, mode: str, num_tokens: int, k: int | None = None, seed: int = 0
) -> Generation:
    """One finished generation; greedy without a seed."""
    params = decoding_params(max_new_tokens=num_tokens, temperature=0.8 if seed else 0.0, seed=seed)
    plan = GATED if mode == "fluency" else make_plan(mode, k=k)
    with skydraft.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=params) as generation:
        return generation.run()


def identity(edge: Engine, num_prompts: int = 20, num_tokens: int = 40) -> None:
    """Remote against in-process: same ids, same origins."""
    dev = prompts(num_prompts)
    cases: list[tuple[str, int | None, int]] = [
        ("lossless", 5, 0),
        ("lossless", 3, 7),
        ("quality", None, 0),
        ("fluency", None, 0),
    ]
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
    gated = [run(prompt, edge, cloud, "fluency", num_tokens).stats for prompt in dev[:12]]
    tokens = sum(s.num_tokens for s in gated)
    print(f"  fluency, 12 prompts: {sum(s.bytes_up + s.bytes_down for s in gated) / tokens:.2f} bytes a token")
    cloud.close()
    server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["identity", "payload"])
    parts = parser.parse_args().parts
    print(machine())
    edge = skydraft.load(default_pair().draft)
    for name, part in (("identity", identity), ("payload", payload)):
        if name in parts:
            part(edge)


if __name__ == "__main__":
    main()
