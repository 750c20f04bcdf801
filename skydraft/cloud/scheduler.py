"""Who goes next. Each job is answered exactly once, and a session is at most once in a batch.

Owners get equal shares: whose jobs have had fewer rows goes first, and of one owner's jobs the oldest.
"""

from __future__ import annotations

from skydraft.cloud.jobs import Job
from skydraft.decoding.verification import SequenceVerification
from skydraft.engines.vocab import TokenIds
from skydraft.errors import CloudBusy, CloudFailure, SessionNotFound

Batch = list[tuple[Job, SequenceVerification, TokenIds]]
_LOOK_AGAIN_S = 0.01  # how often those that wait for a seat look for one while the rest is slowed down


class Scheduler:
    """Jobs that wait, and jobs that have a session. Knows neither models nor networks."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._waiting: list[Job] = []
        self._active: list[Job] = []
        self._served: dict[str, float] = {}  # rows that an owner has had, of those who are at work now or were lately

    def __len__(self) -> int:
        return len(self._waiting) + len(self._active)

    @property
    def waiting(self) -> tuple[Job, ...]:
        """Jobs without a session, in the order of their turns."""
        return tuple(sorted(self._waiting, key=self._order))

    @property
    def streams(self) -> tuple[Job, ...]:
        """Streams that have a session, whoever would go last first."""
        return tuple(sorted((job for job in self._active if job.streams), key=self._order, reverse=True))

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All that are not answered."""
        return (*self._active, *self._waiting)

    @property
    def active(self) -> tuple[Job, ...]:
        """Jobs that have a session, in the order in which they got it."""
        return tuple(self._active)

    @property
    def busy(self) -> frozenset[int]:
        """Numbers of the sessions that are being worked on."""
        return frozenset(job.call.session for job in self._active)

    def add(self, job: Job) -> None:
        """Queue a job; answer it with CloudBusy when the queue is full. One that repeats another shares its answer.

        A later epoch of a session ends what an earlier one was still asking for.
        """
        for other in self.jobs:
            if other.asks_the_same(job):
                other.join(job)
                return
            if _supersedes(job, other):
                self.drop(other)
                other.answer(SessionNotFound(f"Session {job.call.session} was opened again."))
        if len(self._waiting) >= self._max_queue:
            job.answer(CloudBusy(f"{self._max_queue} requests are waiting already.", hint="Try again later."))
        else:
            self._take_in(job.owner)
            self._waiting.append(job)

    def _take_in(self, owner: str) -> None:
        """Let an owner who was away begin where the others are: what was not used is not saved up."""
        at_work = {job.owner for job in self.jobs}
        least = min((self._served[other] for other in at_work), default=0.0)
        if owner not in at_work:
            self._served = {name: rows for name, rows in self._served.items() if name in at_work or rows > least}
            self._served[owner] = max(self._served.get(owner, 0.0), least) if at_work else 0.0

    def serve(self, job: Job, num_rows: int) -> None:
        """Note that rows were computed for a job."""
        self._served[job.owner] = self._served.get(job.owner, 0.0) + num_rows

    def _order(self, job: Job) -> tuple[float, float]:
        return self._served.get(job.owner, 0.0), job.turn

    def activate(self, job: Job) -> None:
        """Move a waiting job to those that are worked on. Raises CloudFailure while another has its session."""
        if job.call.session in self.busy:
            raise CloudFailure(f"Session {job.call.session} is being worked on.")
        self._waiting.remove(job)
        self._active.append(job)

    def next_prefill(self) -> Job | None:
        """The next job whose prompt is not in the KV cache yet."""
        return min((job for job in self._active if job.work is None), key=self._order, default=None)

    def idle_s(self, now: float) -> float:
        """For how many seconds there is surely nothing to do; infinite where there is no job at all."""
        if not self._active:
            return 0.0 if self._waiting else float("inf")
        idle_s = max(min(job.turn for job in self._active) - now, 0.0)
        return min(idle_s, _LOOK_AGAIN_S) if self._waiting else idle_s

    def batch(self, max_rows: int, now: float) -> Batch:
        """Feeds for the next forward: at most `max_rows` in all, each job once, in the order of their turns.

        Who has its turn after `now` is left out.
        """
        feeds: Batch = []
        for job in sorted((job for job in self._active if job.turn <= now), key=self._order):
            work = job.feeding
            if max_rows > 0 and work is not None and (feed := work.next_feed(max_rows)) is not None:
                feeds.append((job, work, feed))
                max_rows -= len(feed)
        return feeds

    def drop(self, job: Job) -> None:
        """Take a job out, wherever it is."""
        for jobs in (self._waiting, self._active):
            if job in jobs:
                jobs.remove(job)


def _supersedes(job: Job, other: Job) -> bool:
    return job.key == other.key and job.call.epoch > other.call.epoch
