"""The seam behind the front: what judges blocks, as the service, the docket and the sessions see it.

There are two judges: the worker, over an engine of ours in this process, and vLLM's. What both need once (jobs, their
order, sessions, epochs, digests, repeated rounds, limits, metrics) is the docket's and the sessions'.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from skydraft.config import Execution
from skydraft.decoding.verification import Judged
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.protocol.codec import target_id
from skydraft.protocol.values import Opening, TargetId
from skydraft.types import Cost, DraftBlock, FinishReason, Reuse, Verdict

if TYPE_CHECKING:
    from skydraft.cloud.jobs import Answer, Job


@dataclass(frozen=True, slots=True)
class Served:
    """What a judge runs, and how. `weights` is their fingerprint, `forward_ms` as in ServerInfo.

    `engine` and `dtype` are "" for an engine of ours, which the model's name tells.
    """

    name: str
    weights: str
    vocab: Vocab
    context_len: int
    execution: Execution
    max_rows: int
    invariant_rows: int
    forward_ms: tuple[float, ...]
    takes_audio: bool = False
    engine: str = ""
    dtype: str = ""

    @property
    def target_id(self) -> TargetId:
        """What decides the choices made here."""
        return target_id(self.weights, self.execution, self.context_len)


class Observer(Protocol):
    """What a judge tells about itself, for metrics."""

    def queued(self, num_jobs: int, num_sessions: int) -> None:
        """How many jobs and seated sessions there are now."""

    def forward(self, num_jobs: int, num_rows: int, seconds: float) -> None:
        """A forward was run."""

    def answered(self, job: Job, answer: Answer) -> None:
        """A job got its last answer. One that was not `active` got it from memory."""

    def refused(self, job: Job) -> None:
        """A job found the queue full."""

    def closed(self, num_evicted: int, num_expired: int) -> None:
        """How many sessions had to go so far."""


class Judge(Protocol):
    """Answers jobs: openings, blocks to judge, texts to stream. All but `run` return at once, from any thread.

    `on_health` is called, from the judge's thread, when it can judge nothing for a while, and when it can again.
    """

    observer: Observer | None
    on_health: Callable[[bool], None]
    num_sessions: int

    @property
    def served(self) -> Served:
        """What it runs."""

    def submit(self, job: Job) -> None:
        """Take a job; it will be answered."""

    def cancel(self, job: Job) -> None:
        """Nobody reads the answers of a stream any more. Other jobs are finished, since they may be asked for again."""

    def close_session(self, number: int, owner: str) -> None:
        """End a session: at once, or when what was asked of it is answered."""

    def stop(self) -> None:
        """Answer what is waiting or under way with CloudDraining, and let `run` return."""

    def run(self) -> None:
        """Work until stopped, in a thread of its own. Whatever ends it, everybody who waits is answered."""

    def close(self) -> None:
        """Let go of the model, when `run` is over or never began. A second time changes nothing."""


class SessionTarget(Protocol):
    """The target's side of one session, wherever its rows are computed."""

    @property
    def base(self) -> int:
        """How many generated tokens are committed."""

    @property
    def token_ids(self) -> TokenIds:
        """Read-only view of prompt and committed tokens."""

    @property
    def finish(self) -> FinishReason | None:
        """Why the generation ended, or None."""

    @property
    def is_seated(self) -> bool:
        """Whether it holds KV memory."""

    @property
    def needs_prefill(self) -> bool:
        """Whether a part of the prompt is not in the KV cache yet."""

    @property
    def guess(self) -> tuple[int, ...]:
        """What may come next; nothing where looking further takes as long as it saves."""

    def take_prefill_cost(self) -> Cost:
        """What the prompt has cost since this was last asked."""

    def check(self, block: DraftBlock, catch_up: Seq[int]) -> None:
        """Raise BaseMismatch or LimitExceeded unless the block extends what is committed."""

    def begin(self, block: DraftBlock, catch_up: Seq[int]) -> Judged:
        """What is to be judged. Changes nothing that is committed."""

    def commit(self, done: Judged, cost: Cost) -> Verdict:
        """The verdict, made final."""

    def close(self, *, failed: bool = False) -> None:
        """Free the KV memory."""


class Seats(Protocol):
    """Who gives sessions their KV memory: what `Sessions` needs of a judge."""

    served: Served

    def target(self, opening: Opening) -> SessionTarget:
        """The target's side of a new session, without a seat. Raises UsageError for what cannot be judged here."""

    def seat(self, target: SessionTarget, opening: Opening, reuse: Reuse | None) -> None:
        """Give it a seat of its own. Raises PromptError."""

    def hand_over(self, before: SessionTarget, target: SessionTarget) -> None:
        """Give it the seat of an earlier epoch of the same session."""

    def forget_kept(self, older_than_s: float) -> None:
        """Release what was kept for reuse for so long."""
