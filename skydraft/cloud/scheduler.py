"""Who goes next. Each job is answered exactly once, a session is at most once in a batch, the oldest goes first."""

from __future__ import annotations

from skydraft.cloud.jobs import Job
from skydraft.engines.vocab import TokenIds
from skydraft.errors import CloudBusy, CloudFailure, SessionNotFound

_LOOK_AGAIN_S = 0.01  # how often those that wait for a seat look for one while the rest is slowed down


class Scheduler:
    """Jobs that wait, and jobs that have a session. Knows neither models nor networks."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._waiting: list[Job] = []
        self._active: list[Job] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._active)

    @property
    def waiting(self) -> tuple[Job, ...]:
        """Jobs without a session, oldest first."""
        return tuple(self._waiting)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All that are not answered."""
        return (*self._active, *self._waiting)

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
            self._waiting.append(job)

    def activate(self, job: Job) -> None:
        """Move a waiting job to those that are worked on. Raises CloudFailure while another has its session."""
        if job.call.session in self.busy:
            raise CloudFailure(f"Session {job.call.session} is being worked on.")
        self._waiting.remove(job)
        self._active.append(job)

    def next_prefill(self) -> Job | None:
        """The oldest job whose prompt is not in the KV cache yet."""
        return min((job for job in self._active if job.work is None), key=lambda job: job.turn, default=None)

    def idle_s(self, now: float) -> float:
        """For how many seconds there is surely nothing to do; infinite where there is no job at all."""
        if not self._active:
            return 0.0 if self._waiting else float("inf")
        idle_s = max(min(job.turn for job in self._active) - now, 0.0)
        return min(idle_s, _LOOK_AGAIN_S) if self._waiting else idle_s

    def batch(self, max_rows: int, now: float) -> list[tuple[Job, TokenIds]]:
        """Feeds for the next forward: at most `max_rows` in all, the oldest job first, each once.

        Who has its turn after `now` is left out.
        """
        feeds: list[tuple[Job, TokenIds]] = []
        for job in sorted((job for job in self._active if job.turn <= now), key=lambda job: job.turn):
            if max_rows > 0 and job.work is not None and (feed := job.work.next_feed(max_rows)) is not None:
                feeds.append((job, feed))
                max_rows -= len(feed)
        return feeds

    def drop(self, job: Job) -> None:
        """Take a job out, wherever it is."""
        for jobs in (self._waiting, self._active):
            if job in jobs:
                jobs.remove(job)


def _supersedes(job: Job, other: Job) -> bool:
    return job.key == other.key and job.call.epoch > other.call.epoch
