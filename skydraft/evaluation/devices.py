"""How many devices one server carries: a simulation of devices that all replay the recorded rounds of one.

A device writes text after text without a pause. The server does what `cloud.worker` does: a step is one new prompt, if
there is one, and one forward of the rows that wait, in the order of their turns; a session is in a batch once. A server
without skydraft reads prompts as rows among the others, and writes until the connection is closed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.stats import percentile


@dataclass(frozen=True, slots=True)
class Turn:
    """A call to the target, and the part of the text around it.

    The device works `edge_ms` and commits `num_skipped` tokens before it asks for `num_rows` rows, of which the first
    `num_needed` decide (none: the text ends without a call). A server without skydraft only reads `num_read` of them,
    and then writes `num_checked` tokens that the draft had too. The verdict commits `num_tokens`. Then the target
    writes `num_on` more; the device works `read_ms` on each. With `stops` it then stops the target, which writes until
    it hears that. With `closes` the target is a server without skydraft that writes on in any case, until it hears that
    the connection is closed.
    """

    edge_ms: float
    num_skipped: int = 0
    num_rows: int = 0
    num_needed: int = 0
    num_tokens: int = 0
    num_on: int = 0
    read_ms: float = 0.0
    stops: bool = False
    num_read: int = 0
    num_checked: int = 0
    closes: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """The turns of a text. Its prompt takes `prefill_ms` of the server; with `opens_ahead` while the device drafts."""

    turns: tuple[Turn, ...]
    prompt_len: int = 0
    prefill_ms: float = 0.0
    opens_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """What so many devices get. Waits are those for verdicts, and in streams for tokens; `busy` is a share of time."""

    speeds: tuple[float, ...]  # tokens a second of each device
    wait_ms: float | None  # 95th percentile
    busy: float
    num_rows: int
    num_forwards: int

    @property
    def tokens_per_s(self) -> float:
        """Of a device, on average."""
        return statistics.mean(self.speeds)


@dataclass(slots=True, eq=False)
class _Job:
    """A call at the server. `said` has the time at which the device gets each answer; it waits for `num_wanted`."""

    num_rows: int = 0
    num_read: int = 0
    num_needed: int = 0
    num_on: float = 0
    prefill_ms: float = 0.0
    num_fed: int = 0
    num_wanted: float = 1
    said: list[float] = field(default_factory=list)
    ended: float | None = None
    is_stopped: bool = False
    waiting: Device | None = None


Device: TypeAlias = Iterator[float | _Job]  # the time until which it works, or the call whose answer it waits for


class Simulation:
    """Devices that replay `texts` at a server, each from another text on: `apart` after that of the device before.

    Times are milliseconds.
    """

    def __init__(self, texts: Seq[Text], costs: CostModel, num_devices: int, apart: int = 1) -> None:
        self._texts, self._costs, self._apart = texts, costs, apart
        self._now = self._busy_ms = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._jobs: list[_Job] = []  # at the server, in the order of their turns
        self._is_stepping = False
        self._is_stream = all(turn.num_rows <= 1 for text in texts for turn in text.turns)
        self._num_rows = self._num_forwards = 0
        self._waits: list[float] = []
        self._written = [[0, 0, 0.0] for _ in range(num_devices)]  # texts, tokens, and when the last text ended

    def run(self, num_texts: int | None = None) -> Load:
        """Until every device has written so many texts, or each text once."""
        num_texts = num_texts or len(self._texts)
        for number in range(len(self._written)):
            self._resume(self._device(number))
        while min(texts for texts, *_ in self._written) < num_texts:
            self._now, _, happens = heapq.heappop(self._events)
            happens()
        speeds = tuple(1e3 * tokens / max(ms, 1e-9) for _, tokens, ms in self._written)
        return Load(speeds, percentile(self._waits, 95), self._busy_ms / self._now, self._num_rows, self._num_forwards)

    def _at(self, ms: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (ms, next(self._order), happens))

    def _resume(self, device: Device) -> None:
        asked = next(device)
        if isinstance(asked, _Job):
            asked.waiting = device
            self._tell(asked)
        else:
            self._at(asked, partial(self._resume, device))

    def _tell(self, job: _Job) -> None:
        """Let the device go on once it has the answers that it waits for, or the last one."""
        has_all = len(job.said) >= job.num_wanted
        if job.waiting is not None and (has_all or job.ended is not None):
            ms = job.said[int(job.num_wanted) - 1] if has_all else job.ended or 0.0
            device, job.waiting = job.waiting, None
            self._at(max(ms, self._now), partial(self._resume, device))

    def _device(self, number: int) -> Device:
        for at in itertools.count(number * self._apart):
            text, num_tokens, late_ms = self._texts[at % len(self._texts)], 0, 0.0
            prefill_ms, opening = text.prefill_ms, None
            if text.opens_ahead and prefill_ms:
                opening, prefill_ms = self._ask(_Job(prefill_ms=prefill_ms)), 0.0
            for turn in text.turns:
                yield self._now + max(turn.edge_ms + late_ms, 0.0)
                num_tokens += turn.num_skipped
                asked = self._now
                if opening is not None:
                    yield opening
                if turn.num_rows:
                    num_on = math.inf if turn.stops or turn.closes else turn.num_checked + turn.num_on
                    job = self._ask(_Job(turn.num_rows, turn.num_read, turn.num_needed, num_on, prefill_ms))
                    num_crossed = yield from self._follow(job, turn, asked)
                    num_tokens += turn.num_tokens + turn.num_on + num_crossed
                    late_ms = (num_crossed - 1) * turn.read_ms if turn.stops else 0.0  # a block begins with reading one
                    prefill_ms, opening = 0.0, None
            done = self._written[number]
            done[:] = done[0] + 1, done[1] + num_tokens, self._now

    def _follow(self, job: _Job, turn: Turn, asked: float) -> Generator[float | _Job, None, int]:
        """Wait for the verdict and for what the target writes; returns how many tokens crossed the stop."""
        job.num_wanted = 1 + turn.num_checked
        yield job
        self._waits.append(self._now - asked)
        for _ in range(turn.num_on):
            yield self._now + turn.read_ms
            asked, job.num_wanted = self._now, job.num_wanted + 1
            yield job
            if self._is_stream:
                self._waits.append(self._now - asked)
        if turn.stops:
            yield self._now + turn.read_ms
        if turn.stops or turn.closes:
            self._at(self._now + self._costs.wire_ms / 2, partial(setattr, job, "is_stopped", True))
        if not turn.stops:
            return 0
        if turn.closes:  # what has come until now is kept
            return sum(at <= self._now for at in job.said) - int(job.num_wanted)
        num_read, job.num_wanted = int(job.num_wanted), math.inf
        yield job
        return len(job.said) - num_read

    def _ask(self, job: _Job) -> _Job:
        self._at(self._now + self._costs.wire_ms / 2, partial(self._arrive, job))
        return job

    def _arrive(self, job: _Job) -> None:
        self._jobs.append(job)
        self._step()

    def _step(self) -> None:
        """Begin a step, if the server is idle and a job waits."""
        if self._is_stepping or not self._jobs:
            return
        ms, room, num_read, batch = 0.0, self._costs.max_rows, 0, list[tuple[_Job, int]]()
        prompt = next((job for job in self._jobs if job.prefill_ms), None)
        if prompt is not None:
            ms, prompt.prefill_ms = prompt.prefill_ms, 0.0
            if not prompt.num_rows:
                self._end(prompt, self._now + ms)
        for job in self._jobs:
            if not job.prefill_ms and (num_rows := min(room, job.num_rows - job.num_fed)):
                batch.append((job, num_rows))
                room -= num_rows
                num_read += max(min(job.num_read - job.num_fed, num_rows), 0)
        if batch:
            ms += self._costs.pass_ms(self._costs.max_rows - room, num_read)
            self._num_forwards += 1
            self._num_rows += self._costs.max_rows - room
        self._is_stepping = True
        self._at(self._now + ms, partial(self._commit, batch, ms))

    def _commit(self, batch: Iterable[tuple[_Job, int]], ms: float) -> None:
        """End a step: answer the jobs that are decided, let those that write wait for another turn, and go on."""
        self._is_stepping = False
        self._busy_ms += ms
        for job, num_rows in batch:
            job.num_fed += num_rows
            if job.num_fed < job.num_needed:
                continue
            job.said.append(self._now + self._costs.wire_ms / 2)
            if job.num_on:
                job.num_rows, job.num_needed, job.num_on = 1, 1, job.num_on - 1
                job.num_read = job.num_fed = 0
                self._jobs.remove(job)
                self._jobs.append(job)
                self._tell(job)
            else:
                self._end(job, self._now)
        for job in [job for job in self._jobs if job.is_stopped]:
            self._end(job, self._now)
        self._step()

    def _end(self, job: _Job, ms: float) -> None:
        """Send the last answer."""
        self._jobs.remove(job)
        job.ended = ms + self._costs.wire_ms / 2
        self._tell(job)


def most_devices(load: Callable[[int], Load], most: int) -> int:
    """How many devices, of at most `most`, get at least half the speed that one alone gets."""
    half = load(1).tokens_per_s / 2
    low, high = 1, 2
    while high <= most and load(high).tokens_per_s >= half:
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if load(middle).tokens_per_s >= half else (low, middle)
    return low
