"""A worker that is driven by hand, and clients that know what it has to answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skydraft.choosing.chooser import Chooser
from skydraft.cloud.jobs import Answer, GenerateJob, Job, VerifyJob
from skydraft.cloud.limits import Limits
from skydraft.cloud.worker import Worker
from skydraft.config import DecodingParams
from skydraft.decoding.target import LocalVerifier
from skydraft.engines.toy import ToyEngine
from skydraft.protocol.codec import digest, short_fingerprint
from skydraft.protocol.values import Emission, Opening, SessionCall, VerifyCall
from skydraft.types import Prompt, Verdict
from tests import toys
from tests.toys import VOCAB

FINGERPRINT = short_fingerprint(VOCAB.fingerprint)
ENDLESS = DecodingParams(temperature=0.7, seed=9, max_new_tokens=3000, min_new_tokens=3000)


class Clock:
    """Seconds that pass when told, and a very little at each look, so that no two looks are the same."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    perf_counter = __call__  # it may stand in for the module `time`


class Watched(ToyEngine):
    """Notes the feeds of each forward with logits, takes time for it, and fails where told to."""

    clock: Clock | None = None
    fails: Callable[[list[list[int]]], BaseException | None] = staticmethod(lambda feeds: None)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.batches: list[list[tuple[Any, list[int]]]] = []  # (sequence, tokens) of each feed
        self.num_prefills = self.num_open = 0

    def allocate(self) -> Any:
        self.num_open += 1
        return super().allocate()

    def release(self, sequence: Any) -> None:
        self.num_open -= 1
        super().release(sequence)

    def forward(self, feeds: Any, *, want_logits: bool) -> Any:
        if self.clock:
            self.clock.now += 0.01
        self.num_prefills += not want_logits
        if want_logits:
            self.batches.append([(sequence, [int(i) for i in token_ids]) for sequence, token_ids in feeds])
            if error := self.fails([tokens for _, tokens in self.batches[-1]]):
                raise error
        return super().forward(feeds, want_logits=want_logits)


@dataclass
class Asked:
    """A job and its answers."""

    job: Job
    answers: list[Answer] = field(default_factory=list)

    @property
    def last(self) -> Any:
        return self.answers[-1]

    @property
    def is_answered(self) -> bool:
        """Whether the last answer has come; tokens of a stream that goes on are none."""
        return bool(self.answers) and not (isinstance(self.last, Emission) and self.last.finish is None)


class Tally:
    """What the worker tells about itself, counted."""

    def __init__(self) -> None:
        self.num_jobs = self.num_sessions = self.num_evicted = self.num_expired = 0
        self.num_forwards = self.num_rows = self.num_refused = 0
        self.answers: list[tuple[Job, Answer]] = []

    def queued(self, num_jobs: int, num_sessions: int) -> None:
        self.num_jobs, self.num_sessions = num_jobs, num_sessions

    def forward(self, num_jobs: int, num_rows: int, seconds: float) -> None:
        self.num_forwards += 1
        self.num_rows += num_rows

    def answered(self, job: Job, answer: Answer) -> None:
        self.answers.append((job, answer))

    def refused(self, job: Job) -> None:
        self.num_refused += 1

    def closed(self, num_evicted: int, num_expired: int) -> None:
        self.num_evicted, self.num_expired = num_evicted, num_expired


class Desk:
    """A worker without threads and network."""

    def __init__(self, engine: Watched, *, max_rows: int = 64, **limits: Any) -> None:
        self.clock = Clock()
        self.engine = engine
        self.engine.clock = self.clock
        self._tally = Tally()
        self.worker = Worker(engine, Limits(**limits), clock=self.clock, observer=self._tally)
        self.worker.max_rows = max_rows
        self.asked: list[Asked] = []

    def ask(self, call: SessionCall | VerifyCall, owner: str = "ann", kind: type[Job] = VerifyJob) -> Asked:
        answers: list[Answer] = []
        asked = Asked(kind(call, owner, answers.append, self.clock()), answers)
        self.asked.append(asked)
        self.worker.submit(asked.job)
        return asked

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.worker.receive()
            self.worker.step()

    def finish(self) -> None:
        """Work until everything is answered, each job once."""
        for _ in range(1000):
            self.step()
            if all(asked.is_answered for asked in self.asked):
                break
        streams = [asked.answers[:-1] for asked in self.asked if isinstance(asked.job, GenerateJob)]
        assert all(isinstance(answer, Emission) and not answer.finish for part in streams for answer in part)
        assert {len(asked.answers) for asked in self.asked if not isinstance(asked.job, GenerateJob)} <= {1}
        assert all(asked.is_answered for asked in self.asked)

    def answer(self, call: SessionCall | VerifyCall, owner: str = "ann", kind: type[Job] = VerifyJob) -> Any:
        """The last answer to a call."""
        asked = self.ask(call, owner, kind)
        self.finish()
        return asked.last

    def tally(self) -> Tally:
        """What the worker has told, its regular news included; a second passes."""
        self.clock.now += 1
        self.step()
        return self._tally


class Edge:
    """A client's own record of one generation, and a target in this process that judges the same blocks."""

    def __init__(
        self, number: int, seed: int, params: DecodingParams, prompt: tuple[int, ...] = (0, 3), top: int = 0
    ) -> None:
        self.number, self.epoch = number, 1
        self.prompt, self.params, self.top = prompt, params, top
        self.generated: list[int] = []
        self.num_seen = 0
        self._chooser = Chooser(params, VOCAB, len(prompt))
        self._engine = toys.toy(seed)
        self._local = LocalVerifier(self._engine, Prompt(prompt), params, max_rows=3, top=top)
        self.is_finished = False

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt, *self.generated]

    @property
    def base(self) -> int:
        return len(self.generated)

    def opening(self) -> Opening:
        committed = tuple(self.generated[: self.num_seen])
        return Opening(FINGERPRINT, Prompt(self.prompt), committed, self.params, self.top)

    def open(self) -> SessionCall:
        return SessionCall(self.number, self.epoch, self.opening())

    def call(self, catch_up: tuple[int, ...] = (), draft: tuple[int, ...] = (), *, opens: bool = False) -> VerifyCall:
        base, crc = self.base + len(catch_up), digest(toys.array([*self.token_ids, *catch_up]))
        opening = self.opening() if opens else None
        return VerifyCall(self.number, self.epoch, base, tuple(catch_up), tuple(draft), crc, opening)

    def reopened(self, call: VerifyCall) -> VerifyCall:
        """The same block for a server that has lost the session."""
        self.epoch += 1
        return dataclasses.replace(call, epoch=self.epoch, opening=self.opening())

    def judged(self, call: VerifyCall) -> Verdict:
        """What the target in this process says, once; commits it."""
        verdict = self._local.verify(call.block, call.catch_up_ids)
        self.generated += [*call.catch_up_ids, *verdict.commits(call.block)]
        self.num_seen = self.base
        self.is_finished = verdict.finish is not None
        return verdict

    def likely(self, num_tokens: int, miss: int | None = None) -> tuple[int, ...]:
        """What the target would write, with another token at index `miss`."""
        token_ids = list(self.token_ids)
        sequence = self._engine.open(token_ids)
        for index in range(num_tokens):
            row = sequence.extend(token_ids[-1:])[0]
            choice = self._chooser.choose(row, np.array(token_ids, np.int32))
            token_ids.append((choice + 1) % VOCAB.size if index == miss else choice)
        sequence.close()
        return tuple(token_ids[len(self.token_ids) :])


def opened(desk: Desk, *edges: Edge) -> None:
    """Let sessions begin, each with a first verdict."""
    for edge in edges:
        call = edge.call(opens=True)
        assert desk.answer(call) == edge.judged(call)
