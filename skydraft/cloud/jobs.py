"""A request on its way through a judge: an OpenJob, a VerifyJob or a GenerateJob."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal, TypeAlias

from skydraft.cloud.sessions import CloudSession
from skydraft.decoding.verification import Judged, SequenceVerification
from skydraft.errors import CloudFailure, SkydraftError
from skydraft.protocol.values import Emission, Opened, SessionCall, VerifyCall
from skydraft.types import Cost, DraftBlock, Verdict

# What an Open gets, a verdict, tokens of a stream, or why there is none.
Answer: TypeAlias = Opened | Verdict | Emission | SkydraftError
Deliver: TypeAlias = Callable[[Answer], None]
_TURN_ROWS = 16  # after so many rows a job queues up again: long catch-ups must not hold up everybody else


class Job(ABC):
    """What has a call, an owner and, from `begin` on, a session, which is its alone until it is answered.

    `deliver` is called once with the last answer; who asks the same while it is under way gets that answer too.
    `turn` is from when on it waits for its turn; jobs are served in this order. Times are in seconds.
    """

    kind: ClassVar[Literal["open", "verify", "generate"]]
    streams: ClassVar[bool] = False

    def __init__(self, call: SessionCall | VerifyCall, owner: str, deliver: Deliver, arrived: float) -> None:
        self.call = call
        self.owner = owner
        self.arrived = self.turn = arrived
        self._session: CloudSession | None = None
        self._work: Judged | None = None
        self._delivers = [deliver]
        self._is_answered = False
        self._cost = Cost()

    @property
    def key(self) -> tuple[int, str]:
        """Number and owner of the session it is about."""
        return self.call.session, self.owner

    @property
    def is_answered(self) -> bool:
        """Whether the last answer was given."""
        return self._is_answered

    @property
    def has_session(self) -> bool:
        """Whether it has begun."""
        return self._session is not None

    @property
    def session(self) -> CloudSession:
        """The session of a job that has begun. Raises CloudFailure for another."""
        if self._session is None:
            raise CloudFailure("This request has no session yet.")
        return self._session

    @property
    def work(self) -> Judged | None:
        """What is being judged, once the prompt is in the cache."""
        return self._work

    @property
    def feeding(self) -> SequenceVerification | None:
        """The same, where its rows are those of an engine in this process."""
        return self._work if isinstance(self._work, SequenceVerification) else None

    def asks_the_same(self, other: Job) -> bool:
        """Whether one answer serves both."""
        return self.kind == other.kind and not self.streams and (self.owner, self.call) == (other.owner, other.call)

    def join(self, other: Job) -> None:
        """Let the caller of `other`, which asks the same, have this answer."""
        self._delivers += other._delivers

    def answer(self, answer: Answer) -> None:
        """Give the last answer. Raises CloudFailure, and tells nobody, when it was given already."""
        if self._is_answered:
            raise CloudFailure("This request was answered before.")
        self._is_answered = True
        for deliver in self._delivers:
            deliver(answer)

    def begin(self, session: CloudSession) -> Answer | None:
        """Take up the session. An answer that is known is returned."""
        self._session = session
        self._cost += session.target.take_prefill_cost()  # of what need not be fed, above all
        return None

    def spend(self, cost: Cost) -> None:
        """Note what its prompt has cost."""
        self._cost += cost

    @abstractmethod
    def ready(self) -> Answer | None:
        """The prompt is in the cache: begin the work, or return the answer where there is nothing else to do."""

    def account(self, num_rows: int, seconds: float, now: float) -> None:
        """Note the cost of rows that were part of a forward of `seconds`."""
        num_before = self._cost.num_rows
        self._cost += Cost(1, num_rows, forward_ms=seconds * 1e3)
        if num_before // _TURN_ROWS < self._cost.num_rows // _TURN_ROWS:
            self.turn = now

    def commit(self, now: float) -> Answer | None:
        """The work is done: make it final and return the last answer, or None if the job goes on."""
        raise CloudFailure("There is nothing to commit in an Open, which is answered when it is ready.")

    def _verdict(self, now: float) -> Verdict:
        if self._work is None:
            raise CloudFailure("This request has judged nothing.")
        queue_ms = max((now - self.arrived) * 1e3 - self._cost.forward_ms, 0.0)
        verdict = self.session.target.commit(self._work, replace(self._cost, queue_ms=queue_ms))
        self._work = None
        return verdict


class OpenJob(Job):
    """An opening: answered with the committed length when the prompt is in the KV cache."""

    kind = "open"

    def ready(self) -> Answer | None:
        return Opened(self.session.target.base, self._cost)


class VerifyJob(Job):
    """A block to judge; answered with its verdict, from memory if the same was judged before."""

    kind = "verify"
    call: VerifyCall

    def begin(self, session: CloudSession) -> Answer | None:
        if (known := session.recall(self.call)) is not None:
            return known
        session.check(self.call)
        return super().begin(session)

    def ready(self) -> Answer | None:
        self._work = self.session.target.begin(self.call.block, self.call.catch_up_ids)
        return None

    def commit(self, now: float) -> Answer | None:
        verdict = self._verdict(now)
        self.session.remember(self.call, verdict)
        return verdict


class GenerateJob(Job):
    """The target alone: tokens are delivered as they come, the last ones as the answer.

    Each token is a verification of what the target guesses, of nothing where it does not, which takes its turn anew,
    so a stream waits like everybody else. `charge` is told the rows of each and returns how many seconds the next one
    has to wait: a stream beyond its owner's share goes on slowly, since it would cost more to begin again.
    """

    kind = "generate"
    streams = True

    def __init__(
        self,
        call: SessionCall,
        owner: str,
        deliver: Deliver,
        arrived: float,
        charge: Callable[[int], float] = lambda num_rows: 0.0,
    ) -> None:
        super().__init__(call, owner, deliver, arrived)
        self._charge = charge

    def begin(self, session: CloudSession) -> Answer | None:
        session.target.check(DraftBlock(session.target.base, ()), ())
        return super().begin(session)

    def ready(self) -> Answer | None:
        target = self.session.target
        self._work = target.begin(DraftBlock(target.base, target.guess), ())
        return None

    def commit(self, now: float) -> Answer | None:
        block = self._work.block if self._work else DraftBlock(0, ())
        verdict = self._verdict(now)
        emission = Emission(verdict.base, verdict.commits(block), verdict.finish, verdict.cost)
        if verdict.finish:
            return emission
        self._delivers[0](emission)
        self.arrived = self.turn = now + self._charge(len(block.token_ids) + 1)
        self._cost = Cost()
        return self.ready()
