"""The docket: all jobs from arrival to last answer, their order, and their sessions.

Only the worker's thread uses it: it calls `expire`, `admit` and `commit` around its own work.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from skydraft.access.limits import Limits, RowBudget
from skydraft.access.shares import WorkShares
from skydraft.cloud import log
from skydraft.cloud.sessions import CloudSession, Key, ServedModel, Sessions
from skydraft.decoding.race.branch import num_fed
from skydraft.decoding.verification import TargetSession, Verification
from skydraft.engines.vocab import TokenIds
from skydraft.errors import CloudDraining, CloudFailure, EngineError, GrammarRefused, SessionNotFound, SkydraftError
from skydraft.protocol.values import OpenCall, Opened, Stopped, VerifyCall
from skydraft.types import Cost, Draft, DraftBlock, Verdict

TICK_S = 0.5  # how often idle sessions are checked
_LOOK_AGAIN_S = 0.01  # how often jobs without KV memory try again while no other job needs work
_TURN_ROWS = 16  # a job queues again after this many rows, so that a long catch-up does not delay others
Answer: TypeAlias = Opened | Verdict | Stopped | SkydraftError
Deliver: TypeAlias = Callable[[Answer, bool], None]  # gets an answer, and whether it is the last one


@dataclass(slots=True)
class Totals:
    """A server's counters since its start. The worker's thread counts; any thread may read."""

    num_blocks: int = 0  # judged
    num_drafts: int = 0  # tokens
    num_accepted: int = 0
    num_tokens: int = 0
    num_forwards: int = 0
    num_rows: int = 0
    forward_s: float = 0.0

    def forward(self, num_rows: int, seconds: float) -> None:
        self.num_forwards += 1
        self.num_rows += num_rows
        self.forward_s += seconds

    def judged(self, verdict: Verdict, num_drafts: int, *, is_block: bool) -> None:
        """Count a verdict. `is_block` is False for tokens that the target writes after a request's verdict."""
        self.num_blocks += is_block
        self.num_drafts += num_drafts
        self.num_accepted += verdict.num_accepted
        self.num_tokens += verdict.num_tokens


class Job:
    """A call, its owner and, from `begin` on, its session. No other job uses the session until the last answer.

    `deliver` gets each answer. The job may run from the second `due` on; a writing job queues again for each token. A
    text beyond its owner's `budget` is slowed, not ended, since opening it again would cost more. `drafts` arrive while
    the target writes; any thread may add some. They only use rows that the owner has to spare, so that drafts never
    slow a text.
    """

    def __init__(
        self, call: OpenCall | VerifyCall, owner: str, deliver: Deliver, arrived: float,
        drafts: deque[Draft], budget: RowBudget,
    ) -> None:  # fmt: skip
        self.call, self.owner = call, owner
        self.key = call.session, owner
        self.due = self._arrived = arrived
        self.num_to_write = call.write if isinstance(call, VerifyCall) else 0
        self.is_answered = False
        self.has_verdict = False  # the verdict was sent; the target writes now
        self.session: CloudSession | None = None
        self.work: Verification | None = None  # the block to judge, once the prompt is in the cache
        self.cost = Cost()  # of the next answer, so far
        self.delivers, self._drafts, self._budget = [deliver], drafts, budget

    @property
    def target(self) -> TargetSession:
        assert self.session is not None  # the docket has admitted this job
        return self.session.target

    def answer(self, answer: Answer, *, is_last: bool = True) -> None:
        assert not self.is_answered
        self.is_answered = is_last
        for deliver in self.delivers:
            deliver(answer, is_last)

    def begin(self, session: CloudSession) -> Answer | None:
        """Take a session. Returns the last answer if it is known: a stored verdict, or the last token after it."""
        self.session = session
        if isinstance(self.call, VerifyCall):
            if (known := session.recall(self.call)) is not None:
                if not self._writes_after(known, self.call.block):
                    return known
                return self._say(session.written_after(self.call.base + known.num_tokens))
            session.check(self.call)
        self.cost += session.target.take_prefill_cost()  # mostly the count of cached tokens
        return None

    def _writes_after(self, verdict: Verdict, block: DraftBlock) -> bool:
        """Send the verdict if the target continues after it; returns whether it does."""
        self.num_to_write *= verdict.hands_over(block)
        self.has_verdict = self.num_to_write > 0
        if self.has_verdict:
            self.answer(verdict, is_last=False)
        return self.has_verdict

    def _say(self, verdicts: Iterable[Verdict]) -> Verdict | None:
        """Deliver tokens that the target wrote after the verdict; returns the last answer."""
        for verdict in verdicts:
            self.num_to_write = max(self.num_to_write - verdict.num_tokens, 0)
            if verdict.finish is not None or not self.num_to_write:
                return verdict
            self.answer(verdict, is_last=False)
        return None

    def ready(self) -> Answer | None:
        """Begin to judge, once the prompt is in the cache. Returns the answer to an opening, else None."""
        target = self.target
        if isinstance(self.call, OpenCall):
            return Opened(target.base, self.cost)
        if self.has_verdict:
            self.work = target.begin(DraftBlock(target.base, ()), ())
        else:
            self.work = target.begin(self.call.block, self.call.catch_up_ids)
        return None

    def drafts(self) -> tuple[int, ...]:
        """Return the drafts that a forward may judge together with the target's next token."""
        assert self.session is not None
        branch, text = self.session.branch, self.target.generated
        while self._drafts:
            branch.take(self._drafts.popleft(), text)
        waiting = branch.after(text)
        may_draft = self.has_verdict and waiting and self._budget.has_spare(self.owner)
        return waiting[: self.num_to_write - 1] if may_draft else ()

    def with_drafts(self, token_ids: tuple[int, ...]) -> tuple["Job", Verification, TokenIds]:
        """Return the feed for the target's next token, with drafts after it."""
        self.work = work = self.target.begin(DraftBlock(self.target.base, token_ids), ())
        feed = work.next_feed(len(token_ids) + 1)
        assert feed is not None  # nothing is judged yet
        return self, work, feed

    def account(self, num_rows: int, seconds: float, now: float) -> None:
        before, self.cost = self.cost, self.cost + Cost(1, num_rows, forward_ms=seconds * 1e3)
        if before.num_rows // _TURN_ROWS < self.cost.num_rows // _TURN_ROWS:
            self.due = now

    def commit(self, now: float, totals: Totals) -> Answer | None:
        """Commit the judged block, and count it. Returns the last answer, or None if the target continues to write."""
        assert self.work and self.session and isinstance(self.call, VerifyCall)  # it was in the batch
        done, self.work = self.work, None
        queue_ms = max((now - self._arrived) * 1e3 - self.cost.forward_ms, 0.0)
        verdict = self.target.commit(done, replace(self.cost, queue_ms=queue_ms))
        totals.judged(verdict, len(done.block.token_ids), is_block=not self.has_verdict)
        if verdict.finish:
            self.target.close()  # a finished text needs no KV memory
        if self.has_verdict:
            drafts = done.block.token_ids
            pause_s = self._budget.charge(self.owner, len(drafts) + 1)
            verdict = replace(verdict, draft_ids=drafts, branch=self.session.branch.number if drafts else 0)
            return self._say([verdict]) or self._go_on(now + pause_s)
        self.session.last = (self.call, verdict)
        # The request was charged for the verdict's rows.
        return self._go_on(now) if self._writes_after(verdict, done.block) else verdict

    def _go_on(self, due: float) -> Answer | None:
        self._arrived = self.due = due
        self.cost = Cost()
        return self.ready()


Batch: TypeAlias = list[tuple[Job, Verification, TokenIds]]


class Docket:
    """The open jobs of a server. Each job gets exactly one last answer; a session serves one job at a time.

    Owners get equal shares: the owner with the fewest rows goes first, with its oldest job. The service limits the
    number of waiting jobs.
    """

    def __init__(self, served: ServedModel, limits: Limits, clock: Callable[[], float]) -> None:
        self.sessions = Sessions(served, limits, clock)
        self.totals = Totals()
        self.is_stopping = False
        self.num_sessions = 0  # with KV memory, as of the last `admit`; other threads may read it
        self._clock, self._next_tick = clock, 0.0
        self._waiting: list[Job] = []
        self._active: list[Job] = []
        self.work_done = WorkShares()  # rows, by owner

    @property
    def jobs(self) -> tuple[Job, ...]:
        return (*self._active, *self._waiting)

    @property
    def busy(self) -> frozenset[Key]:
        return frozenset(job.key for job in self._active)

    def take(self, job: Job) -> None:
        """Add a job. A repeated job shares the first one's answer; a newer job for the same session ends the older."""
        with self.failing(job):
            if self.is_stopping:
                raise CloudDraining("The server is shutting down.")
            self.sessions.check(job.call)  # once here, since `admit` may try a job many times
        if job.is_answered:
            return
        for other in self.jobs:
            writes = other.num_to_write > 0
            if (other.owner, other.call) == (job.owner, job.call) and not writes and not job.num_to_write:
                other.delivers += job.delivers  # one answer serves both; a writing job has a single reader
                return
            if other.key == job.key and (writes or job.call.epoch > other.call.epoch):  # nobody waits for it any more
                self.end(other, SessionNotFound(f"Session {job.call.session} has a newer request."))
        self.work_done.enter(job.owner, (other.owner for other in self.jobs))
        self._waiting.append(job)

    def stop_writing(self, job: Job) -> None:
        """Stop writing: the client wants no more tokens, or has left. The session stays. A pending verdict is computed,
        since the client may ask again."""
        job.num_to_write = 0
        if job.has_verdict and not job.is_answered:
            self.end(job, Stopped(job.target.base))

    def close(self, key: Key) -> None:
        """End a session and its open jobs."""
        for job in self.jobs:
            if job.key == key:
                self.end(job, SessionNotFound(f"Session {key[0]} was closed."))
        self.sessions.close(key)

    def expire(self) -> None:
        """Close sessions that were idle for too long, at most once per `TICK_S`."""
        if (now := self._clock()) >= self._next_tick:
            self._next_tick = now + TICK_S
            self.sessions.expire(self.busy)

    def admit(self) -> None:
        """Give waiting jobs their sessions, if these are idle and KV memory is free."""
        seatless: set[str] = set()  # owners that get no KV memory now; their further openings wait
        # Calls without an opening go first, so that their sessions are not evicted meanwhile.
        for job in sorted(self._waiting, key=lambda job: (job.call.opening is not None, *self._order(job))):
            is_blocked = job.key in self.busy if job.key in self.sessions else job.owner in seatless
            if not is_blocked and not self._try_to_seat(job):
                seatless.add(job.owner)
                self._make_way(job)
        self.num_sessions = len(self.sessions)

    def _try_to_seat(self, job: Job) -> bool:
        """Begin or end a job; returns False if no KV memory is free now."""
        with self.failing(job):
            if (session := self.sessions.admit(job.call, job.owner, self.busy)) is None:
                return False
            if (answer := job.begin(session)) is not None:
                self.end(job, answer)
            else:
                self._waiting.remove(job)
                self._active.append(job)
                self.make_ready(job)
        return True

    def _make_way(self, job: Job) -> None:
        """End a writing job of an owner with more sessions than the job's owner: it would keep its KV memory long. Its
        client opens the session again without losing tokens."""
        shares = self.sessions.shares
        for other in sorted(self._active, key=self._order, reverse=True):
            if other.has_verdict and other.owner != job.owner and shares.gives_way(other.owner, job.owner, 2):
                self.end(other, SessionNotFound("The session made way for another client."))
                self.sessions.close(other.key)
                return

    def make_ready(self, job: Job) -> None:
        with self.failing(job):
            if not job.target.needs_prefill and (answer := job.ready()) is not None:
                self.end(job, answer)

    def _order(self, job: Job) -> tuple[float, float]:
        return self.work_done.of(job.owner), job.due

    def next_prefill(self) -> Job | None:
        return min((job for job in self._active if job.work is None), key=self._order, default=None)

    def idle_s(self) -> float:
        """Return the seconds until a job needs work; infinite without jobs."""
        due = min((job.due for job in self._active), default=float("inf"))
        return max(min(due - self._clock(), _LOOK_AGAIN_S if self._waiting else float("inf")), 0.0)

    def batch(self, max_rows: int, ms: Callable[[int], float]) -> Batch:
        """Return the feeds of the next forward: at most `max_rows` in all, each job once, in order. Drafts get the
        left-over rows if they are worth their time, by `ms`."""
        feeds: Batch = []
        now, num_rows = self._clock(), 0
        for job in sorted((job for job in self._active if job.due <= now), key=self._order):
            left = max_rows - num_rows
            if left > 0 and job.work is not None and (feed := job.work.next_feed(left)) is not None:
                feeds.append((job, job.work, feed))
                num_rows += len(feed)
        drafts = [job.drafts() for job, *_ in feeds]
        if not any(drafts):
            return feeds
        branches = [job.session.branch for job, *_ in feeds if job.session]
        waiting = [(branch.worth.share, len(ids)) for branch, ids in zip(branches, drafts, strict=True)]
        may_delay = all(branch.has_begun for branch in branches)
        counts = num_fed(num_rows, waiting, max_rows, ms, may_delay=may_delay)
        return [
            job.with_drafts(ids[:count]) if count else feed
            for feed, job, ids, count in zip(feeds, (job for job, *_ in feeds), drafts, counts, strict=True)
        ]

    def commit(self, done: Iterable[Job]) -> None:
        for job in done:
            with self.failing(job):
                if (answer := job.commit(self._clock(), self.totals)) is not None:
                    self.end(job, answer)

    def end(self, job: Job, answer: Answer) -> None:
        for jobs in (self._waiting, self._active):
            if job in jobs:
                jobs.remove(job)
        if job.session:
            job.session.used_at = self._clock()
        job.answer(answer)

    @contextmanager
    def failing(self, job: Job) -> Iterator[None]:
        """End this job, and no other, if the block raises."""
        try:
            yield
        except Exception as error:
            self.fail(job, error)

    def fail(self, job: Job, error: Exception) -> None:
        """End a job with an error. Unless it is a refusal, close the session, whose state may be inconsistent."""
        if not isinstance(error, SkydraftError) or isinstance(error, EngineError):
            log.error("a job failed", exc_info=error)
            self.sessions.close(job.key, failed=True)
            error = CloudFailure("The server failed; its log says why.")
        elif isinstance(error, GrammarRefused):  # the grammar needs too much work at some token
            self.sessions.close(job.key, failed=True)
        self.end(job, error)

    def stop(self) -> None:
        self.is_stopping = True
        for job in self.jobs:
            self.end(job, CloudDraining("The server is shutting down."))
