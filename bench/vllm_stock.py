"""Stock `vllm serve` beside our judge inside of vLLM: rounds and tokens a second of clients with the same drafts.

    python -m bench.vllm_stock --model FOLDER [--seconds 10] [--tokens 96]

Runs in the environment of `make test-vllm`; FOLDER is a checkpoint that both serve in float32, on one thread each. No
draft model computes: the target's own texts are recorded first, and drafts are these texts with errors. `always`: each
token is wrong with a chance of 1/4. `quality`: 5 tokens of 18, in a row, are wrong and unsure, the others neither; that
calls as often as the demo pair. Both servers have loaded the model, and who is not asked waits; each is measured twice,
in turns. Time begins when each client has had its first round, so reading prompts is left out. Rounds are calls to the
target. Stock checks a draft by one request (fan-out) or writes it again; plain "stock" is as skydraft chooses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2 as httpx
import numpy as np

import skydraft
from bench.clients import DATA
from bench.recorded_target import RecordedModel, Table, key_of
from bench.server import ServerProcess
from skydraft import Plan, decoding_params, make_plan
from skydraft.edge.stock.server import Met
from skydraft.engines.checkpoint import load_vocab
from skydraft.engines.probe import cpu_model
from skydraft.engines.rows import Rows
from skydraft.engines.vocab import Vocab
from tests.stock.real import _QUIET, vllm_serve

NUM_CLIENTS = (1, 8)
CONTEXT = 512
Asked = tuple[str, Any, bool | None]  # a server: name, cloud, whether a draft is one request (None: skydraft chooses)
Errs = Callable[[int, int], bool]  # whether the draft of a text is wrong at a place
Figures = tuple[float, float]  # rounds and tokens a second
Text = tuple[str, list[int], tuple[int, ...]]  # a prompt, its ids, and what the target wrote after it


SHAPES: dict[str, tuple[Plan, Errs]] = {
    "always k=5": (make_plan(gate="always", k=5), lambda text, at: hash((text, at)) % 4 == 0),
    "quality": (make_plan("quality"), lambda text, at: (at + 7 * text) % 18 < 5),
    "stream": (make_plan("cloud"), lambda text, at: False),
}


class Drafts(RecordedModel):
    """A draft model along known texts. It is sure of all its tokens but those that are wrong."""

    def __init__(self, vocab: Vocab, texts: list[Text], errs: Errs) -> None:
        table, self._unsure = Table(), set[str]()
        for number, (_, prompt_ids, token_ids) in enumerate(texts):
            for at, right in enumerate(token_ids):
                key, is_wrong = key_of([*prompt_ids, *token_ids[:at]]), errs(number, at)
                table[key] = right ^ is_wrong
                self._unsure |= {key} if is_wrong else set()
        super().__init__(vocab, "recorded", table, 0.0)

    def write_row(self, row: Rows, token_ids: list[int]) -> None:
        """Write a row with the recorded token far above all others, or a little where it is unsure."""
        row[self._token_after(token_ids)] = 1.0 if key_of(token_ids) in self._unsure else 100.0


class Ours(ServerProcess):
    """`skydraft serve --engine vllm`, ready once `wait` has returned."""

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)

    def wait(self) -> None:
        for line in self._process.stderr or ():  # vLLM's libraries say this and that while they are imported
            if "sessions of" in line:
                return
            print(line, end="")
        raise SystemExit("the server did not start")


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, str]]:
    """The addresses of both servers."""
    os.environ.update({name: value for name, value in _QUIET.items() if name != "VLLM_PLUGINS"})
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # it can be told to forget its prefix cache
    options = ["--engine", "vllm", "--dtype", "float32", "--context", str(CONTEXT), "--max-sessions", "16"]
    ours = Ours(str(folder), *options, "--vllm-arg", "enforce_eager=true")
    try:
        with vllm_serve(folder, context=CONTEXT) as url:
            ours.wait()
            yield ours.address, url
    finally:
        ours.stop()


def forget(url: str) -> None:
    """Have a stock server forget its prefix cache, once what was broken off there has ended."""
    while not httpx.post(f"{url}/reset_prefix_cache").raise_for_status().json()["success"]:
        time.sleep(0.2)


def recorded(cloud: Any, vocab: Vocab, num_tokens: int) -> list[Text]:
    """The target's own texts after long prompts, one for each client."""
    lines = (DATA / "prompts_long_dev.jsonl").read_text(encoding="utf-8").splitlines()[: max(NUM_CLIENTS)]
    params, edge = decoding_params(max_new_tokens=num_tokens), Drafts(vocab, [], SHAPES["stream"][1])

    def one(line: str) -> Text:
        prompt = json.loads(line)["prompt"]
        done = skydraft.generate(prompt, edge=edge, cloud=cloud, plan=make_plan("cloud"), params=params).run()
        return prompt, [*done.prompts.edge.token_ids], done.token_ids

    with ThreadPoolExecutor(len(lines)) as pool:
        return list(pool.map(one, lines))


def write(cloud: Any, edge: Drafts, plan: Plan, text: Text, ready: threading.Barrier, seconds: float) -> Any:
    """Calls, tokens that the target wrote, tokens, seconds, and whether it strayed: of one text, until time is up."""
    prompt, _, token_ids = text
    params, counts, passed = decoding_params(max_new_tokens=len(token_ids)), np.zeros(3), 1.0
    more: Any = {"execution": "throughput"} if cloud.is_stock else {}
    with skydraft.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=params, **more) as generation:
        rounds = generation.rounds()
        next(done for done, _ in rounds if done.record.outcome == "verified")
        ready.wait()
        began = time.perf_counter()
        for done, _ in rounds:
            counts += done.record.outcome == "verified", done.record.num_written, done.record.num_committed
            if (passed := time.perf_counter() - began) > seconds:
                break
        return *counts, passed, generation.token_ids != token_ids[: len(generation.token_ids)]


def measured(asked: Asked, vocab: Vocab, shape: str, texts: list[Text], num: int, seconds: float) -> Figures:
    """Rounds and tokens a second of `num` clients, which are printed too."""
    (name, cloud, checks), (plan, errs) = asked, SHAPES[shape]
    chosen = Met.checks if checks is None else lambda met, num_draft: checks and num_draft > 0
    ready, edges = threading.Barrier(num, timeout=120), [Drafts(vocab, texts, errs) for _ in range(num)]
    with mock.patch.object(Met, "checks", chosen), ThreadPoolExecutor(num) as pool:
        asking = [pool.submit(write, cloud, edges[at], plan, texts[at], ready, seconds) for at in range(num)]
        calls, written, tokens, passed, strayed = np.transpose([each.result() for each in asking])
    rounds_s, tokens_s = (calls / passed).sum(), (tokens / passed).sum()
    print(f"{shape:<12}{num:>2} {name:<15}{rounds_s:>8.2f} rounds/s{tokens_s:>8.2f} tokens/s, {max(passed):.1f} s: "
          f"{sum(calls):g} calls, {sum(written):g} of {sum(tokens):g} tokens written, {sum(strayed):g} texts strayed",
          flush=True)  # fmt: skip
    return rounds_s, tokens_s


def compare(ours: Any, stock: Any, forget: Callable[[], None], vocab: Vocab, num_tokens: int, seconds: float) -> None:
    """The table of both servers."""
    costs = stock.examine(vocab).costs
    print(
        f"stock, idle: {costs.write_ms:.0f} ms a written token, {costs.check_ms[-1]:.0f} ms a check of 7 rows",
        flush=True,
    )
    texts, judge = recorded(stock, vocab, num_tokens), ("ours", ours, None)
    ways = (judge, ("stock, fan-out", stock, True), ("stock, writing", stock, False))
    measured(judge, vocab, "always k=5", texts, max(NUM_CLIENTS), 1.0)  # whatever is slow the first time
    table = []
    for shape, num in itertools.product(SHAPES, NUM_CLIENTS):
        found: dict[str, list[Figures]] = {}
        for each in (ways if shape == "always k=5" else (judge, ("stock", stock, None))) * 2:
            forget()
            found.setdefault(each[0], []).append(measured(each, vocab, shape, texts, num, seconds))
        means = {name: [statistics.mean(turn) for turn in zip(*both, strict=True)] for name, both in found.items()}
        table += [(shape, num, name, *mean, *means["ours"]) for name, mean in means.items()]
    print(f"\n{'':<12}{'clients':>8} {'':<15}{'rounds/s':>9}{'tokens/s':>9}{'of our rounds':>15}{'of our tokens':>15}")
    for name, num, server, rounds_s, tokens_s, our_rounds, our_tokens in table:
        shares = f"{rounds_s / our_rounds:>15.2f}" if our_rounds else f"{'':>15}"
        print(f"{name:<12}{num:>8} {server:<15}{rounds_s:>9.2f}{tokens_s:>9.2f}{shares}{tokens_s / our_tokens:>15.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--tokens", type=int, default=96)
    given = parser.parse_args()
    print(
        f"{cpu_model()}, {given.model.name}, float32, one thread a server; {given.seconds:g} s, {given.tokens} tokens"
    )
    began = time.perf_counter()
    with serving(given.model) as (address, url):
        print(f"both servers started in {time.perf_counter() - began:.0f} s", flush=True)
        ours, stock = (skydraft.connect(each, timeout_s=120, require=True) for each in (address, url))
        with closing(ours), closing(stock):
            compare(ours, stock, lambda: forget(url), load_vocab(given.model), given.tokens, given.seconds)


if __name__ == "__main__":
    main()
