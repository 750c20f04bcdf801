"""Drives a worker by hand or a server over its streams, by clients that know what has to be answered."""

import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import skydraft
from skydraft.access.limits import Limits, RowBudget
from skydraft.choosing.chooser import Chooser
from skydraft.cloud.docket import Answer, Job
from skydraft.cloud.worker import Worker
from skydraft.config import DecodingParams
from skydraft.decoding.plan import make_plan
from skydraft.decoding.target import LocalVerifier
from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.protocol import codec
from skydraft.protocol.codec import digest, short_fingerprint
from skydraft.protocol.values import OpenCall, Opening, VerifyCall
from skydraft.types import Draft, DraftBlock, Prompt, Verdict
from tests import reference, toys
from tests.serving import PATIENCE_S, RawSession, waiting
from tests.toys import VOCAB

FINGERPRINT = short_fingerprint(VOCAB.fingerprint)
ENDLESS = DecodingParams(temperature=0.7, seed=9, max_new_tokens=3000, min_new_tokens=3000)
TO_THE_END = 2**32 - 1
UNLIMITED = RowBudget(0.0)


class Clock:
    """Passes when told, and a very little at each look, so that no two looks are the same."""

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

    @property
    def num_rows(self) -> int:
        return sum(len(tokens) for batch in self.batches for _, tokens in batch)

    def allocate(self, num_tokens: int) -> Any:
        self.num_open += 1
        return super().allocate(num_tokens)

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
    """A job, and its answers, each with whether it was said to be the last."""

    job: Job
    said: list[tuple[Answer, bool]] = field(default_factory=list)
    drafts: deque[Draft] = field(default_factory=deque)

    @property
    def answers(self) -> list[Answer]:
        return [answer for answer, _ in self.said]

    @property
    def last(self) -> Any:
        return self.said[-1][0]

    @property
    def is_answered(self) -> bool:
        return bool(self.said) and self.said[-1][1]

    @property
    def written(self) -> tuple[int, ...]:
        """What came after the verdict."""
        return tuple(i for answer in self.answers[1:] if isinstance(answer, Verdict) for i in answer.commits())


class Desk:
    """A worker without threads and network."""

    def __init__(self, engine: Watched, *, max_rows: int = 64, **limits: Any) -> None:
        self.clock = Clock()
        self.engine = engine
        self.engine.clock = self.clock
        self.worker = Worker(engine, Limits(**limits), clock=self.clock)
        self.worker.max_rows = max_rows
        self.docket = self.worker.docket
        self.all_asked: list[Asked] = []

    @property
    def num_sessions(self) -> int:
        return len(self.docket.sessions)

    def ask(self, call: OpenCall | VerifyCall, owner: str = "ann", budget: Any = UNLIMITED) -> Asked:
        said, drafts = list[tuple[Answer, bool]](), deque[Draft]()
        job = Job(call, owner, lambda *answer: said.append(answer), self.clock(), drafts, budget)
        asked = Asked(job, said, drafts)
        self.all_asked.append(asked)
        self.worker.post(partial(self.docket.take, asked.job))
        return asked

    def stop_writing(self, asked: Asked) -> None:
        self.worker.post(partial(self.docket.stop_writing, asked.job))

    def close(self, number: int, owner: str = "ann") -> None:
        self.worker.post(partial(self.docket.close, (number, owner)))

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.worker.receive()
            self.worker.step()

    def steps_until(self, asked: Asked, most: int = 2000) -> int:
        for number in range(most):
            if asked.is_answered:
                return number
            self.step()
        raise AssertionError("it was never answered")

    def finish(self) -> None:
        """Work until everything is answered, each job once."""
        for _ in range(5000):
            self.step()
            if all(asked.is_answered for asked in self.all_asked):
                break
        self.check_answers()

    def check_batches(self) -> None:
        """No forward is too large, and a session is in it once at most."""
        for batch in self.engine.batches:
            assert sum(len(tokens) for _, tokens in batch) <= self.worker.max_rows
            assert len({id(sequence) for sequence, _ in batch}) == len(batch)

    def check_answers(self) -> None:
        """Each job has one last answer, and before it a verdict and tokens at most, one after the other."""
        for asked in self.all_asked:
            assert [is_last for _, is_last in asked.said] == [False] * (len(asked.said) - 1) + [True]
            assert all(isinstance(answer, Verdict) for answer in asked.answers[:-1])
            parts = [answer for answer in asked.answers[1:] if isinstance(answer, Verdict)]
            for before, after in itertools.pairwise(parts):
                assert after.base == before.base + before.num_tokens

    def answer(self, call: OpenCall | VerifyCall, owner: str = "ann") -> Any:
        asked = self.ask(call, owner)
        self.finish()
        return asked.last

    def shut_down(self) -> None:
        self.worker.post(self.docket.stop)
        self.worker.run()

    def tick(self) -> Any:
        self.clock.now += 1
        self.step()
        return self.docket.sessions


class Edge:
    """A client's own record of one generation, and a target in this process that judges the same blocks."""

    def __init__(self, number: int, seed: int, params: DecodingParams, prompt: tuple[int, ...] = (0, 3)) -> None:
        self.number, self.epoch = number, 1
        self.prompt, self.params = prompt, params
        self.generated: list[int] = []
        self.num_seen = 0
        self._chooser = Chooser(params, VOCAB, len(prompt))
        self._engine = toys.toy(seed)
        self._local = LocalVerifier(self._engine, Prompt(prompt), params, max_rows=3)
        self.is_finished = False

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt, *self.generated]

    @property
    def base(self) -> int:
        return len(self.generated)

    def opening(self) -> Opening:
        committed = tuple(self.generated[: self.num_seen])
        return Opening(FINGERPRINT, Prompt(self.prompt), committed, self.params)

    def open(self) -> OpenCall:
        return OpenCall(self.number, self.epoch, self.opening())

    def call(
        self, catch_up: tuple[int, ...] = (), draft: tuple[int, ...] = (), *, opens: bool = False, write: int = 0
    ) -> VerifyCall:
        base, crc = self.base + len(catch_up), digest(toys.array([*self.token_ids, *catch_up]))
        opening = self.opening() if opens else None
        return VerifyCall(self.number, self.epoch, base, tuple(catch_up), tuple(draft), crc, opening, write)

    def stream(self, write: int = TO_THE_END) -> VerifyCall:
        return self.call(opens=True, write=write)

    def correction(self) -> VerifyCall:
        """A block whose second draft is wrong, after which the target writes on."""
        return self.call(draft=self.likely(3, miss=1), opens=True, write=TO_THE_END)

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

    def took(self, asked: Asked) -> None:
        """Commit what was written after a verdict; the target in this process has to write the same."""
        for token_id in asked.written:
            verdict = self._local.verify(DraftBlock(self.base, ()), ())
            assert verdict.token_id == token_id
            self.generated.append(token_id)
            self.is_finished = verdict.finish is not None
        self.num_seen = self.base

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


def desk_of(seed: int = 4, *, part: int = 64, kind: type[Watched] = Watched, **options: Any) -> Desk:
    """A worker over a toy that reads prompts in parts of so many tokens."""
    engine: Any = toys.toy(seed, kind=kind)
    engine.max_batch_rows = part
    return Desk(engine, **options)


def opened(desk: Desk, *edges: Edge) -> None:
    for edge in edges:
        call = edge.call(opens=True)
        assert desk.answer(call) == edge.judged(call)


# --- The same over a network: messages as any client may send them

TOY = open_toy("toy")
PARAMS = DecodingParams(max_new_tokens=20, min_new_tokens=20)
LONG = DecodingParams(max_new_tokens=4000, min_new_tokens=4000)
ANN, BOB = "a-token-of-24-characters", "another-token-of-24-chars"
TOKENS = f"ann {ANN}\nbob {BOB}\n"


def opening(*prompt_ids: int, **changes: Any) -> Opening:
    given: dict[str, Any] = {"fingerprint": short_fingerprint(TOY.vocab.fingerprint), "params": PARAMS} | changes
    return Opening(prompt=Prompt(prompt_ids or (1, 2, 3)), **given)


def open_message(session: int = 7, begun: Opening | None = None) -> bytes:
    return codec.encode_open(OpenCall(session, 0, begun or opening()))


def verify_message(session: int = 7, *generated: int, draft: tuple[int, ...] = (5, 6), **changes: Any) -> bytes:
    start = changes.pop("opening", opening(committed_ids=generated))
    known = start or opening()
    given: dict[str, Any] = {"epoch": 0, "base": len(known.committed_ids or generated), "catch_up_ids": ()}
    ids = (*known.prompt.token_ids, *(known.committed_ids or generated))
    given |= {"draft_ids": draft, "opening": start, "digest": digest(np.array(ids, np.int32))}
    return codec.encode_verify(VerifyCall(session=session, **given | changes))


def long_text(write: int = 4000) -> bytes:
    return verify_message(draft=(), opening=opening(params=LONG), write=write)


def later(*generated: int, session: int = 0, **changes: Any) -> bytes:
    return verify_message(session, *generated, **{"opening": None, "draft": (9,)} | changes)


def verdict_of(reply: bytes, num_audited: int = 0) -> Verdict:
    verdict, _, _ = codec.decode_verdict(reply, num_audited)
    assert verdict is not None
    return verdict


def tokens_written(stream: RawSession) -> tuple[int, ...]:
    """What the target writes after a verdict, to the reply that is marked; each reply follows the one before."""
    parts, is_last = list[Verdict](), False
    while not is_last:
        part, is_last, _ = codec.decode_verdict(stream.answer(), is_first=False)
        assert not part or not parts or part.base == parts[-1].base + parts[-1].num_tokens
        parts += [part] if part else []
    return tuple(token_id for part in parts for token_id in part.commits())


def text(params: DecodingParams) -> tuple[int, ...]:
    return reference.plain(TOY, opening().prompt.token_ids, params)[0]


def holding() -> tuple[ToyEngine, threading.Event, threading.Event]:
    """(a toy, an event that lets it compute, one that says that it was asked to)."""
    go, was_asked = threading.Event(), threading.Event()

    def wait() -> None:
        was_asked.set()
        assert go.wait(PATIENCE_S)

    return waiting(open_toy("toy", 4096, 40), wait), go, was_asked


def slow_toy(token_s: float = 0.002) -> ToyEngine:
    return waiting(open_toy("toy"), lambda: time.sleep(token_s))


def assert_serves(address: str, **options: Any) -> None:
    with closing(skydraft.connect(address, **options)) as cloud:
        given: dict[str, Any] = {"edge": open_toy("toy:drift=0.2"), "plan": make_plan(k=5), "params": PARAMS}
        got, expected = (skydraft.generate("语速", cloud=target, **given).run() for target in (cloud, TOY))
        assert got.token_ids == expected.token_ids
