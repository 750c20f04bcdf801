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
base             how many generated tokens are committed where a block begins: 0 right after the prompt, so that it is
                 the same number on both sides, whatever prompt each of them reads.
catch-up         tokens committed by skips that the target has not seen.
audit            whether the target would have emitted each catch-up token.
fallback         commit a block unverified that should have been verified, because the cloud is gone.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Origin = Literal["accepted", "recovered", "bonus", "skipped", "edge", "cloud", "edge-fallback"]

FinishReason = Literal["eos", "stop_string", "sentences", "length", "interrupted"]
EndedBy = Literal["k", "gate", "stop"]
Outcome = Literal["verified", "skipped", "fallback"]
SAMPLE_RATE = 16_000  # Hz, of all speech behind the file it came from


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """One recording as log-mel features [num_mels, num_frames], float32: real frames only, no padding.

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


Recordings: TypeAlias = tuple[Media, ...]  # the recordings of a prompt, in its order


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens that one side reads, chat template included, and what their audio tokens stand for."""

    token_ids: tuple[int, ...]
    media: Recordings = ()


@dataclass(frozen=True, slots=True)
class Reuse:
    """A sequence may be kept for prompts of the same `scope`, and take up one that was: nobody else's.

    Not `exact` reuses generated tokens too, whose KV may differ in bits from that of a prompt.
    """

    scope: str
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Signals:
    """How sure the draft model was of one token; from its raw logits at temperature 1."""

    entropy: float  # nats
    margin: float  # p1 - p2, probability
    top_prob: float  # probability


@dataclass(frozen=True, slots=True)
class Cost:
    """What one model spent: forwards (`num_passes`), rows in them, and milliseconds.

    `forward_ms` is the time inside forwards; `prefill_ms` the part of it for the prompt, whose rows and passes are not
    counted, and `encode_ms` the part of that for the prompt's audio. `queue_ms` is time on a server besides.
    `num_cached` counts tokens of the prompt that an earlier one had left in the KV cache.
    """

    num_passes: int = 0
    num_rows: int = 0
    forward_ms: float = 0.0
    prefill_ms: float = 0.0
    encode_ms: float = 0.0
    queue_ms: float = 0.0
    num_cached: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.num_passes + other.num_passes,
            self.num_rows + other.num_rows,
            self.forward_ms + other.forward_ms,
            self.prefill_ms + other.prefill_ms,
            self.encode_ms + other.encode_ms,
            self.queue_ms + other.queue_ms,
            self.num_cached + other.num_cached,
        )


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What a round spent on a link: the time its verdict was waited for, and bytes of messages; all 0 in one process.

    `shared_bytes` is the part of `bytes_up` that is features of speech.
    """

    rtt_ms: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    shared_bytes: int = 0

    def __add__(self, other: LinkCost) -> LinkCost:
        return LinkCost(
            self.rtt_ms + other.rtt_ms,
            self.bytes_up + other.bytes_up,
            self.bytes_down + other.bytes_down,
            self.shared_bytes + other.shared_bytes,
        )


@dataclass(frozen=True, slots=True)
class Ahead:
    """What was drafted while a verdict was waited for.

    `num_prepared` steps since the block before was drafted; `num_used` tokens of this block were found ready, and had
    taken `hidden_ms` of forwards.
    """

    num_prepared: int = 0
    num_used: int = 0
    hidden_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The drafted tokens of one round, extending `base` generated tokens.

    `signals` has one entry per token, or none at all where nobody asked for them; so has `forced`, whether a
    grammar allowed nothing else, where there is a grammar. `finish` is why its last token ends the generation, should
    the block be committed as it is. `cost` is the draft model's, without what was prepared `ahead`; neither is a part
    of equality.
    """

    base: int
    token_ids: tuple[int, ...]
    signals: tuple[Signals, ...] = ()
    ended_by: EndedBy = "k"
    finish: FinishReason | None = None
    cost: Cost = field(default=Cost(), compare=False)
    forced: tuple[bool, ...] = ()
    ahead: Ahead = field(default=Ahead(), compare=False)

    def __post_init__(self) -> None:
        if self.base < 0:
            raise ValueError(f"a block cannot begin at {self.base}")
        for name, given in (("signals", self.signals), ("marks of forced tokens", self.forced)):
            if given and len(given) != len(self.token_ids):
                raise ValueError(f"{len(given)} {name} for {len(self.token_ids)} tokens")

    def is_forced(self, index: int) -> bool:
        """Whether a grammar allowed nothing else than this token of the block."""
        return bool(self.forced) and self.forced[index]

    @property
    def free_signals(self) -> tuple[Signals, ...]:
        """Signals of the tokens that had rivals."""
        return tuple(itertools.compress(self.signals, map(operator.not_, self.forced))) if self.forced else self.signals


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target says about a block: the first `num_accepted` tokens stand, then comes `token_id`.

    `token_id` is the recovered token, or the bonus token when the whole block was accepted. It is None
    only when `finish` says that the generation ended inside the accepted tokens. `audit` has one entry
    per catch-up token: whether the target would have emitted it; `audit_ranks` has one per token where it would not:
    how many tokens its constrained logits put before that one. `cost` is the target's and no part of
    equality.
    """

    base: int
    num_accepted: int
    token_id: int | None
    finish: FinishReason | None = None
    audit: tuple[bool, ...] = ()
    audit_ranks: tuple[int, ...] = ()
    cost: Cost = field(default=Cost(), compare=False)

    def __post_init__(self) -> None:
        if self.num_accepted < 0 or self.base < 0:
            raise ValueError(f"no such verdict: base {self.base}, {self.num_accepted} accepted")
        if self.token_id is None and (self.finish is None or self.num_accepted == 0):
            raise ValueError("a verdict without a token must end inside its accepted tokens")
        if len(self.audit_ranks) != self.audit.count(False):
            raise ValueError(f"{len(self.audit_ranks)} ranks for {self.audit.count(False)} failed audits")

    @property
    def num_tokens(self) -> int:
        """How many tokens this verdict commits."""
        return self.num_accepted + (self.token_id is not None)

    def commits(self, block: DraftBlock) -> tuple[int, ...]:
        """What becomes final of `block`: its accepted tokens, then the target's own."""
        return block.token_ids[: self.num_accepted] + (() if self.token_id is None else (self.token_id,))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One round as it happened. Rates are computed from these later, never kept beside them.

    `num_committed` counts what the round added to the text; `reason` says why it was escalated, or should have been
    ("" if it was not to be); `num_audited` counts the catch-up tokens it took along, `num_agreed` those that the target
    would have written too; `num_forced` counts the drafted tokens it committed that a grammar left no choice about;
    `wall_ms` runs from the start of the draft to the commit, `ended_ms` from the start of the
    generation to it. `draft` and `target` are what the models spent, `ahead` what was drafted while waiting.
    """

    round: int
    base: int
    num_draft: int
    num_accepted: int
    num_committed: int
    outcome: Outcome
    reason: str
    wall_ms: float
    ended_ms: float
    draft: Cost = field(default=Cost())
    target: Cost = field(default=Cost())
    link: LinkCost = field(default=LinkCost())
    num_audited: int = 0
    num_agreed: int = 0
    num_forced: int = 0
    ahead: Ahead = field(default=Ahead())

    @property
    def overhead_ms(self) -> float:
        """Wall time less time inside engine forwards, in a queue and on the wire.

        Over a link that is the time in which the verdict was waited for: what a server computed ahead is not in it.
        """
        return (
            self.wall_ms - self.draft.forward_ms - (self.link.rtt_ms or self.target.queue_ms + self.target.forward_ms)
        )


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
