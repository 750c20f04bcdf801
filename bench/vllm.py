"""vLLM as target: rows that a round computes, what it costs above vLLM, what guessing brings a stream.

    python -m bench.vllm --model FOLDER --edge-model FOLDER [--prompts FILE --num-prompts 20]

Runs in the environment of `make test-vllm`. Prompts without a file are random texts of the characters of `data/`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import skydraft
from bench.workload import drafting
from skydraft.cloud.limits import Limits
from skydraft.cloud.server import ServeOptions
from skydraft.cloud.vllm import targets
from skydraft.cloud.vllm.engine import VllmEngine
from skydraft.cloud.vllm.judge import VllmJudge
from skydraft.cloud.vllm.launch import VllmOptions
from skydraft.config import decoding_params
from skydraft.engines.options import EngineOptions
from tests.serving import Serving


class Ledger:
    """What the judge tells: (rows computed, seconds) of each request to vLLM."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float]] = []

    def forward(self, num_jobs: int, num_rows: int, seconds: float) -> None:
        self.asked.append((num_rows, seconds))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@contextmanager
def served(model: Path, args: tuple[str, ...], context_len: int, dtype: str) -> Iterator[tuple[str, Ledger]]:
    judge = VllmJudge(VllmEngine(VllmOptions(model.name, model, context_len, dtype, args=args)), Limits())
    began = time.perf_counter()
    judge.start()
    print(f"vLLM started in {time.perf_counter() - began:.0f} s")
    running = Serving(judge, ServeOptions(port=0, execution="throughput"))
    judge.observer = ledger = Ledger()
    try:
        yield running.address, ledger
    finally:
        running.stop()
        judge.close()


def generated(address: str, edge: Any, prompt: str, mode: str, params: Any) -> Any:
    cloud = skydraft.connect(address)
    generation = skydraft.generate(prompt, edge=edge, cloud=cloud, plan=drafting(mode), params=params)
    generation.run()
    return generation


def rounds(address: str, ledger: Ledger, edge: Any, prompts: list[str], params: Any) -> None:
    """Lossless: rows and times of its rounds, the first of each text, which reads the prompt, left out."""
    needed = computed = 0
    above, inside = [], []
    num_tokens, began = 0, time.perf_counter()
    for prompt in prompts:
        ledger.asked.clear()
        generation = generated(address, edge, prompt, "lossless", params)
        num_tokens += len(generation.token_ids)
        records = generation.records
        for record, (num_rows, seconds) in zip(records[1:], ledger.asked[-len(records) + 1 :], strict=True):
            needed += record.num_draft + 1
            computed += num_rows
            inside.append(seconds * 1e3)
            above.append(record.link.rtt_ms - seconds * 1e3)
    seconds = time.perf_counter() - began
    print(f"lossless: {num_tokens / seconds:.1f} tokens/s, {len(inside)} rounds")
    print(f"  rows needed {needed}, computed {computed}: {computed / needed:.2f} times")
    print(f"  a round in vLLM {statistics.median(inside):.1f} ms, above it {statistics.median(above):.2f} ms (medians)")


def streams(address: str, ledger: Ledger, edge: Any, prompts: list[str], params: Any) -> None:
    """Generate, with guesses and without."""
    guess = targets.look_up
    for name, look_up in (("with guesses", guess), ("without", lambda token_ids: ())):
        targets.look_up = look_up
        ledger.asked.clear()
        began = time.perf_counter()
        num_tokens = sum(len(generated(address, edge, each, "cloud", params).token_ids) for each in prompts)
        seconds = time.perf_counter() - began
        asked = len(ledger.asked) - len(prompts)
        print(f"Generate {name}: {num_tokens / seconds:.1f} tokens/s, {num_tokens / asked:.2f} tokens a request")
    targets.look_up = guess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--edge-model", required=True)
    parser.add_argument("--prompts", type=Path, default=Path("data/prompts_zh_dev.jsonl"))
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--vllm-arg", action="append", default=["enforce_eager=true"])
    given = parser.parse_args()
    lines = given.prompts.read_text(encoding="utf-8").splitlines()[: given.num_prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    params = decoding_params(max_new_tokens=given.max_new_tokens)
    edge = skydraft.load(given.edge_model, EngineOptions(context_len=given.context, num_threads=1))
    with served(given.model, tuple(given.vllm_arg), given.context, given.dtype) as (address, ledger):
        generated(address, edge, prompts[0], "lossless", params)  # whatever is slow the first time
        rounds(address, ledger, edge, prompts, params)
        streams(address, ledger, edge, prompts, params)


if __name__ == "__main__":
    main()
