"""Many edges on one target: clients whose draft model says what was recorded, against a real server.

    python -m bench clients --modes "cloud,quality,auto" [--texts short|long] [--step MS] [--execution E] [--out FILE]
    python -m bench clients --curve N [--gpu-layers N] [--model MODEL]

`--modes` sets modes beside each other, in turn: 1, 4, 8 and 16 clients, each with a connection of its own, on 8 dev
prompts, then on 4 Chinese texts and 4 programs, with the draft model's tokens and its certainty as recorded; a step of
it takes --step. Together they answer each prompt once, 16 clients twice, and the clock runs until the last text is
done: in windows of 10 seconds hardly a text was whole. `--curve` has no clients: it times forwards of n rows.
"""

import argparse
import itertools
import json
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import skydraft
from bench.recorded_draft import KeptRows, RecordedDraft
from bench.workload import machine, prompts
from skydraft import EngineOptions, Generation, decoding_params
from skydraft.decoding.accounts.stats import percentile
from skydraft.decoding.request import GenerateRequest
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.lab.evaluation.modes import Mode, parse_modes
from skydraft.models import default_pair
from skydraft.prompts.messages import asked
from skydraft.types import StepRecord

DATA = Path(__file__).parent.parent / "data"
NUM_CLIENTS = (1, 4, 8, 16)
LENGTHS = {"short": 48, "long": 64}  # tokens


def requests_of(mode: Mode, texts: Seq[str]) -> list[GenerateRequest]:
    return [GenerateRequest(asked(text), mode.plan, mode.params) for text in texts]


def drive(
    connect: Callable[[], Cloud], make_edge: Callable[[], Engine], asked_for: Seq[Iterable[GenerateRequest]]
) -> list[Generation]:
    """The finished texts of a client for each of `asked_for`, all at once. Raises a client's SkydraftError."""

    def live(own: Iterable[GenerateRequest]) -> list[Generation]:
        with closing(connect()) as cloud:
            edge = make_edge()
            return [skydraft.start(request, edge=edge, cloud=cloud).run() for request in own]

    with ThreadPoolExecutor(len(asked_for)) as pool:
        return [done for found in pool.map(live, asked_for) for done in found]


def agreement_of(records: Seq[StepRecord]) -> float | None:
    """The share of tokens that are the target's own choice; None without any, and where none of the skipped ones was
    audited."""
    skipped = sum(record.num_committed for record in records if record.outcome == "skipped")
    audited, agreed = sum(record.num_audited for record in records), sum(record.num_agreed for record in records)
    num_tokens = sum(record.num_committed for record in records)
    if not num_tokens or (skipped and not audited):
        return None
    return 1 - skipped * (1 - agreed / audited) / num_tokens if audited else 1.0


def row_curve(model: str, options: EngineOptions, steps: Seq[int]) -> dict[int, float]:
    """Milliseconds of a forward of n rows of all sequences, by the engine alone, as a server would open it."""
    engine, num_sequences = skydraft.load(model, options), options.max_sequences
    rng = np.random.default_rng(0)
    sequences = [engine.open(rng.integers(0, 1000, 40 + index % 40).tolist()) for index in range(num_sequences)]
    curve = {}
    for num_rows in (rows for rows in steps if rows <= engine.max_rows("throughput")):
        split = [num_rows // num_sequences + (i < num_rows % num_sequences) for i in range(num_sequences)]
        times = []
        for _ in range(9):
            feeds = [(s, rng.integers(0, 1000, n).tolist()) for s, n in zip(sequences, split, strict=True) if n]
            began = time.perf_counter()
            engine.extend_batch(feeds)
            times.append((time.perf_counter() - began) * 1e3)
            for sequence, token_ids in feeds:
                sequence.truncate(sequence.length - len(token_ids))
        curve[num_rows] = statistics.median(times)
    engine.close()
    return curve


@dataclass(frozen=True, slots=True)
class Served:
    """What a server's metrics say so far."""

    num_forwards: float
    num_rows: float
    forward_s: float


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(*options: str) -> Iterator[tuple[str, int]]:
    """Address and metrics port of a `skydraft serve` of the demo pair's target."""
    port, metrics_port = free_port(), free_port()
    serve = [sys.executable, "-m", "skydraft.cli.main", "serve", "--model", default_pair().target, *options]
    serve += ["--port", str(port), "--metrics-port", str(metrics_port), "--log-level", "error"]
    with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        if "sessions of" not in (line := process.stderr.readline()):
            sys.exit(f"the server did not start: {line}{process.stderr.read()}")
        try:
            yield f"127.0.0.1:{port}", metrics_port
        finally:
            process.terminate()


def scrape(port: int) -> Served:
    """The counters of a server."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    names = ("skydraft_batch_rows_count", "skydraft_batch_rows_sum", "skydraft_forward_seconds_sum")
    return Served(*(float(values[name]) for name in names))


def texts_of(kind: str) -> list[str]:
    """The prompts of eight devices: dev prompts, or four that ask for a Chinese text and four for a program."""
    if kind == "short":
        return prompts(8)
    lines = (DATA / "prompts_long_dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines][::5]


def shared(texts: Seq[GenerateRequest], num: int) -> list[Seq[GenerateRequest]]:
    """The prompts, dealt out to so many clients; each once to all together, or once to every eight."""
    return [texts[index % len(texts) :: num] for index in range(num)]


def carried(
    modes: str, texts: Seq[str], execution: str, step_ms: float, out: Path | None, counts: Seq[int], gpu_layers: int
) -> None:  # fmt: skip
    """Tokens a second of so many clients by mode, what the server computes for them, and what the texts keep."""
    draft = skydraft.load(default_pair().draft, EngineOptions(512, max(counts), gpu_layers=gpu_layers))
    options = ("--max-sessions", str(max(counts)), "--context", "512", "--execution", execution)
    with closing(draft), serving(*options, "--gpu-layers", str(gpu_layers)) as (address, port):
        drafts, points = KeptRows(draft), list[dict[str, Any]]()
        connect = partial(skydraft.connect, address, timeout_s=120, require=True)
        make_edge = partial(RecordedDraft, drafts, step_ms)
        for kind in texts:
            params, asked_for = decoding_params(max_new_tokens=LENGTHS[kind]), texts_of(kind)
            chosen = parse_modes(modes, lambda _, params=params: params)  # type: ignore[misc]
            for mode in chosen:  # what the draft model has to compute is not timed
                drive(connect, make_edge, [requests_of(mode, asked_for)])
            for num, mode in itertools.product(counts, chosen):
                before, known, began = scrape(port), drafts.num_computed, time.perf_counter()
                done = drive(connect, make_edge, shared(requests_of(mode, asked_for), num))
                seconds = round(time.perf_counter() - began, 2)
                points.append({"texts": kind, "clients": num, "mode": mode.name, "seconds": seconds,
                               "computed": drafts.num_computed - known}  # by the draft model, though it was recorded
                              | counted_of(done, before, scrape(port)))  # fmt: skip
                print(json.dumps(points[-1]), flush=True)
                if out:  # a run that is ended keeps what it has
                    command = f"python -m bench clients {shlex.join(sys.argv[1:])}"
                    content = {"command": command, "machine": machine(), "execution": execution, "step_ms": step_ms}
                    out.write_text(json.dumps(content | {"points": points}, indent=1) + "\n", encoding="utf-8")


def counted_of(texts: Seq[Generation], before: Served, after: Served) -> dict[str, Any]:
    records = [record for text in texts for record in text.records]
    return {
        "tokens": sum(record.num_committed for record in records),
        "rows": after.num_rows - before.num_rows,
        "forwards": after.num_forwards - before.num_forwards,
        "forward_s": round(after.forward_s - before.forward_s, 3),
        "calls": sum(record.outcome == "verified" for record in records),
        "written": sum(record.num_written for record in records),
        "agreement": agreement_of(records),
        "wait_ms": percentile([record.link.rtt_ms for record in records if record.link.rtt_ms], 50),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="cloud,quality,auto", help="as for skydraft compare")
    parser.add_argument("--step", type=float, default=15, help="ms of a step of the draft model")
    parser.add_argument("--texts", action="append", choices=LENGTHS, help="these only")
    parser.add_argument("--clients", type=int, action="append", help="so many in place of 1, 4, 8, 16")
    parser.add_argument("--execution", action="append", choices=["exact", "throughput"])
    parser.add_argument("--gpu-layers", type=int, default=0, help="of both models: as for skydraft serve")
    parser.add_argument("--curve", type=int, default=0, metavar="N", help="only ms of forwards of up to N sequences")
    parser.add_argument("--model", default=default_pair().target, help="with --curve: the target")
    parser.add_argument("--out", type=Path, help="a file for what was measured")
    given = parser.parse_args()
    print(machine())
    for execution in given.execution or ["exact", "throughput"]:
        if given.curve:
            steps = (1, 2, 3) if execution == "exact" else (1, 3, 6, 12, 16, 24, 32, 48, 64, 96, 128)
            opened = EngineOptions(1024, given.curve, gpu_layers=given.gpu_layers)
            print(execution, row_curve(given.model, opened, steps))
            continue
        texts, counts = given.texts or [*LENGTHS], given.clients or NUM_CLIENTS
        carried(given.modes, texts, execution, given.step, given.out, counts, given.gpu_layers)
