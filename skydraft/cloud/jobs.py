"""A request on its way through the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from skydraft.cloud.sessions import CloudSession
from skydraft.decoding.verification import Verification
from skydraft.engines.vocab import TokenIds
from skydraft.errors import SkydraftError
from skydraft.protocol.values import Emission, Opened, SessionCall, VerifyCall
from skydraft.types import DraftBlock, Verdict, VerifyCost

# What an Open gets, a verdict, tokens of a stream, or why there is none.
Answer: TypeAlias = Opened | Verdict | Emission | SkydraftError
Deliver: TypeAlias = Callable[[Answer], None]
_TURN_ROWS = 16  # after so many rows a job queues up again: long catch-ups must not hold up everybody else


class Job:
    """An Open: it has a seat when the prompt is in the KV cache, and is answered with the committed length.

    `deliver` is called once with the last answer; who asks the same while it is under way gets that answer too.
    `turn` is when it began to wait for its turn; jobs are served in this order. Times are in seconds.
    """

    streams = False

    def __init__(self, call: SessionCall | VerifyCall, owner: str, deliver: Deliver, arrived: float) -> None:
        self.call = call
        self.owner = owner
        self.arrived = self.turn = arrived
        self.session: CloudSession | None = None
        self.work: Verification | None = None
        self._delivers = [deliver]
        self._is_answered = False
        self._num_passes = self._num_rows = 0
        self._forward_s = self._prefill_s = 0.0
        self._encode_ms = 0.0

    @property
    def is_answered(self) -> bool:
        """Whether the last answer was given."""
        return self._is_answered

    def asks_the_same(self, other: Job) -> bool:
        """Whether one answer serves both."""
        return type(self) is type(other) and not self.streams and (self.owner, self.call) == (other.owner, other.call)

    def join(self, other: Job) -> None:
        """Let the caller of `other`, which asks the same, have this answer."""
        self._delivers += other._delivers

    def answer(self, answer: Answer) -> None:
        """Give the last answer."""
        assert not self._is_answered
        self._is_answered = True
        for deliver in self._delivers:
            deliver(answer)

    def begin(self, session: CloudSession) -> Answer | None:
        """Take up the session, which is this job's alone until it is answered. An answer that is known is returned."""
        self.session = session
        return None

    def prefilled(self, seconds: float, encode_ms: float) -> None:
        """Note time spent on the prompt, and the part of it that its audio took."""
        self._prefill_s += seconds
        self._encode_ms += encode_ms

    def ready(self) -> Answer | None:
        """The prompt is in the cache: begin the work, or return the answer where there is nothing else to do."""
        assert self.session is not None
        return Opened(len(self.session.target.token_ids), self._prefill_s * 1e3, self._encode_ms)

    def absorb(self, feed: TokenIds, rows: object, seconds: float, now: float) -> None:
        """Take the logits of a feed that was part of a forward of `seconds`."""
        assert self.work is not None
        if self._num_rows // _TURN_ROWS < (self._num_rows + len(feed)) // _TURN_ROWS:
            self.turn = now
        self._num_passes += 1
        self._num_rows += len(feed)
        self._forward_s += seconds
        self.work.absorb(rows)

    def commit(self, now: float) -> Answer | None:
        """The work is done: make it final and return the last answer, or None if the job goes on."""
        raise NotImplementedError("an Open is answered when it is ready")

    def _verdict(self, now: float) -> Verdict:
        assert self.work is not None and self.session is not None
        forward_s = self._forward_s + self._prefill_s
        cost = VerifyCost(
            self._num_passes,
            self._num_rows,
            forward_s * 1e3,
            self._prefill_s * 1e3,
            queue_ms=max(now - self.arrived - forward_s, 0.0) * 1e3,
            encode_ms=self._encode_ms,
        )
        verdict = self.work.verdict(cost)
        self.session.target.commit(self.work, verdict)
        self.work = None
        return verdict


class VerifyJob(Job):
    """A block to judge; answered with its verdict, from memory if the same was judged before."""

    call: VerifyCall

    def begin(self, session: CloudSession) -> Answer | None:
        if (known := session.recall(self.call)) is not None:
            return known
        session.check(self.call)
        self.session = session
        return None

    def ready(self) -> Answer | None:
        assert self.session is not None
        self.work = self.session.target.begin(self.call.block, self.call.catch_up_ids)
        return None

    def commit(self, now: float) -> Answer | None:
        assert self.session is not None
        verdict = self._verdict(now)
        self.session.remember(self.call, verdict)
        return verdict


class GenerateJob(Job):
    """The target alone: tokens are delivered one by one, the last one as the answer.

    Each token is a verification of nothing, which takes its turn anew, so a stream waits like everybody else.
    """

    streams = True

    def begin(self, session: CloudSession) -> Answer | None:
        session.target.check(DraftBlock(len(session.target.token_ids), ()), ())
        return super().begin(session)

    def ready(self) -> Answer | None:
        assert self.session is not None
        self.work = self.session.target.begin(DraftBlock(len(self.session.target.token_ids), ()), ())
        return None

    def commit(self, now: float) -> Answer | None:
        verdict = self._verdict(now)
        assert verdict.token_id is not None  # nothing was drafted, so the target's own token is all there is
        emission = Emission(verdict.base, (verdict.token_id,), verdict.finish, verdict.cost)
        if verdict.finish:
            return emission
        self._delivers[0](emission)
        self.arrived = self.turn = now
        self._num_passes = self._num_rows = 0
        self._forward_s = self._prefill_s = self._encode_ms = 0.0
        self.ready()
        return None
