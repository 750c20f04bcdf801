"""Many edges on one target: clients whose draft model says what was recorded, against a real server.

    python -m bench.clients [--seconds S] [--think MS] [--execution exact|throughput] [--beginnings]
    python -m bench.clients --curve N [--gpu-layers N] [--model MODEL]
    python -m bench.clients --modes "cloud,quality,auto" [--texts short|long] [--step MS] [--execution E] [--out FILE]

Drafts are recorded first, in one lossless run over 16 prompts; `skydraft.evaluation.devices` has the clients, which
`skydraft doctor --devices` drives too. Then 1, 4, 8 and 16 of them write these texts, each with a connection of
its own, at once (`--think 0`) or with the time that a draft takes in each round. Beside the measured rows a second
stands what the engine alone does in forwards of as many rows, measured before the server starts, in the share of the
time that was not spent on prompts. Busy is the share of the time inside forwards, prompts included (from the server's
metrics). Fairness is the slowest client's rounds over the mean. `--beginnings` instead sets a server that copies the
template's part of a prompt beside one that feeds it each time: 8 clients, in turn, twice. `--modes` sets modes beside
each other, in turn: 1, 4, 8 and 16 clients on 8 dev prompts, then on 4 Chinese texts and 4 programs, with the draft
model's tokens and its certainty as recorded; a step of it takes --step. Together they answer each prompt once, 16
clients twice, and the clock runs until the last text is done: in windows of 10 seconds hardly a text was whole.
"""

import argparse
import itertools
import json
import shlex
import socket
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import skydraft
from bench.emulated_link import EmulatedLink
from bench.server import ServerProcess
from bench.workload import machine, prompts
from skydraft import EngineOptions, decoding_params, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.stats import percentile
from skydraft.evaluation.devices import Client, KeptRows, RecordedDraft, agreement_of, drive, turned
from skydraft.evaluation.modes import Mode, parse_modes
from skydraft.models import default_pair
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt

DATA = Path(__file__).parent.parent / "data"
NUM_CLIENTS = (1, 4, 8, 16)
LENGTHS = {"short": 48, "long": 64}  # tokens
K = 5
PARAMS = decoding_params(max_new_tokens=48)
LOSSLESS = Mode(f"lossless;k={K}", make_plan(k=K), PARAMS)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a draft model said along lossless texts, and how long it takes for a block."""

    drafts: KeptRows
    texts: list[tuple[GenerateRequest, tuple[int, ...]]]
    draft_ms: float

    @property
    def prompt_len(self) -> float:
        """Mean tokens of a prompt."""
        ids = [read_prompt(self.drafts.real, request.messages).edge.token_ids for request, _ in self.texts]
        return statistics.mean(map(len, ids))

    def num_strayed(self, clients: Seq[Client]) -> int:
        """How many whole texts differ from those that were recorded."""
        return sum(text not in self.texts for client in clients for text in client.texts)


def requests_of(mode: Mode, texts: Seq[str]) -> list[GenerateRequest]:
    return [GenerateRequest(asked(text), mode.plan, mode.params) for text in texts]


def prefill_share(clients: Seq[Client], seconds: float) -> float:
    """The share of the time that the server read prompts of these clients."""
    return sum(record.target.prefill_ms for client in clients for record in client.records) / seconds / 1e3


def row_curve(model: str, execution: str, gpu_layers: int, num_sequences: int = 4) -> dict[int, float]:
    """Milliseconds of a forward of n rows of so many sequences, by the engine alone, as the server will open it."""
    shared = execution == "throughput"
    options = EngineOptions(1024, num_sequences, gpu_layers=gpu_layers, shared_cache=shared)
    engine = skydraft.load(model, options)
    rng = np.random.default_rng(0)
    sequences = [engine.open(rng.integers(0, 1000, 40 + index % 40).tolist()) for index in range(num_sequences)]
    curve = {}
    steps = (1, 2, 3) if not shared else (1, 3, 6, 12, 16, 24, 32, 48, 64, 96, 128)
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


def recorded(server: ServerProcess) -> Recorded:
    """Have the draft model write along with the target once. It stays open, since its tokenizer is needed."""
    edge = skydraft.load(default_pair().draft)
    connect, drafts = partial(skydraft.connect, server.address), KeptRows(edge)
    asked_for = requests_of(LOSSLESS, prompts(16))
    (found,) = drive(connect, partial(RecordedDraft, drafts, edge.profile.forward_ms[0]), [asked_for])
    return Recorded(drafts, found.texts, K * edge.profile.forward_ms[0])


def replay(addresses: Seq[str], found: Recorded, think_ms: float, seconds: float) -> list[Client]:
    """One client for each address, all at once, with this time between two blocks."""
    each = iter(addresses)
    make_edge = partial(RecordedDraft, found.drafts, think_ms / K)
    asked_for = turned([request for request, _ in found.texts], len(addresses))
    return drive(lambda: skydraft.connect(next(each), timeout_s=120), make_edge, asked_for, seconds)


@dataclass(frozen=True, slots=True)
class Served:
    """What a server's metrics say so far."""

    num_forwards: float
    num_rows: float
    forward_s: float


def show(
    name: str, clients: list[Client], seconds: float, allowed: float, counts: tuple[Served, Served], num_strayed: int
) -> None:
    before, after = counts
    waits = [record.link.rtt_ms for client in clients for record in client.records]
    queues = [record.target.queue_ms for client in clients for record in client.records]
    rounds = [len(client.records) for client in clients]
    tokens = sum(client.num_tokens for client in clients)
    prefill = prefill_share(clients, seconds)
    allowed *= 1 - prefill  # the worker cannot do both at once
    rows_per_s = (after.num_rows - before.num_rows) / seconds
    busy = (after.forward_s - before.forward_s) / seconds + prefill
    per_forward = (after.num_rows - before.num_rows) / max(after.num_forwards - before.num_forwards, 1)
    print(
        f"{name:<22}{tokens / seconds:>9.1f}{rows_per_s:>8.1f}{allowed:>9.1f}{rows_per_s / allowed:>7.2f}{busy:>6.2f}"
        f"{per_forward:>7.1f}{prefill:>9.2f}{percentile(waits, 50):>10.0f}{percentile(waits, 95):>7.0f}"
        f"{percentile(queues, 50):>11.0f}{percentile(queues, 95):>7.0f}{min(rounds) / statistics.mean(rounds):>10.2f}"
        f"{num_strayed:>9}",
        flush=True,
    )


def scrape(port: int) -> Served:
    """The counters of a server."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    names = ("skydraft_batch_rows_count", "skydraft_batch_rows_sum", "skydraft_forward_seconds_sum")
    return Served(*(float(values[name]) for name in names))


def bench(execution: str, seconds: float, think_ms: float | None, gpu_layers: int) -> None:
    """The table of one execution."""
    curve = row_curve(default_pair().target, execution, gpu_layers)
    print(f"\nexecution {execution}; engine alone, ms a forward: "
          + "  ".join(f"{rows} rows {ms:.1f}" for rows, ms in curve.items()))  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as probe:
        metrics_port = probe.getsockname()[1]
    options = ["--max-sessions", "16", "--context", "1024", "--execution", execution]
    options += ["--metrics-port", str(metrics_port), "--gpu-layers", str(gpu_layers)]
    server = ServerProcess(default_pair().target, *options)
    found = recorded(server)
    think_ms = found.draft_ms if think_ms is None else think_ms
    print(f"k={K}, {seconds:.0f} s each, {think_ms:.0f} ms of drafting emulated between rounds")
    print(f"{'clients':<22}{'tokens/s':>9}{'rows/s':>8}{'allowed':>9}{'share':>7}{'busy':>6}{'rows/f':>7}{'prefill':>9}"
          f"{'wait p50':>10}{'p95':>7}{'queue p50':>11}{'p95':>7}{'fairness':>10}{'strayed':>9}")  # fmt: skip

    def measured(name: str, num: int, *others: str) -> None:
        before = scrape(metrics_port)
        clients = replay([server.address] * num + [*others], found, think_ms, seconds)[:num]
        counts = before, scrape(metrics_port)
        show(name, clients, seconds, widest / curve[widest] * 1e3, counts, found.num_strayed(clients))

    for num in NUM_CLIENTS:
        widest = max(rows for rows in curve if rows <= max(3, (K + 1) * num))
        measured(str(num), num)
    with EmulatedLink(("127.0.0.1", server.port)) as link:
        threading.Timer(seconds / 3, lambda: link.stall(3600)).start()
        measured("7, and one that stops", 7, link.address)
    server.stop()
    found.drafts.real.close()


def beginnings(seconds: float, think_ms: float | None, model: str) -> None:
    """Sets the two servers side by side. Both have loaded the model; who is not asked waits."""
    feeds = "from skydraft.engines.llamacpp import LlamaCppEngine as E; E.allocate_beginning = lambda self: None"
    options = ["--max-sessions", "16", "--context", "512"]
    servers = {"fed each time": ServerProcess(model, *options, changed=feeds), "copied": ServerProcess(model, *options)}
    found = recorded(servers["copied"])
    think = found.draft_ms if think_ms is None else think_ms
    print(f"\n{model}, exact, 8 clients, {seconds:.0f} s each, mean prompt "
          f"{found.prompt_len:.1f} tokens")  # fmt: skip
    print(f"{'the beginning is':<18}{'tokens/s':>10}{'prefill':>9}{'texts':>7}{'strayed':>9}")
    for name in [*servers] * 2:
        clients = replay([servers[name].address] * 8, found, think, seconds)
        tokens, texts = (sum(counts) for counts in zip(*((c.num_tokens, len(c.texts)) for c in clients), strict=True))
        share, strayed = prefill_share(clients, seconds), found.num_strayed(clients)
        print(f"{name:<18}{tokens / seconds:>10.1f}{share:>9.2f}{texts:>7}{strayed:>9}", flush=True)
    for server in servers.values():
        server.stop()


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
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = ServerProcess(
        default_pair().target, "--max-sessions", str(max(counts)), "--context", "512", "--execution", execution,
        "--metrics-port", str(port), "--gpu-layers", str(gpu_layers),
    )  # fmt: skip
    draft = skydraft.load(default_pair().draft, EngineOptions(512, max(counts), gpu_layers=gpu_layers))
    drafts, points = KeptRows(draft), list[dict[str, Any]]()
    connect = partial(skydraft.connect, server.address, timeout_s=120, require=True)
    make_edge = partial(RecordedDraft, drafts, step_ms)
    for kind in texts:
        params, asked_for = decoding_params(max_new_tokens=LENGTHS[kind]), texts_of(kind)
        chosen = parse_modes(modes, lambda _, params=params: params)  # type: ignore[misc]
        for mode in chosen:  # what the draft model has to compute is not timed
            drive(connect, make_edge, [requests_of(mode, asked_for)])
        for num, mode in itertools.product(counts, chosen):
            before, known, began = scrape(port), drafts.num_computed, time.perf_counter()
            clients = drive(connect, make_edge, shared(requests_of(mode, asked_for), num))
            seconds = round(time.perf_counter() - began, 2)
            points.append({"texts": kind, "clients": num, "mode": mode.name, "seconds": seconds,
                           "computed": drafts.num_computed - known}  # by the draft model, though it was recorded
                          | counted_of(clients, before, scrape(port)))  # fmt: skip
            print(json.dumps(points[-1]), flush=True)
            if out:  # a run that is ended keeps what it has
                how = {"command": shlex.join(sys.argv[1:]), "machine": machine(), "execution": execution}
                content = {**how, "step_ms": step_ms, "points": points}
                out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    server.stop()
    drafts.real.close()


def counted_of(clients: Seq[Client], before: Served, after: Served) -> dict[str, Any]:
    records = [record for client in clients for record in client.records]
    return {
        "tokens": sum(client.num_tokens for client in clients),
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
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--think", type=float, default=None, help="ms between rounds; the time of a draft if not given")
    parser.add_argument("--execution", action="append", choices=["exact", "throughput"])
    parser.add_argument("--beginnings", action="store_true", help="what sharing the template's part brings")
    parser.add_argument("--modes", default="", help="as for skydraft compare: set them beside each other")
    parser.add_argument("--step", type=float, default=15, help="with --modes: ms of a step of the draft model")
    parser.add_argument("--texts", action="append", choices=LENGTHS, help="with --modes: these only")
    parser.add_argument("--clients", type=int, action="append", help="with --modes: so many in place of 1, 4, 8, 16")
    parser.add_argument("--gpu-layers", type=int, default=0, help="of the target: as for skydraft serve")
    parser.add_argument("--curve", type=int, default=0, metavar="N", help="only ms of forwards of up to N sequences")
    parser.add_argument("--out", type=Path, help="with --modes: a file for what was measured")
    parser.add_argument("--model", default=default_pair().target, help="with --beginnings or --curve: the target")
    given = parser.parse_args()
    print(machine())
    if given.curve:
        for execution in given.execution or ["exact", "throughput"]:
            print(execution, row_curve(given.model, execution, given.gpu_layers, given.curve))
        return
    if given.beginnings:
        beginnings(given.seconds, given.think, given.model)
        return
    for execution in given.execution or ["exact", "throughput"]:
        if given.modes:
            texts, counts = given.texts or [*LENGTHS], given.clients or NUM_CLIENTS
            carried(given.modes, texts, execution, given.step, given.out, counts, given.gpu_layers)
            continue
        bench(execution, given.seconds, given.think, given.gpu_layers)


if __name__ == "__main__":
    main()
