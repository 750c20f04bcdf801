"""The values that travel between the rooms, and the words for them.

draft model      the small model on the device (the edge); it drafts.
target model     the large model (the cloud); its choices are the truth.
round            one block drafted and judged.
block            the drafted tokens of a round.
escalate / skip  send the block to the target / commit it unverified.
accepted         drafted and equal to the target's choice.
recovered        the target's choice at the first difference.
bonus            the target's choice after a fully accepted block.
committed        the prompt and all that is final.
base             the committed length that a block extends.
catch-up         tokens committed by skips that the target has not seen.
audit            whether the target would have emitted each catch-up token.
fallback         commit a block unverified that should have been, because the cloud is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Origin = Literal["accepted", "recovered", "bonus", "skipped", "edge", "cloud", "edge-fallback"]

FinishReason = Literal["eos", "stop_string", "sentences", "length", "interrupted"]
EndedBy = Literal["k", "gate", "stop"]
Outcome = Literal["verified", "skipped", "fallback"]


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """The audio of one prompt as log-mel features [num_mels, num_frames], float32: real frames only, no padding.

    Equal when the features are. Keeps a read-only copy; raises ValueError for anything else, or for audio too short
    to make a token.
    """

    features: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.features.dtype != np.float32 or self.features.ndim != 2 or self.features.shape[0] == 0:
            raise ValueError(f"features are float32 [mels, frames], not {self.features.dtype} {self.features.shape}")
        if self.num_tokens < 1:
            raise ValueError(f"{self.num_frames} frames of audio are too few for a token")
        if not np.isfinite(self.features).all():
            raise ValueError("features must be finite")
        features = self.features.copy()
        features.flags.writeable = False
        object.__setattr__(self, "features", features)

    @property
    def num_frames(self) -> int:
        """Frames of 10 ms."""
        return len(self.features[0])

    @property
    def num_tokens(self) -> int:
        """How many tokens of the prompt it fills: a convolution of stride 2, then the mean of each two that remain."""
        halved = (self.num_frames - 1) // 2 + 1
        return (halved - 2) // 2 + 1

    def rounded(self) -> Media:
        """What is shared of it: features in half precision, half the bytes."""
        return Media(self.features.astype(np.float16).astype(np.float32))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Media) and np.array_equal(self.features, other.features)

    def __hash__(self) -> int:
        return hash((self.features.shape, self.features.tobytes()))


@dataclass(frozen=True, slots=True)
class Signals:
    """How sure the draft model was of one token; from its raw logits at temperature 1."""

    entropy: float  # nats
    margin: float  # p1 - p2, probability
    top_prob: float  # probability


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The drafted tokens of one round, extending `base` committed tokens.

    `signals` has one entry per token, or none at all where nobody asked for them.
    `draft_ms` is the time spent inside forwards of the draft model; `prefill_ms` the part of it for the prompt,
    `encode_ms` the part of that for its audio.
    """

    base: int
    token_ids: tuple[int, ...]
    signals: tuple[Signals, ...] = ()
    ended_by: EndedBy = "k"
    draft_ms: float = field(default=0.0, compare=False)
    prefill_ms: float = field(default=0.0, compare=False)
    encode_ms: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        if self.base < 1:
            raise ValueError(f"a block extends at least one committed token, not {self.base}")
        if self.signals and len(self.signals) != len(self.token_ids):
            raise ValueError(f"{len(self.signals)} signals for {len(self.token_ids)} tokens")


@dataclass(frozen=True, slots=True)
class VerifyCost:
    """What one verification took. Rows and passes are the target's; bytes are 0 in one process.

    `prefill_ms` is the part of `forward_ms` that opening the sequence took, `encode_ms` the part of that for its audio;
    rows of the prompt are not counted.
    """

    num_passes: int = 0
    num_rows: int = 0
    forward_ms: float = 0.0
    prefill_ms: float = 0.0
    queue_ms: float = 0.0
    rtt_ms: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    encode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target says about a block: the first `num_accepted` tokens stand, then comes `token_id`.

    `token_id` is the recovered token, or the bonus token when the whole block was accepted. It is None
    only when `finish` says that the generation ended inside the accepted tokens. `audit` has one entry
    per catch-up token: whether the target would have emitted it; `audit_ranks` has one per token where it would not:
    how many tokens its constrained logits put before that one. `cost` is no part of equality.
    """

    base: int
    num_accepted: int
    token_id: int | None
    finish: FinishReason | None = None
    audit: tuple[bool, ...] = ()
    audit_ranks: tuple[int, ...] = ()
    cost: VerifyCost = field(default=VerifyCost(), compare=False)

    def __post_init__(self) -> None:
        if self.num_accepted < 0 or self.base < 1:
            raise ValueError(f"no such verdict: base {self.base}, {self.num_accepted} accepted")
        if self.token_id is None and (self.finish is None or self.num_accepted == 0):
            raise ValueError("a verdict without a token must end inside its accepted tokens")
        if len(self.audit_ranks) != self.audit.count(False):
            raise ValueError(f"{len(self.audit_ranks)} ranks for {self.audit.count(False)} failed audits")

    @property
    def num_tokens(self) -> int:
        """How many tokens this verdict commits."""
        return self.num_accepted + (self.token_id is not None)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One round as it happened. Rates are computed from these later, never kept beside them.

    `num_committed` counts what the round added to the text; `reason` says why it was escalated, or should have been
    ("" if it was not to be); `num_audited` counts the catch-up tokens it took along, `num_agreed` those that the target
    would have written too; `draft_prefill_ms` and `draft_encode_ms` are those of the block; `wall_ms` runs from the
    start of the draft to the commit, `ended_ms` from the start of the generation to it.
    """

    round: int
    base: int
    num_draft: int
    num_accepted: int
    num_committed: int
    outcome: Outcome
    reason: str
    draft_ms: float
    wall_ms: float
    ended_ms: float
    cost: VerifyCost = field(default=VerifyCost())
    num_audited: int = 0
    num_agreed: int = 0
    draft_prefill_ms: float = 0.0
    draft_encode_ms: float = 0.0

    @property
    def overhead_ms(self) -> float:
        """Wall time less time inside engine forwards, in a queue and on the wire.

        Over a link that is the time in which the verdict was waited for: what a server computed ahead is not in it.
        """
        return self.wall_ms - self.draft_ms - (self.cost.rtt_ms or self.cost.queue_ms + self.cost.forward_ms)


@dataclass(frozen=True, slots=True)
class Round:
    """A committed round: what was drafted, what became final, where it came from.

    `token_ids` and `origins` are equally long. `audit` and `audit_ranks` are those of the verdict.
    """

    record: StepRecord
    block: DraftBlock
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    audit: tuple[bool, ...] = ()
    audit_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """One committed token as the caller sees it.

    `text` is what it makes certain: empty while a character, or what may be a stop string, is incomplete.
    """

    token_id: int
    origin: Origin
    text: str
    round: int
