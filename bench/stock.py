"""The demo pair with its target on a server without skydraft, beside the same target in this process.

    python -m bench.stock --cloud URL [--cloud-api API] [--limit PROMPTS] [--tokens 64] [--modes A,B] [--threads 1]

URL serves the target of the demo pair, for example a llama-server with its file. Every prompt is answered in every
mode, there and here, before the next one. Agreement: one pass of the target here over the finished text. Calls,
written: a token. Equal: tokens before the first one that differs between `--gate always` and the server's own stream,
and the margin of the two tokens there in logits of the target here: small ones are near ties of other batch shapes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from contextlib import closing

import numpy as np

import skydraft
from bench.workload import load_pair, machine, prompts
from skydraft import DecodingParams, make_plan
from skydraft.decoding.generation import Generation
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.types import LinkCost

NAMES = ("tokens", "right", "calls", "written", "requests", "tokens_in", "tokens_hit", "bytes", "ms")


def judged(target: Engine, done: Generation) -> tuple[int, list[float]]:
    """How many tokens the target here would have written, and for each how far it is below the best, in logits."""
    whole = np.array([*done.prompts.target.token_ids, *done.token_ids], np.int32)
    start, behind = len(done.prompts.target.token_ids), list[float]()
    with closing(target.open(whole[:start].tolist())) as sequence:
        while sequence.length < len(whole) - 1:
            at = sequence.length
            rows = sequence.extend(whole[at : min(at + target.invariant_rows, len(whole) - 1)])
            behind += [float(row.max() - row[whole[at + 1 + index]]) for index, row in enumerate(rows)]
    return sum(each == 0 for each in behind), behind


def measured(target: Engine, done: Generation) -> dict[str, float]:
    link = sum((record.link for record in done.records), LinkCost())
    return {
        "tokens": len(done.token_ids), "right": judged(target, done)[0],
        "calls": sum(record.outcome == "verified" for record in done.records),
        "written": sum(record.num_written for record in done.records),
        "requests": link.num_requests, "tokens_in": link.tokens_in, "tokens_hit": link.tokens_hit,
        "bytes": link.bytes_up + link.bytes_down, "ms": done.records[-1].ended_ms,
    }  # fmt: skip


def compare(asked: argparse.Namespace) -> None:
    edge, target = load_pair(EngineOptions(num_threads=asked.threads))
    params = DecodingParams(max_new_tokens=asked.tokens)
    total: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(NAMES, 0.0))
    num_equal, differences = 0, list[str]()
    with closing(skydraft.connect(asked.cloud, api=asked.cloud_api, require=True, timeout_s=300)) as cloud:

        def answer(prompt: str, where: object, *, always: bool = False, mode: str = "cloud") -> Generation:
            plan = make_plan(gate="always", k=6) if always else make_plan(mode)
            execution = "throughput" if always else None
            return skydraft.generate(
                prompt,
                edge=edge,
                cloud=where,
                plan=plan,
                params=params,
                execution=execution,  # type: ignore[arg-type]
            ).run()

        for prompt in prompts(asked.limit):
            for mode in ("cloud", *asked.modes.split(",")):
                for name, where in (("there", cloud), ("here", target)):
                    done = answer(prompt, where, mode=mode)
                    for key, value in measured(target, done).items():
                        total[f"{mode} {name}"][key] += value
                    if (mode, name) == ("cloud", "there"):
                        stream = done
            checked = answer(prompt, cloud, always=True)
            same = [one == other for one, other in zip(stream.token_ids, checked.token_ids, strict=False)]
            num_equal += (first := same.index(False) if False in same else len(same))
            if first < len(same):
                margin = max(judged(target, each)[1][first] for each in (stream, checked))
                differences.append(f"token {first} of {prompt[:20]}: margin {margin:.4f}")
            show(total)
            print(
                f"always: {num_equal} tokens equal, {len(differences)} texts differ: {'; '.join(differences)}\n",
                flush=True,
            )


def show(total: dict[str, dict[str, float]]) -> None:
    print(f"{'':<16}{'agreement':>10}{'calls':>8}{'written':>8}{'requests':>9}{'cached':>7}{'bytes':>7}{'tokens/s':>9}")
    for name, sums in total.items():
        size = sums["tokens"]
        cached = sums["tokens_hit"] / sums["tokens_in"] if sums["tokens_in"] else float("nan")
        figures = (sums[key] / size for key in ("calls", "written", "requests"))
        calls, written, requests = figures
        print(
            f"{name:<16}{sums['right'] / size:>10.3f}{calls:>8.3f}{written:>8.3f}{requests:>9.3f}{cached:>7.2f}"
            f"{sums['bytes'] / size:>7.0f}{1e3 * size / sums['ms']:>9.1f}  {size:.0f} tokens"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cloud", required=True, metavar="URL")
    parser.add_argument("--cloud-api", default="auto", metavar="API")
    parser.add_argument("--limit", type=int, default=None, metavar="PROMPTS")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--modes", default="quality,auto")
    parser.add_argument("--threads", type=int, default=0)
    print(machine())
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
