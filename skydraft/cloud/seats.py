"""The parts of a judge that a session needs: a seat, which is KV memory, and the target's side of its text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from skydraft.config import Execution
from skydraft.decoding.verification import Judged
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.protocol.codec import target_id
from skydraft.protocol.values import Opening, TargetId
from skydraft.types import Cost, DraftBlock, FinishReason, Reuse, Verdict


@dataclass(frozen=True, slots=True)
class Served:
    """The model of a judge, and its settings. `weights` is a fingerprint; `forward_ms` is as in ServerInfo.

    `engine` and `dtype` are "" for our own engines, since the model's name implies them.
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
        """The identity of the target: everything that its choices depend on."""
        return target_id(self.weights, self.execution, self.context_len)


class SessionTarget(Protocol):
    """The target's side of one session, wherever its rows are computed."""

    @property
    def base(self) -> int:
        """Number of committed generated tokens."""

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
        """Whether some of the prompt is not in the KV cache yet."""

    @property
    def guess(self) -> tuple[int, ...]:
        """Tokens that may come next; none if judging them would take as long as it saves."""

    def take_prefill_cost(self) -> Cost:
        """Cost of the prompt since the last call of this method."""

    def check(self, block: DraftBlock, catch_up: Seq[int]) -> None:
        """Raise BaseMismatch or LimitExceeded unless the block extends the committed tokens."""

    def begin(self, block: DraftBlock, catch_up: Seq[int]) -> Judged:
        """The work of judging a block. Committed tokens do not change."""

    def commit(self, done: Judged, cost: Cost) -> Verdict:
        """Commit the judged block and return its verdict."""

    def close(self, *, failed: bool = False) -> None:
        """Free the KV memory."""


class Seats(Protocol):
    """Gives sessions their KV memory."""

    served: Served

    def target(self, opening: Opening) -> SessionTarget:
        """The target's side of a new session, without a seat. Raises UsageError for openings that it cannot judge."""

    def seat(self, target: SessionTarget, opening: Opening, reuse: Reuse | None) -> None:
        """Give `target` a new seat. Raises PromptError."""

    def hand_over(self, before: SessionTarget, target: SessionTarget) -> None:
        """Move the seat of an earlier epoch of the same session to `target`."""

    def forget_kept(self, older_than_s: float) -> None:
        """Release sequences that were kept for reuse for longer than this."""
