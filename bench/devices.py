"""Many devices on one server, measured and simulated side by side.

    python -m bench.devices [--texts N] [--step MS] [--modes "cloud,auto"] [--clients 1,2,4,8] [--execution E]
    python -m bench.devices --cloud HOST:PORT|URL [...]

Without `--cloud` the target is a toy in a process of its own, as `skydraft serve`; forwards take `FORWARD_MS`, and with
`--execution exact` at most 3 rows. With it the server has the target of the demo pair, and all clients share the real
draft model, on one thread of this machine; each prompt is new to the server. Else each client has a connection
and a draft model of its own, whose steps take `--step`. What one client does is recorded first, as `skydraft doctor
--devices` does it; the simulation knows nothing else. Speeds: tokens a second of a client; waits: 95th percentile of
those for verdicts, with cloud for tokens.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import skydraft
from bench.workload import machine, prompts
from skydraft.cloud.limits import Limits
from skydraft.cloud.server import ServeOptions, serve
from skydraft.cloud.worker import Worker
from skydraft.config import DecodingParams
from skydraft.decoding.stats import percentile
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions, RowProfile
from skydraft.engines.toy import open_toy
from skydraft.evaluation.devices import Simulation
from skydraft.evaluation.replay import MODES, STREAM, record, record_stock, stock_costs
from skydraft.gating.fitting import fit
from skydraft.learning.calibrating import label_texts, side_of
from skydraft.models import default_pair
from skydraft.prompts.messages import asked
from skydraft.types import StepRecord

DRAFT, TARGET = "toy:drift=0.3", "toy"
FORWARD_MS = tuple(120 + 6.0 * rows for rows in range(1, 65))
NUM_TOKENS = 40
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
    address: str, mode: str, texts: Seq[str], num: int, num_tokens: int, make_edge: Callable[[], Engine]
) -> list[Client]:
    """What so many clients do at once until each has written as many texts as there are; no prompt comes twice."""
    clients, began = [Client() for _ in range(num)], time.perf_counter()

    def write(client: Client, edge: Engine, first: int) -> None:
        with closing(skydraft.connect(address, timeout_s=120, require=True)) as cloud:
            for at in itertools.count(first):
                asked_for = f"{secrets.token_hex(3)} {texts[at % len(texts)]}"
                params = DecodingParams(max_new_tokens=num_tokens)
                with skydraft.generate(asked_for, edge=edge, cloud=cloud, plan=MODES[mode], params=params) as done:
                    for each, _ in done.rounds():
                        client.records.append(each.record)
                        if min(client.num_texts for client in clients) >= len(texts):
                            return
                client.num_texts, client.num_tokens = client.num_texts + 1, client.num_tokens + len(done.token_ids)
                client.ended_s = time.perf_counter() - began

    edges = [make_edge() for _ in clients]
    began = time.perf_counter()
    threads = [
        threading.Thread(target=write, args=(client, edge, at))
        for at, (client, edge) in enumerate(zip(clients, edges, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clients


def beside(
    address: str, modes: Seq[str], numbers: Seq[int], texts: Seq[str], num_tokens: int, make_edge: Callable[[], Engine]
) -> None:
    """The table of one server."""
    with closing(skydraft.connect(address, require=True, timeout_s=600)) as cloud:
        edge = make_edge()
        if cloud.is_stock:
            rtt_ms, measured = cloud.examine(edge.vocab).rtt_ms, cloud.steps(max(numbers))
            print("ms of a step of n rows: " + "  ".join(f"{rows}: {ms:.1f}" for rows, ms in measured.points))
            replay = record_stock(edge, cloud, stock_costs(measured, rtt_ms), texts, num_tokens)
        else:
            replay = record(edge, cloud, cloud.info(), texts, num_tokens)
    costs = replay.costs
    print(f"recorded: {costs.pass_ms(1):.1f} ms for a forward of one row, {costs.wire_ms:.1f} ms a call beside "
          f"forwards\n{'mode':<16}{'devices':>8}{'tokens/s':>10}{'simulated':>10}{'ratio':>7}{'wait':>8}"
          f"{'simulated':>10}{'busy':>6}")  # fmt: skip
    for mode in modes:
        for num in numbers:
            found_by = replayed(address, mode, texts, num, num_tokens, make_edge)
            said = Simulation(replay.texts[mode], costs, num).run()
            speed = statistics.mean(client.num_tokens / client.ended_s for client in found_by)
            wait = percentile([ms for client in found_by for ms in waits(mode, client)], 95) or 0.0
            print(f"{mode:<16}{num:>8}{speed:>10.2f}{said.tokens_per_s:>10.2f}{said.tokens_per_s / speed:>7.2f}"
                  f"{wait:>8.0f}{said.wait_ms or 0.0:>10.0f}{said.busy:>6.2f}", flush=True)  # fmt: skip


def with_toys(execution: str, modes: Seq[str], numbers: Seq[int], num_texts: int, step_ms: float) -> None:
    """The table of a toy server with one execution."""
    command = [sys.executable, "-m", "bench.devices", "--serve", "--execution", execution]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = f"127.0.0.1:{int(server.stdout.readline())}"
    print(f"\nexecution {execution}; a forward takes {FORWARD_MS[0]:g} ms and 6 ms for each further row, a draft step "
          f"{step_ms:g} ms")  # fmt: skip
    beside(address, modes, numbers, questions(1, num_texts), NUM_TOKENS, lambda: drafter(step_ms))
    server.terminate()
    server.communicate()


def with_pair(address: str, modes: Seq[str], numbers: Seq[int], num_texts: int, num_tokens: int) -> None:
    """The table of a server that has the target of the demo pair."""
    options = EngineOptions(num_threads=1, context_len=512, max_sequences=max(numbers))
    print(f"{machine()}\n{address}")
    with closing(skydraft.load(default_pair().draft, options)) as draft:
        beside(address, modes, numbers, prompts(num_texts), num_tokens, lambda: draft)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cloud", metavar="HOST:PORT|URL", help="a server with the target of the demo pair")
    parser.add_argument("--texts", type=int, default=4, help="that each client writes")
    parser.add_argument("--tokens", type=int, default=32, help="with --cloud: of each text")
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
    elif given.cloud:
        with_pair(given.cloud, modes, numbers, given.texts, given.tokens)
    else:
        with tempfile.TemporaryDirectory() as home:
            calibrate(Path(home))
            for execution in executions:
                with_toys(execution, modes, numbers, given.texts, given.step)


if __name__ == "__main__":
    main()
