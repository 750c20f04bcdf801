"""The values that the packages exchange, and their terms.

draft model      the small model on the device (the edge); it drafts.
target model     the large model (the cloud); its text is the reference.
round            one block drafted and judged.
block            the drafted tokens of a round.
escalate / skip  send the block to the target / commit it unchecked.
accepted         drafted and equal to the target's choice.
recovered        the target's choice at the first difference.
bonus            the target's choice after a fully accepted block.
committed        the prompt and all final tokens.
base             the number of committed generated tokens before a block, 0 right after the prompt. It is the same on
                 both sides, though their prompts may differ.
catch-up         skipped and committed tokens that the target has not seen.
audit            whether the target would have written each catch-up token.
hand-back        after a correction the target keeps writing, until the draft model drafts again.
fallback         commit a block without its verdict, because the cloud is lost.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Origin = Literal["accepted", "recovered", "bonus", "skipped", "edge", "cloud", "edge-fallback"]

# content_filter: a server's filter ended the text; an end token stands for it.
FinishReason = Literal["eos", "stop_string", "sentences", "length", "content_filter", "interrupted"]
EndedBy = Literal["k", "gate", "stop"]
Outcome = Literal["verified", "written", "skipped", "fallback"]
SAMPLE_RATE = 16_000  # Hz, for all decoded speech
WRITE_ALL = 2**31 - 1  # tokens that the target may write: only the text's own limit applies
_NAMED = "name:"


def named_weights(model: str) -> str:
    """Return the stand-in for a fingerprint if a server gives only the model's name; "" without a name."""
    return model and f"{_NAMED}{model}"


def is_named(weights: str) -> bool:
    return weights.startswith(_NAMED)


def short_weights(weights: str) -> str:
    return weights.removeprefix(_NAMED) if is_named(weights) else weights[:12]


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """One recording as log-mel features [num_mels, num_frames], float32: a read-only copy without padding.

    Raises ValueError for anything else, or for too few frames for one token.
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
        return len(self.features[0])  # 10 ms each

    @property
    def num_tokens(self) -> int:
        # A convolution of stride 2, then the mean of each two frames.
        return ((self.num_frames - 1) // 2 - 1) // 2 + 1

    def rounded(self) -> Media:
        """Round features to half precision, as they are sent, for half the bytes."""
        return Media(self.features.astype(np.float16).astype(np.float32))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Media) and np.array_equal(self.features, other.features)

    def __hash__(self) -> int:
        return hash((self.features.shape, self.features.tobytes()))


Recordings: TypeAlias = tuple[Media, ...]  # the recordings of a prompt, in its order


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    media: Recordings = ()


@dataclass(frozen=True, slots=True)
class Reuse:
    """Reuse KV of prompts with this `scope`. Unless `exact`, reuse generated tokens too, whose bits may differ."""

    scope: str
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Signals:
    """From the draft model's raw logits at temperature 1."""

    entropy: float  # nats
    margin: float  # p1 - p2, probability
    top_prob: float  # probability


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of one model. `forward_ms` is all time in forwards; `prefill_ms` is its part for the prompt, and
    `encode_ms` the part of that for audio. `num_passes` and `num_rows` leave out the prompt. `queue_ms` is time in a
    server's queue. `num_cached` counts prompt tokens found in the KV cache."""

    num_passes: int = 0
    num_rows: int = 0
    forward_ms: float = 0.0
    prefill_ms: float = 0.0
    encode_ms: float = 0.0
    queue_ms: float = 0.0
    num_cached: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, _COSTS(self), _COSTS(other)))


_COSTS = operator.attrgetter(*(each.name for each in fields(Cost)))  # astuple takes ten times as long


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The cost of a round on a link: time waited for its verdict, and bytes of messages; all 0 in one process.

    `shared_bytes` is the part of `bytes_up` for features of speech. The server read `tokens_in` (`tokens_hit` from its
    cache) and wrote `tokens_out`. `num_requests` counts requests to servers without skydraft, which may charge."""

    rtt_ms: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    shared_bytes: int = 0
    num_requests: int = 0
    tokens_in: int = 0
    tokens_hit: int = 0
    tokens_out: int = 0

    def __add__(self, other: LinkCost) -> LinkCost:
        return LinkCost(*map(operator.add, _FIGURES(self), _FIGURES(other)))

    def __sub__(self, other: LinkCost) -> LinkCost:
        return LinkCost(*map(operator.sub, _FIGURES(self), _FIGURES(other)))


_FIGURES = operator.attrgetter(*(each.name for each in fields(LinkCost)))


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The drafted tokens of one round, after `base` generated tokens.

    `signals` and `forced` (a grammar or a thinking budget allowed no other token) have one entry per token, or none if
    not measured. `finish` is why the last token would end the text. `read` has an entry for each target-written token
    that the draft model has just read: whether it agrees, or None if the token was forced. `num_unread` tokens before
    `base` are still unread. `num_broken` tokens were drawn to end a cycle. A block `is_copied` if no model drafted it.
    """

    base: int
    token_ids: tuple[int, ...]
    signals: tuple[Signals, ...] = ()
    ended_by: EndedBy = "k"
    finish: FinishReason | None = None
    cost: Cost = field(default=Cost(), compare=False)
    forced: tuple[bool, ...] = ()
    read: tuple[bool | None, ...] = ()
    num_broken: int = 0
    is_copied: bool = False
    num_unread: int = 0

    def __post_init__(self) -> None:
        if self.base < 0:
            raise ValueError(f"a block cannot begin at {self.base}")
        for name, given in (("signals", self.signals), ("marks of forced tokens", self.forced)):
            if given and len(given) != len(self.token_ids):
                raise ValueError(f"{len(given)} {name} for {len(self.token_ids)} tokens")

    def is_forced(self, index: int) -> bool:
        return bool(self.forced) and self.forced[index]

    @property
    def free_signals(self) -> tuple[Signals, ...]:
        return tuple(itertools.compress(self.signals, map(operator.not_, self.forced))) if self.forced else self.signals


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafts sent while the target writes. They begin the branch of this number after `base` generated tokens; with the
    number 0 they continue the last drafts."""

    branch: int
    base: int
    token_ids: tuple[int, ...]

    def after(self, before: Draft | None) -> Draft:
        """Append these drafts to those `before`, if both have the same branch."""
        if before is None or before.branch != self.branch:
            return self
        return replace(before, token_ids=before.token_ids + self.token_ids)

    def at(self, base: int, num: int) -> tuple[int, ...]:
        """Return up to `num` tokens from the place `base`."""
        return self.token_ids[base - self.base :][:num] if base >= self.base else ()


@dataclass(frozen=True, slots=True)
class Score:
    """A token's log-probability in nats, and the best tokens at its place with their own, best first.

    `logprob` is None for the first token of a prompt.
    """

    token_id: int
    logprob: float | None
    best: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's verdict on a block: the first `num_accepted` tokens stand, then comes `token_id`.

    That is the recovered token, or the bonus token of a fully accepted block; None only if the text ended inside the
    accepted tokens (`finish`). `audit` has one entry per catch-up token: whether the target would have written it.
    `scores`, if requested, cover the catch-up tokens and then the tokens that stand. With `draft_ids` it judges
    these drafts, which were sent ahead in a `branch`.
    """

    base: int
    num_accepted: int
    token_id: int | None
    finish: FinishReason | None = None
    audit: tuple[bool, ...] = ()
    cost: Cost = field(default=Cost(), compare=False)
    scores: tuple[Score, ...] = ()
    draft_ids: tuple[int, ...] = ()
    branch: int = 0

    def __post_init__(self) -> None:
        if self.num_accepted < 0 or self.base < 0:
            raise ValueError(f"no such verdict: base {self.base}, {self.num_accepted} accepted")
        if self.token_id is None and (self.finish is None or self.num_accepted == 0):
            raise ValueError("a verdict without a token must end inside its accepted tokens")

    def hands_over(self, block: DraftBlock) -> bool:
        """Whether the target may keep writing: it corrected the block, or the block was empty, and the text goes on."""
        return self.finish is None and (not block.token_ids or self.num_accepted < len(block.token_ids))

    @property
    def num_tokens(self) -> int:
        return self.num_accepted + (self.token_id is not None)

    def commits(self, block: DraftBlock | None = None) -> tuple[int, ...]:
        """Return the tokens that stand. `block` is needed if the verdict has no `draft_ids`."""
        drafts = block.token_ids if block and not self.draft_ids else self.draft_ids
        return drafts[: self.num_accepted] + (() if self.token_id is None else (self.token_id,))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The figures of one round. Rates are computed from these records and never stored.

    `outcome` is "verified" for a call to the target, "written" for a token that it wrote after an earlier call. The
    target would have written `num_agreed` of the `num_audited` catch-up tokens. `num_forced` counts committed drafts
    that were forced, `num_reasoning` committed tokens of thinking, `num_broken` tokens drawn to end a cycle,
    `num_copied` copied drafts. `wall_ms` runs from the start of the draft to the commit, `ended_ms`
    from the start of the generation.
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
    num_reasoning: int = 0
    num_broken: int = 0
    num_copied: int = 0

    @property
    def num_written(self) -> int:
        return self.num_committed - self.num_accepted if self.outcome in ("verified", "written") else 0

    @property
    def overhead_ms(self) -> float:
        """Wall time without forwards, queue and wire. Over a link the target's forwards may have run earlier."""
        waited_ms = self.link.rtt_ms or self.target.queue_ms + self.target.forward_ms
        return self.wall_ms - self.draft.forward_ms - waited_ms


@dataclass(frozen=True, slots=True)
class Round:
    record: StepRecord
    block: DraftBlock
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    audit: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """`text` is the text that is certain after this token: empty while a character or a stop string may be incomplete.

    `reasoning` is the same for the thinking before the answer, without its tags.
    """

    token_id: int
    origin: Origin
    text: str
    round: int
    reasoning: str = ""
