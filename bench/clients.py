"""Many edges on one target: recorded drafts are replayed against a real server by clients that run the edge's own code.

    python -m bench.clients [--seconds S] [--think MS] [--soak MINUTES] [--execution exact|throughput] [--beginnings]

Drafts are recorded first, in one lossless run over 16 prompts. Then 1, 2, 4, 8 and 16 clients replay them, each with a
connection of its own, at once (`--think 0`) or with the time that drafting a block takes between rounds. Beside the
measured rows a second stands what the engine alone does in forwards of as many rows, measured before the server starts,
in the share of the time that was not spent on prompts. Busy is the share of the time inside forwards, prompts included
(from the server's metrics). Fairness is the slowest client's rounds over the mean. `--beginnings` instead sets a server
that copies the chat template's part of a prompt beside one that feeds it each time: 8 clients, in turn, twice.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import threading
import time
import urllib.request
from dataclasses import dataclass, field

import numpy as np

import skydraft
from bench.server import ServerProcess
from bench.workload import machine, prompts
from skydraft import EngineOptions, decoding_params, make_plan
from skydraft.decoding.context import Context
from skydraft.decoding.stats import percentile
from skydraft.edge.fleet import Fleet, Links
from skydraft.edge.link import LinkOptions
from skydraft.edge.patience import Patience
from skydraft.edge.verifier import RemoteVerifier
from skydraft.errors import CloudError
from skydraft.evaluation.emulated_link import EmulatedLink
from skydraft.models import default_pair
from skydraft.protocol.codec import short_fingerprint
from skydraft.protocol.values import Opening
from skydraft.types import DraftBlock, Prompt

NUM_CLIENTS = (1, 2, 4, 8, 16)
K = 5
PARAMS = decoding_params(max_new_tokens=48)


@dataclass(frozen=True, slots=True)
class Recording:
    """One generation: its prompt and the drafted blocks in order."""

    prompt: Prompt
    blocks: tuple[DraftBlock, ...]


@dataclass(slots=True)
class Client:
    """What one client did."""

    num_tokens: int = 0
    num_texts: int = 0
    num_strayed: int = 0
    prefill_ms: float = 0.0
    wait_ms: list[float] = field(default_factory=list)
    queue_ms: list[float] = field(default_factory=list)


def row_curve(execution: str) -> dict[int, float]:
    """Milliseconds of a forward of n rows of four sequences, by the engine alone, as the server will open it."""
    shared = execution == "throughput"
    options = EngineOptions(context_len=1024, max_sequences=4, shared_cache=shared)
    engine = skydraft.load(default_pair().target, options)
    rng = np.random.default_rng(0)
    sequences = [engine.open(rng.integers(0, 1000, length).tolist()) for length in (40, 50, 60, 70)]
    curve = {}
    for num_rows in (1, 2, 3) if not shared else (1, 3, 6, 12, 16):
        split = [num_rows // 4 + (index < num_rows % 4) for index in range(4)]
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


def record(server: ServerProcess) -> tuple[list[Recording], str, float]:
    """(recordings of 16 prompts, the vocabulary's fingerprint, milliseconds to draft a block)."""
    edge = skydraft.load(default_pair().draft)
    cloud = skydraft.connect(server.address)
    recordings, draft_ms = [], []
    for prompt in prompts(16):
        with skydraft.generate(prompt, edge=edge, cloud=cloud, plan=make_plan(k=K), params=PARAMS) as generation:
            blocks = [done.block for done, _ in generation.rounds()]
            draft_ms += [record.draft.forward_ms for record in generation.records[1:]]
            recordings.append(Recording(generation.prompts.target, tuple(blocks)))
    fingerprint = short_fingerprint(edge.vocab.fingerprint)
    cloud.close()
    edge.close()
    return recordings, fingerprint, statistics.median(draft_ms)


def replay(
    address: str, recordings: list[Recording], fingerprint: str, think_ms: float, until: float, client: Client
) -> None:
    """Replay texts one after the other until the time is up. A text whose verdicts stray from the record is left."""
    links = Links(Fleet([LinkOptions(address)]))
    number = 0
    while time.perf_counter() < until:
        recording = recordings[number % len(recordings)]
        number += 1
        context = Context(recording.prompt)
        opening = Opening(fingerprint, recording.prompt, params=PARAMS)
        verifier = RemoteVerifier(links, context, opening, Patience(120.0))
        for block in recording.blocks:
            if block.base != context.base or context.finish or time.perf_counter() >= until:
                break
            time.sleep(think_ms / 1e3)
            began = time.perf_counter()
            try:
                verdict = verifier.verify(block, context.catch_up)
            except CloudError:
                return  # the one that stops, when its link is taken away
            context.commit_verdict(block, verdict)
            client.wait_ms.append((time.perf_counter() - began) * 1e3)
            client.queue_ms.append(verdict.cost.queue_ms)
            client.num_tokens += verdict.num_tokens
            client.prefill_ms += verdict.cost.prefill_ms
        client.num_texts += context.finish is not None
        client.num_strayed += context.finish is None and time.perf_counter() < until
        verifier.close()
    links.close()


def run_clients(
    addresses: list[str], recordings: list[Recording], fingerprint: str, think_ms: float, seconds: float
) -> list[Client]:
    """Replay with one client per address, all at once."""
    clients = [Client() for _ in addresses]
    until = time.perf_counter() + seconds
    threads = [
        threading.Thread(
            target=replay, args=(address, recordings[i:] + recordings[:i], fingerprint, think_ms, until, client)
        )
        for i, (address, client) in enumerate(zip(addresses, clients, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clients


def show(name: str, clients: list[Client], seconds: float, allowed: float, before: Served, after: Served) -> None:
    waits = [ms for client in clients for ms in client.wait_ms]
    queues = [ms for client in clients for ms in client.queue_ms]
    rounds = [len(client.wait_ms) for client in clients]
    tokens = sum(client.num_tokens for client in clients)
    prefill = sum(client.prefill_ms for client in clients) / seconds / 1e3
    allowed *= 1 - prefill  # the worker cannot do both at once
    rows_per_s = (after.num_rows - before.num_rows) / seconds
    busy = (after.forward_s - before.forward_s) / seconds + prefill
    per_forward = (after.num_rows - before.num_rows) / max(after.num_forwards - before.num_forwards, 1)
    print(
        f"{name:<22}{tokens / seconds:>9.1f}{rows_per_s:>8.1f}{allowed:>9.1f}{rows_per_s / allowed:>7.2f}{busy:>6.2f}"
        f"{per_forward:>7.1f}{prefill:>9.2f}{percentile(waits, 50):>10.0f}{percentile(waits, 95):>7.0f}"
        f"{percentile(queues, 50):>11.0f}{percentile(queues, 95):>7.0f}{min(rounds) / statistics.mean(rounds):>10.2f}"
        f"{sum(client.num_strayed for client in clients):>9}",
        flush=True,
    )


@dataclass(frozen=True, slots=True)
class Served:
    """What a server's metrics say so far."""

    num_forwards: float
    num_rows: float
    forward_s: float


def scrape(port: int) -> Served:
    """The counters of a server."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    names = ("skydraft_batch_rows_count", "skydraft_batch_rows_sum", "skydraft_forward_seconds_sum")
    return Served(*(float(values[name]) for name in names))


def bench(execution: str, seconds: float, think_ms: float | None, soak_minutes: float) -> None:
    """The table of one execution."""
    curve = row_curve(execution)
    print(f"\nexecution {execution}; engine alone, ms a forward: "
          + "  ".join(f"{rows} rows {ms:.1f}" for rows, ms in curve.items()))  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as probe:
        metrics_port = probe.getsockname()[1]
    options = ["--max-sessions", "16", "--context", "1024", "--execution", execution]
    options += ["--metrics-port", str(metrics_port)]
    server = ServerProcess(default_pair().target, *options)
    recordings, fingerprint, draft_ms = record(server)
    think_ms = draft_ms if think_ms is None else think_ms
    print(f"k={K}, {seconds:.0f} s each, {think_ms:.0f} ms of drafting emulated between rounds")
    print(f"{'clients':<22}{'tokens/s':>9}{'rows/s':>8}{'allowed':>9}{'share':>7}{'busy':>6}{'rows/f':>7}{'prefill':>9}"
          f"{'wait p50':>10}{'p95':>7}{'queue p50':>11}{'p95':>7}{'fairness':>10}{'strayed':>9}")  # fmt: skip
    for num in NUM_CLIENTS:
        widest = max(rows for rows in curve if rows <= max(3, (K + 1) * num))
        before = scrape(metrics_port)
        clients = run_clients([server.address] * num, recordings, fingerprint, think_ms, seconds)
        show(str(num), clients, seconds, widest / curve[widest] * 1e3, before, scrape(metrics_port))
    with EmulatedLink(("127.0.0.1", server.port)) as link:
        threading.Timer(seconds / 3, lambda: link.stall(3600)).start()
        addresses = [server.address] * 7
        stuck = threading.Thread(
            target=run_clients, args=([link.address], recordings, fingerprint, think_ms, seconds), daemon=True
        )
        stuck.start()
        before = scrape(metrics_port)
        clients = run_clients(addresses, recordings, fingerprint, think_ms, seconds)
        show("7, and one that stops", clients, seconds, widest / curve[widest] * 1e3, before, scrape(metrics_port))
    if soak_minutes:
        soak(server, recordings, fingerprint, think_ms, soak_minutes)
    server.stop()


def beginnings(seconds: float, think_ms: float | None, model: str) -> None:
    """Sets the two servers side by side. Both have loaded the model; who is not asked waits."""
    feeds = "from skydraft.engines.llamacpp import LlamaCppEngine as E; E.allocate_beginning = lambda self: None"
    options = ["--max-sessions", "16", "--context", "512"]
    servers = {"fed each time": ServerProcess(model, *options, changed=feeds), "copied": ServerProcess(model, *options)}
    recordings, fingerprint, draft_ms = record(servers["copied"])
    print(f"\n{model}, exact, 8 clients, {seconds:.0f} s each, mean prompt "
          f"{statistics.mean(len(each.prompt.token_ids) for each in recordings):.1f} tokens")  # fmt: skip
    print(f"{'the beginning is':<18}{'tokens/s':>10}{'prefill':>9}{'texts':>7}{'strayed':>9}")
    for name in [*servers] * 2:
        think = draft_ms if think_ms is None else think_ms
        clients = run_clients([servers[name].address] * 8, recordings, fingerprint, think, seconds)
        tokens, texts, strayed = (
            sum(getattr(client, what) for client in clients) for what in ("num_tokens", "num_texts", "num_strayed")
        )
        share = sum(client.prefill_ms for client in clients) / seconds / 1e3
        print(f"{name:<18}{tokens / seconds:>10.1f}{share:>9.2f}{texts:>7}{strayed:>9}", flush=True)
    for server in servers.values():
        server.stop()


def soak(server: ServerProcess, recordings: list[Recording], fingerprint: str, think_ms: float, minutes: float) -> None:
    """16 clients for some minutes: memory, files, and sessions afterwards."""
    print(f"\n16 clients for {minutes:g} minutes: resident memory of the server, MB; open files")
    for minute in range(round(minutes)):
        run_clients([server.address] * 16, recordings, fingerprint, think_ms, 60)
        print(f"  after {minute + 1} min: {server.resident_mb:.1f} MB, {server.num_files} files", flush=True)
    time.sleep(2)
    cloud = skydraft.connect(server.address)
    print(f"  sessions left: {cloud.info().num_sessions}")
    cloud.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--think", type=float, default=None, help="ms between rounds; the time of a draft if not given")
    parser.add_argument("--soak", type=float, default=0, help="minutes of 16 clients at the end")
    parser.add_argument("--execution", action="append", choices=["exact", "throughput"])
    parser.add_argument("--beginnings", action="store_true", help="what sharing the template's part brings")
    parser.add_argument("--model", default=default_pair().target, help="with --beginnings: the target")
    given = parser.parse_args()
    print(machine())
    if given.beginnings:
        beginnings(given.seconds, given.think, given.model)
        return
    for execution in given.execution or ["exact", "throughput"]:
        bench(execution, given.seconds, given.think, given.soak if execution == "exact" else 0)


if __name__ == "__main__":
    main()
