"""Many devices on one server, measured and simulated side by side.

    python -m bench.devices [--texts N] [--step MS] [--modes "cloud,auto"] [--clients 1,2,4,8] [--execution E]
    python -m bench.devices --stock llama-server|vllm [...]

The target is a toy in a process of its own, as `skydraft serve`; forwards take `FORWARD_MS`, and with `--execution
exact` at most 3 rows. With `--stock` it is a real model on one thread of a server without skydraft: the target of the
demo pair on llama-server, or its draft model in float32 on vLLM; the draft is the pair's, and its rows are computed
before, but for texts that part from what was recorded. Each client has a connection and a draft model of its own, whose
steps take `--step`. What one client does is recorded first, as `skydraft doctor --devices` does it; the simulation
knows nothing else. With `--stock` these are the prompts of all clients, else those of one. Speeds: tokens a second of a
client; waits: 95th percentile of those for verdicts, with cloud for tokens.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np

import skydraft
from bench.kept_draft import KeptDraft, KeptRows
from bench.workload import machine, prompts
from skydraft.access.limits import Limits
from skydraft.cloud.server import ServeOptions, serve
from skydraft.cloud.worker import Worker
from skydraft.config import DecodingParams
from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.stats import percentile
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions, RowProfile
from skydraft.engines.toy import open_toy
from skydraft.evaluation.devices import Load, Simulation
from skydraft.evaluation.replay import MODES, STREAM, new_prompts, record, record_stock, stock_costs
from skydraft.gating.fitting import fit
from skydraft.learning.calibrating import label_texts, side_of
from skydraft.models import cache_dir, default_pair, present_path
from skydraft.prompts.messages import asked
from skydraft.types import StepRecord
from tests.serving import free_port
from tests.stock.real import ROOT, dequantized, llama_server, vllm_serve

DRAFT, TARGET = "toy:drift=0.3", "toy"
FORWARD_MS = tuple(120 + 6.0 * rows for rows in range(1, 65))
NUM_TOKENS = 40
CONTEXT = 512
_CHARACTERS = "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种面"


def slow(spec: str, forward_ms: Seq[float], rows: int) -> Engine:
    """A toy whose forwards of n rows take `forward_ms[n - 1]`, or the last of them."""
    engine: Engine = open_toy(spec, max_sequences=16)
    forward = engine.forward
    engine._profile = RowProfile(invariant_rows=rows, forward_ms=tuple(forward_ms))

    def waiting(feeds: Any, *, want_logits: bool) -> Any:
        num_rows = sum(len(token_ids) for _, token_ids in feeds)
        until = time.perf_counter() + forward_ms[min(num_rows, len(forward_ms)) - 1] / 1e3
        found = forward(feeds, want_logits=want_logits)
        time.sleep(max(until - time.perf_counter(), 0.0))
        return found

    engine.forward = waiting  # type: ignore[method-assign]
    return engine


def drafter(step_ms: float) -> Engine:
    """A draft model of one client."""
    return slow(DRAFT, [step_ms], 2)


def serve_slowly(execution: Any) -> None:
    """Serve the target until SIGTERM; the port is the first line."""
    engine = slow(TARGET, FORWARD_MS if execution == "throughput" else FORWARD_MS[:3], 3)
    options = ServeOptions(port=0, execution=execution, limits=Limits(max_sessions=16))
    serve(Worker(engine, options.limits, execution=execution), options, lambda port: print(port, flush=True))


def questions(seed: int, num: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(_CHARACTERS), 6)) for _ in range(num)]


def calibrate(home: Path) -> None:
    """Put a calibration of the toys where mode auto looks for it."""
    os.environ["SKYDRAFT_HOME"] = str(home)
    edge, cloud = open_toy(DRAFT), open_toy(TARGET)
    texts = label_texts(edge, cloud, map(asked, questions(0, 30)), NUM_TOKENS, lambda: None)
    made = fit(texts, side_of(edge), side_of(cloud), "toys", NUM_TOKENS)
    (home / "calibrations").mkdir()
    (home / "calibrations" / "toys.json").write_text(made.model_dump_json(by_alias=True), encoding="utf-8")


@dataclass(slots=True)
class Client:
    """What one client did: whole texts, their tokens, and when the last one ended, in seconds from the start."""

    num_texts: int = 0
    num_tokens: int = 0
    ended_s: float = 0.0
    records: list[StepRecord] = field(default_factory=list)


def waits(mode: str, client: Client) -> list[float]:
    """For verdicts, in streams for every token."""
    return [each.link.rtt_ms for each in client.records if mode == STREAM or each.outcome == "verified"]


def replayed(
    address: str, mode: str, texts: Seq[Seq[str]], num_tokens: int, make_edge: Callable[[], Engine]
) -> list[Client]:
    """What the clients do at once until each has answered its prompts; who is done before goes on with new ones."""
    clients, began = [Client() for _ in texts], time.perf_counter()

    def write(client: Client, edge: Engine, own: Seq[str]) -> None:
        with closing(skydraft.connect(address, timeout_s=120, require=True)) as cloud:
            for asked_for in itertools.chain(own, (each for _ in itertools.count() for each in new_prompts(own))):
                params = DecodingParams(max_new_tokens=num_tokens)
                with skydraft.generate(asked_for, edge=edge, cloud=cloud, plan=MODES[mode], params=params) as done:
                    for each, _ in done.rounds():
                        client.records.append(each.record)
                        if all(each.num_texts >= len(own) for each in clients):
                            return
                client.num_texts, client.num_tokens = client.num_texts + 1, client.num_tokens + len(done.token_ids)
                client.ended_s = time.perf_counter() - began

    edges = [make_edge() for _ in clients]
    began = time.perf_counter()
    threads = [threading.Thread(target=write, args=each) for each in zip(clients, edges, texts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clients


def show_costs(costs: CostModel) -> None:
    """What the table stands on, and its head."""
    print(f"{costs.pass_ms(1):.1f} ms for a forward of one row, {costs.wire_ms:.1f} ms a call beside forwards\n"
          f"{'mode':<16}{'devices':>8}{'tokens/s':>10}{'simulated':>10}{'ratio':>7}{'wait':>8}{'simulated':>10}"
          f"{'busy':>6}")  # fmt: skip


def show(mode: str, found: Seq[Client], said: Load) -> None:
    """One line of the table."""
    speed = statistics.mean(client.num_tokens / client.ended_s for client in found)
    wait = percentile([ms for client in found for ms in waits(mode, client)], 95) or 0.0
    print(f"{mode:<16}{len(found):>8}{speed:>10.2f}{said.tokens_per_s:>10.2f}{said.tokens_per_s / speed:>7.2f}"
          f"{wait:>8.0f}{said.wait_ms or 0.0:>10.0f}{said.busy:>6.2f}", flush=True)  # fmt: skip


def with_toys(execution: str, modes: Seq[str], numbers: Seq[int], num_texts: int, step_ms: float) -> None:
    """The table of a toy server with one execution."""
    command = [sys.executable, "-m", "bench.devices", "--serve", "--execution", execution]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = f"127.0.0.1:{int(server.stdout.readline())}"
    print(f"\nexecution {execution}; a forward takes {FORWARD_MS[0]:g} ms and 6 ms for each further row, a draft step "
          f"{step_ms:g} ms")  # fmt: skip
    texts = questions(1, num_texts)
    with closing(skydraft.connect(address, require=True, timeout_s=600)) as cloud:
        replay = record(drafter(step_ms), cloud, cloud.info(), texts, NUM_TOKENS)
    show_costs(replay.costs)
    for mode, num in itertools.product(modes, numbers):
        turned = [new_prompts([*texts[at:], *texts[:at]]) for at in (number % len(texts) for number in range(num))]
        found = replayed(address, mode, turned, NUM_TOKENS, lambda: drafter(step_ms))
        show(mode, found, Simulation(replay.texts[mode], replay.costs, num).run())
    server.terminate()
    server.communicate()


class LlamaServer(ExitStack):
    """The target of the demo pair on a llama-server."""

    def __init__(self) -> None:
        super().__init__()
        self._port = free_port()  # the same after each start: its costs are measured once

    def fresh(self, num_texts: int) -> str:
        """The address of a server that has read nothing and writes so many texts at once."""
        self.close()
        gguf = present_path(default_pair().target, cache_dir())
        return self.enter_context(llama_server(gguf, "--kv-unified", slots=num_texts, context=CONTEXT, port=self._port))


class VllmServe(ExitStack):
    """The draft model of the demo pair in float32 on a `vllm serve`, which compiles for long after each start."""

    url = ""

    def fresh(self, num_texts: int) -> str:
        """The same as `LlamaServer.fresh`."""
        if not self.url:
            os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # or it does not forget what it has read
            gguf = present_path(default_pair().draft, cache_dir()).resolve()
            folder = dequantized(gguf, ROOT / "build" / "qwen2.5-coder-0.5b")
            self.url = self.enter_context(vllm_serve(folder, "--max-num-seqs", str(num_texts), context=CONTEXT))
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=60).raise_for_status()
        return self.url


STOCK = {"llama-server": LlamaServer, "vllm": VllmServe}


def with_stock(name: str, modes: Seq[str], numbers: Seq[int], num_texts: int, num_tokens: int, step_ms: float) -> None:
    """The table of a server without skydraft."""
    most = max(numbers)
    options = EngineOptions(num_threads=1, context_len=CONTEXT, max_sequences=most + 1)
    print(f"{machine()}\n{name}, {num_texts} texts of {num_tokens} tokens a client, a draft step {step_ms:g} ms")
    with STOCK[name]() as server, closing(skydraft.load(default_pair().draft, options)) as real:
        kept = KeptRows(real)
        asked_for = new_prompts(list(itertools.islice(itertools.cycle(prompts()), most * num_texts)))
        with closing(skydraft.connect(server.fresh(most), require=True, timeout_s=600)) as cloud:
            rtt_ms, steps = cloud.examine(real.vocab).rtt_ms, cloud.steps(most)
            for what, points in (("writing of n texts", steps.writing), ("reading of n tokens", steps.reading)):
                print(f"ms of the {what}: " + "  ".join(f"{num}: {ms:.0f}" for num, ms in points))
            replay = record_stock(KeptDraft(kept, step_ms), cloud, stock_costs(steps, rtt_ms), asked_for, num_tokens)
        for mode, why in replay.refused.items():
            print(f"{mode} is refused: {why}")
        show_costs(replay.costs)
        for mode, num in itertools.product((mode for mode in modes if mode in replay.texts), numbers):
            kept.num_computed = 0
            texts = [asked_for[at : at + num_texts] for at in range(0, num * num_texts, num_texts)]
            found = replayed(server.fresh(most), mode, texts, num_tokens, lambda: KeptDraft(kept, step_ms))
            recorded = replay.texts[mode][: num * num_texts]
            show(mode, found, Simulation(recorded, replay.costs, num, num_texts).run(num_texts))
            print(f"{'':16}{kept.num_computed} rows of the draft model computed meanwhile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", choices=STOCK, help="a real server without skydraft, where `make stock` put it")
    parser.add_argument("--texts", type=int, default=4, help="that each client writes")
    parser.add_argument("--tokens", type=int, default=32, help="with --stock: of each text")
    parser.add_argument("--step", type=float, default=25, help="ms of a step of the draft model")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--execution", action="append", choices=["exact", "throughput"])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    executions, modes = given.execution or ["exact", "throughput"], given.modes.split(",")
    numbers = [int(each) for each in given.clients.split(",")]
    if given.serve:
        serve_slowly(executions[0])
    elif given.stock:
        with_stock(given.stock, modes, numbers, given.texts, given.tokens, given.step)
    else:
        with tempfile.TemporaryDirectory() as home:
            calibrate(Path(home))
            for execution in executions:
                with_toys(execution, modes, numbers, given.texts, given.step)


if __name__ == "__main__":
    main()
