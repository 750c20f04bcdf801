"""Many edges on one target: clients whose draft model says what was recorded, against a real server.

    python -m bench.clients [--seconds S] [--think MS] [--soak MINUTES] [--execution exact|throughput] [--beginnings]
    python -m bench.clients --modes "cloud,auto;k=12;hand-back=0,auto" [--seconds S] [--step MS] [--execution E]

Drafts are recorded first, in one lossless run over 16 prompts. Then 1, 2, 4, 8 and 16 clients write these texts, each
with a connection of its own, at once (`--think 0`) or with the time that a draft takes in each round. Beside the
measured rows a second stands what the engine alone does in forwards of as many rows, measured before the server starts,
in the share of the time that was not spent on prompts. Busy is the share of the time inside forwards, prompts included
(from the server's metrics). Fairness is the slowest client's rounds over the mean. `--beginnings` instead sets a server
that copies the template's part of a prompt beside one that feeds it each time: 8 clients, in turn, twice. `--modes`
sets modes beside each other, in turn, twice: 8 clients on 4 Chinese texts and 4 programs, with the draft model's tokens
and its certainty as recorded; a step of it takes --step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import socket
import statistics
import threading
import time
import urllib.request
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import skydraft
from bench.recorded_target import RecordedModel, Table, key_of, record
from bench.server import ServerProcess
from bench.workload import machine, prompts
from skydraft import Engine, EngineOptions, StepRecord, decoding_params, make_plan
from skydraft.decoding.stats import percentile
from skydraft.engines.rows import Rows
from skydraft.errors import CloudError
from skydraft.evaluation.emulated_link import EmulatedLink
from skydraft.evaluation.modes import Mode, parse_modes
from skydraft.gating.gates import measure
from skydraft.models import default_pair
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt
from skydraft.types import Signals

DATA = Path(__file__).parent.parent / "data"
NUM_CLIENTS = (1, 2, 4, 8, 16)
K = 5
PARAMS = decoding_params(max_new_tokens=48)
_COMPUTING = threading.Lock()  # the real draft model has one sequence


@dataclass(frozen=True, slots=True)
class Recording:
    """What a draft model said along lossless texts of 16 prompts, and how long it took for a block."""

    draft: Engine
    table: Table
    texts: dict[str, tuple[int, ...]]
    draft_ms: float

    @property
    def prompt_len(self) -> float:
        """Mean tokens of a prompt."""
        ids = [read_prompt(self.draft, asked(prompt)).edge.token_ids for prompt in self.texts]
        return statistics.mean(map(len, ids))


@dataclass(slots=True)
class Client:
    """What one client did."""

    num_tokens: int = 0
    num_calls: int = 0
    num_written: int = 0
    num_texts: int = 0
    num_strayed: int = 0
    prefill_ms: float = 0.0
    wait_ms: list[float] = field(default_factory=list)
    queue_ms: list[float] = field(default_factory=list)

    def add(self, record: StepRecord) -> None:
        """Count a round."""
        self.num_tokens += record.num_committed
        self.num_calls += record.outcome == "verified"
        self.num_written += record.num_written
        self.prefill_ms += record.target.prefill_ms
        self.wait_ms.append(record.link.rtt_ms)
        self.queue_ms.append(record.target.queue_ms)


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


def recorded(server: ServerProcess) -> Recording:
    """Have the draft model write along with the target once. It stays open, since its tokenizer is needed."""
    edge, table, texts, draft_ms = skydraft.load(default_pair().draft), Table(), {}, []
    record(edge, table)
    with closing(skydraft.connect(server.address)) as cloud:
        for prompt in prompts(16):
            done = skydraft.generate(prompt, edge=edge, cloud=cloud, plan=make_plan(k=K), params=PARAMS).run()
            draft_ms += [record.draft.forward_ms for record in done.records[1:]]
            texts[prompt] = done.token_ids
    return Recording(edge, table, texts, statistics.median(draft_ms))


def replay(address: str, recording: Recording, first: int, think_ms: float, until: float, client: Client) -> None:
    """Write text after text, from the `first` on, until the time is up."""
    told = recording.draft
    edge = RecordedModel(told.vocab, told.fingerprint, recording.table, think_ms / K)
    asked_for = [*recording.texts.items()]
    number = first
    with closing(skydraft.connect(address, timeout_s=120)) as cloud:
        while time.perf_counter() < until:
            prompt, text = asked_for[number % len(asked_for)]
            number += 1
            with skydraft.generate(prompt, edge=edge, cloud=cloud, plan=make_plan(k=K), params=PARAMS) as generation:
                try:
                    for done, _ in generation.rounds():
                        client.add(done.record)
                        if time.perf_counter() >= until:
                            break
                except CloudError:
                    return  # the one that stops, when its link is taken away
            is_whole = generation.finish_reason is not None
            client.num_texts += is_whole
            client.num_strayed += is_whole and generation.token_ids != text


def run_clients(addresses: list[str], recording: Recording, think_ms: float, seconds: float) -> list[Client]:
    """Replay with one client per address, all at once."""
    clients = [Client() for _ in addresses]
    until = time.perf_counter() + seconds
    threads = [
        threading.Thread(target=replay, args=(address, recording, i, think_ms, until, client))
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
    recording = recorded(server)
    think_ms = recording.draft_ms if think_ms is None else think_ms
    print(f"k={K}, {seconds:.0f} s each, {think_ms:.0f} ms of drafting emulated between rounds")
    print(f"{'clients':<22}{'tokens/s':>9}{'rows/s':>8}{'allowed':>9}{'share':>7}{'busy':>6}{'rows/f':>7}{'prefill':>9}"
          f"{'wait p50':>10}{'p95':>7}{'queue p50':>11}{'p95':>7}{'fairness':>10}{'strayed':>9}")  # fmt: skip
    for num in NUM_CLIENTS:
        widest = max(rows for rows in curve if rows <= max(3, (K + 1) * num))
        before = scrape(metrics_port)
        clients = run_clients([server.address] * num, recording, think_ms, seconds)
        show(str(num), clients, seconds, widest / curve[widest] * 1e3, before, scrape(metrics_port))
    with EmulatedLink(("127.0.0.1", server.port)) as link:
        threading.Timer(seconds / 3, lambda: link.stall(3600)).start()
        addresses = [server.address] * 7
        stuck = threading.Thread(target=run_clients, args=([link.address], recording, think_ms, seconds), daemon=True)
        stuck.start()
        before = scrape(metrics_port)
        clients = run_clients(addresses, recording, think_ms, seconds)
        show("7, and one that stops", clients, seconds, widest / curve[widest] * 1e3, before, scrape(metrics_port))
    if soak_minutes:
        soak(server, recording, think_ms, soak_minutes)
    server.stop()
    recording.draft.close()


def beginnings(seconds: float, think_ms: float | None, model: str) -> None:
    """Sets the two servers side by side. Both have loaded the model; who is not asked waits."""
    feeds = "from skydraft.engines.llamacpp import LlamaCppEngine as E; E.allocate_beginning = lambda self: None"
    options = ["--max-sessions", "16", "--context", "512"]
    servers = {"fed each time": ServerProcess(model, *options, changed=feeds), "copied": ServerProcess(model, *options)}
    recording = recorded(servers["copied"])
    think = recording.draft_ms if think_ms is None else think_ms
    print(f"\n{model}, exact, 8 clients, {seconds:.0f} s each, mean prompt "
          f"{recording.prompt_len:.1f} tokens")  # fmt: skip
    print(f"{'the beginning is':<18}{'tokens/s':>10}{'prefill':>9}{'texts':>7}{'strayed':>9}")
    for name in [*servers] * 2:
        clients = run_clients([servers[name].address] * 8, recording, think, seconds)
        tokens, texts, strayed = (
            sum(getattr(client, what) for client in clients) for what in ("num_tokens", "num_texts", "num_strayed")
        )
        share = sum(client.prefill_ms for client in clients) / seconds / 1e3
        print(f"{name:<18}{tokens / seconds:>10.1f}{share:>9.2f}{texts:>7}{strayed:>9}", flush=True)
    for server in servers.values():
        server.stop()


class RecordedDraft(RecordedModel):
    """A draft model whose choices and certainty are recorded; what is not known yet, the real one computes once."""

    def __init__(self, real: Engine, known: dict[str, tuple[int, Signals]], step_ms: float) -> None:
        super().__init__(real.vocab, real.fingerprint, {}, step_ms)
        self._draft, self._known = real, known

    def write_row(self, row: Rows, token_ids: list[int]) -> None:
        """Write a row with the recorded best token, and with the entropy and the probabilities of the best two."""
        key = key_of(token_ids)
        if key not in self._known:
            with _COMPUTING, closing(self._draft.begin(token_ids[:-1])) as sequence:
                self._draft.fill(sequence, token_ids)
                sequence.align(token_ids[:-1])
                logits = sequence.extend(token_ids[sequence.length :])[-1]
                self._known[key] = int(np.argmax(logits)), measure(logits)
        best, signals = self._known[key]
        second = max(signals.top_prob - signals.margin, 1e-9)
        rest = max(1 - signals.top_prob - second, 1e-9)
        head = -signals.top_prob * math.log(signals.top_prob) - second * math.log(second)
        size = int(np.clip(math.exp(min((signals.entropy - head + rest * math.log(rest)) / rest, 11.0)), 1, 60_000))
        row[:] = -200.0
        row[(best + 2 + np.arange(size)) % len(row)] = math.log(rest / size)
        row[(best + 1) % len(row)] = math.log(second)
        row[best] = math.log(signals.top_prob) + 1e-6


def beside(modes: Seq[Mode], execution: str, seconds: float, step_ms: float) -> None:
    """Tokens a second of 8 clients by mode, and what the server computes for them."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = ServerProcess(
        default_pair().target, "--max-sessions", "8", "--context", "512", "--execution", execution,
        "--metrics-port", str(port),
    )  # fmt: skip
    lines = (DATA / "prompts_long_dev.jsonl").read_text(encoding="utf-8").splitlines()
    asked_for = [json.loads(line)["prompt"] for line in lines][::5]
    real, known = skydraft.load(default_pair().draft), dict[str, tuple[int, Signals]]()
    print(f"\nexecution {execution}, 8 clients, {seconds:.0f} s each, a draft step takes {step_ms:g} ms")
    print(f"{'mode':<36}{'tokens/s':>9}{'forwards/s':>11}{'rows/s':>8}{'rows/token':>11}{'prefill':>9}{'calls':>8}"
          f"{'written':>9}")  # fmt: skip
    for number, mode in enumerate([*modes] * 3):
        is_learning = number < len(modes)  # what the draft model has to compute is not timed
        before, clients = scrape(port), [Client() for _ in asked_for]
        until = math.inf if is_learning else time.perf_counter() + seconds
        threads = [
            threading.Thread(
                target=write_texts, kwargs={"client": client},
                args=(server.address, RecordedDraft(real, known, step_ms), asked_for, i, mode, until),
            )
            for i, client in enumerate(clients)
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = scrape(port)
        if is_learning:
            continue
        tokens = sum(client.num_tokens for client in clients)
        print(
            f"{mode.name:<36}{tokens / seconds:>9.1f}{(after.num_forwards - before.num_forwards) / seconds:>11.1f}"
            f"{(after.num_rows - before.num_rows) / seconds:>8.1f}{(after.num_rows - before.num_rows) / tokens:>11.2f}"
            f"{sum(client.prefill_ms for client in clients) / seconds / 1e3:>9.2f}"
            f"{sum(client.num_calls for client in clients) / tokens:>8.3f}"
            f"{sum(client.num_written for client in clients) / tokens:>9.2f}",
            flush=True,
        )
    server.stop()
    real.close()


def write_texts(
    address: str, edge: Engine, asked_for: Seq[str], first: int, mode: Mode, until: float, *, client: Client
) -> None:
    """Write text after text, from the `first` on, until the time is up; one text if it has no end."""
    with closing(skydraft.connect(address, timeout_s=120, require=True)) as cloud:
        for number in itertools.count(first):
            prompt = asked_for[number % len(asked_for)]
            with skydraft.generate(prompt, edge=edge, cloud=cloud, plan=mode.plan, params=mode.params) as generation:
                for done, _ in generation.rounds():
                    client.add(done.record)
                    if time.perf_counter() >= until:
                        return
            if until == math.inf:
                return


def soak(server: ServerProcess, recording: Recording, think_ms: float, minutes: float) -> None:
    """16 clients for some minutes: memory, files, and sessions afterwards."""
    print(f"\n16 clients for {minutes:g} minutes: resident memory of the server, MB; open files")
    for minute in range(round(minutes)):
        run_clients([server.address] * 16, recording, think_ms, 60)
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
    parser.add_argument("--modes", default="", help="as for skydraft compare: set them beside each other")
    parser.add_argument("--step", type=float, default=15, help="with --modes: ms of a step of the draft model")
    parser.add_argument("--model", default=default_pair().target, help="with --beginnings: the target")
    given = parser.parse_args()
    print(machine())
    if given.beginnings:
        beginnings(given.seconds, given.think, given.model)
        return
    for execution in given.execution or ["exact", "throughput"]:
        if given.modes:
            beside(parse_modes(given.modes, lambda style: PARAMS), execution, given.seconds, given.step)
            continue
        bench(execution, given.seconds, given.think, given.soak if execution == "exact" else 0)


if __name__ == "__main__":
    main()
