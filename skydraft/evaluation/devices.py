"""Many devices on one server, measured: clients of this process, whose draft models say what was recorded.

The server, the link and all requests are real. A draft model computes each of its rows once, for all clients and before
they are measured; later a step only takes the time that it takes. So one machine can stand for many devices.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from skydraft import api
from skydraft.decoding.generation import Generation
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.stats import percentile
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine, Sequence
from skydraft.engines.options import RowProfile
from skydraft.engines.toy import ListEngine
from skydraft.engines.vocab import Rows, TokenIds, num_shared
from skydraft.errors import SkydraftError
from skydraft.evaluation.comparison import request_of
from skydraft.evaluation.modes import Mode
from skydraft.evaluation.records import PromptEntry
from skydraft.types import StepRecord

_FAR = 8  # tokens; a text that differs in more is read from its beginning
_NUM_KEPT = 4096  # tokens of a row: enough for what a schema forbids, and for the entropy to some hundredths of a nat
_NO_WEIGHT = -200.0
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class KeptRow:
    """The best tokens of a row and their log-probabilities; all others have `rest`, as one row has no room for more."""

    token_ids: TokenIds
    logprobs: Rows
    rest: float

    @classmethod
    def of(cls, row: Rows) -> KeptRow:
        """Of a row of logits [vocab]."""
        num = min(_NUM_KEPT, len(row))
        best = np.argpartition(row, len(row) - num)[len(row) - num :].astype(np.int32)
        weights = np.exp(np.maximum(row.astype(np.float64) - row.max(), _NO_WEIGHT))
        weights /= weights.sum()
        others = (1 - weights[best].sum()) / max(len(row) - num, 1)
        return cls(best, np.log(weights[best]).astype(np.float32), float(np.log(max(others, np.exp(_NO_WEIGHT)))))

    def write(self, row: Rows) -> None:
        row[:] = self.rest
        row[self.token_ids] = self.logprobs


class KeptRows:
    """The rows of a draft model after any text, each computed once. Any thread may ask."""

    def __init__(self, real: Engine) -> None:
        self.real, self.num_computed = real, 0
        self._known: dict[bytes, KeptRow] = {}
        self._open = list[Sequence]()

    def after(self, token_ids: TokenIds) -> KeptRow:
        """The row that follows these tokens."""
        key = token_ids.tobytes()
        if key not in self._known:
            with self.real.floor:
                if key not in self._known:  # another device may have asked for it meanwhile
                    self._known[key] = KeptRow.of(self._read(token_ids))
                    self.num_computed += 1
        return self._known[key]

    def _read(self, token_ids: TokenIds) -> Rows:
        near = max(self._open, key=lambda each: num_shared(each.token_ids, token_ids), default=None)
        if near is not None and len(token_ids) - num_shared(near.token_ids, token_ids) <= _FAR:
            self._open.remove(near)
            near.align(token_ids)
        else:
            if len(self._open) == self.real.max_sequences:
                self._open.pop(0).close()  # the one whose last row is oldest
            near = self.real.open(token_ids)
        self._open.append(near)
        row: Rows = near.extend(token_ids[near.length :])[-1]
        return row

    def close(self) -> None:
        while self._open:
            self._open.pop().close()


class RecordedDraft(ListEngine):
    """The draft model of one device: what was recorded, with `step_ms` for each forward, a prompt's too."""

    def __init__(self, kept: KeptRows, step_ms: float) -> None:
        real = kept.real
        super().__init__(real.name)
        self.vocab, self.context_len, self.fingerprint = real.vocab, real.context_len, real.fingerprint
        self._kept, self._step_s = kept, step_ms / 1e3
        self.profile = RowProfile(invariant_rows=real.invariant_rows, forward_ms=(step_ms,))

    def forward(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]], *, want_logits: bool) -> list[Rows]:
        until, found = time.perf_counter() + self._step_s, list[Rows]()
        for sequence, token_ids in feeds:
            rows = np.empty((len(token_ids) if want_logits else 0, self.vocab.size), np.float32)
            for index, token_id in enumerate(token_ids):
                sequence.slot.append(int(token_id))
                if want_logits:
                    self._kept.after(np.array(sequence.slot, np.int32)).write(rows[index])
            found.append(rows)
        time.sleep(max(until - time.perf_counter(), 0.0))
        return found


@dataclass(slots=True)
class Client:
    records: list[StepRecord] = field(default_factory=list)
    texts: list[tuple[GenerateRequest, tuple[int, ...]]] = field(default_factory=list)
    running: Generation | None = None

    @property
    def num_tokens(self) -> int:
        return sum(record.num_committed for record in self.records)

    def write(self, edge: Engine, cloud: Cloud, asked_for: Iterable[GenerateRequest], over: threading.Event) -> None:
        for request in asked_for:
            with api.start(request, edge=edge, cloud=cloud) as self.running:
                for done, _ in self.running.rounds():
                    if over.is_set():
                        return
                    self.records.append(done.record)
                if over.is_set():  # it was cancelled
                    return
                self.texts.append((request, self.running.token_ids))


def drive(
    connect: Callable[[], Cloud], make_edge: Callable[[], Engine], asked_for: Seq[Iterable[GenerateRequest]],
    seconds: float | None = None,
) -> list[Client]:  # fmt: skip
    """A client for each of `asked_for`, all at once, to their end or for `seconds`. Raises a client's SkydraftError."""
    clients, over = [Client() for _ in asked_for], threading.Event()

    def live(client: Client, own: Iterable[GenerateRequest]) -> None:
        try:
            with closing(connect()) as cloud:
                client.write(make_edge(), cloud, own, over)
        except SkydraftError:
            if not over.is_set():
                raise

    with ThreadPoolExecutor(len(clients)) as pool:
        lives = [pool.submit(live, *each) for each in zip(clients, asked_for, strict=True)]
        try:
            wait(lives, seconds, FIRST_EXCEPTION)
        finally:
            over.set()
            for client in clients:
                if client.running is not None:
                    client.running.cancel()
    for each in lives:
        each.result()
    return clients


def turned(asked_for: Seq[GenerateRequest], num: int) -> list[Iterable[GenerateRequest]]:
    """The requests over and over for each of so many clients, each from another one on."""
    return [itertools.islice(itertools.cycle(asked_for), first, None) for first in range(num)]


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens a second of all devices in one mode, and waits of one for the server's answers."""

    mode: str
    tokens_per_s: float
    wait_ms: float | None  # None where nothing came
    late_ms: float | None  # 95th percentile
    busy: float  # how much of a processor core the clients took
    num_computed: int  # rows that were not recorded
    agreement: float | None = None


def agreement_of(records: Seq[StepRecord]) -> float | None:
    """The share of tokens that are the target's own choice; None without any, and where none of the skipped ones was
    audited."""
    skipped = sum(record.num_committed for record in records if record.outcome == "skipped")
    audited, agreed = sum(record.num_audited for record in records), sum(record.num_agreed for record in records)
    num_tokens = sum(record.num_committed for record in records)
    if not num_tokens or (skipped and not audited):
        return None
    return 1 - skipped * (1 - agreed / audited) / num_tokens if audited else 1.0


def measure_load(
    connect: Callable[[], Cloud], kept: KeptRows, mode: Mode, prompts: Seq[PromptEntry], num: int, seconds: float
) -> Load:
    """Have each prompt answered once, which records the draft model, and measure. Raises a SkydraftError."""
    asked_for = [request_of(prompt, mode) for prompt in prompts]
    step_ms = kept.real.profile.forward_ms[0]
    make_edge = partial(RecordedDraft, kept, step_ms)
    drive(connect, make_edge, [asked_for])  # in turn: the draft model would read a text anew at each change
    num_computed, spent_s = kept.num_computed, time.process_time()
    clients = drive(connect, make_edge, turned(asked_for, num), seconds)
    spent_s = time.process_time() - spent_s
    with closing(connect()) as cloud:
        cloud.ping(_LOOK_S)  # clients may have waited at the end for a server that was lost
    records = [record for client in clients for record in client.records]
    waits = [record.link.rtt_ms for record in records if record.link.rtt_ms]
    wait_ms, late_ms = (percentile(waits, percent) for percent in (50, 95))
    return Load(
        mode.name, sum(client.num_tokens for client in clients) / seconds, wait_ms, late_ms, spent_s / seconds,
        kept.num_computed - num_computed, agreement_of(records),
    )  # fmt: skip
