"""The requests and answers of the protocol as values. verifier.proto explains each field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from skydraft.config import DecodingParams, Execution
from skydraft.types import Cost, DraftBlock, Prompt

SERVICE = "skydraft.verifier.v4.Verifier"
SESSION, GET_INFO, HEALTH = f"/{SERVICE}/Session", f"/{SERVICE}/GetInfo", "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"  # HealthCheckResponse(status=SERVING)
MAX_SESSION = 2**21 - 1  # three bytes on the wire

# Channel options of both sides: no bandwidth probes. The stream window is well below the connection's 64 kB, so that
# the connection's window is not renewed with each message until 48 kB have arrived.
FEW_FRAMES = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 * 1024))


@dataclass(frozen=True, slots=True)
class TargetId:
    """The identity of a target; `weights` are 8 hex digits from its weights and execution."""

    weights: str
    context_len: int

    def will_do_for(self, begun: TargetId) -> bool:
        """Whether a text that began at the target `begun` can continue at this one."""
        return self.weights == begun.weights and self.context_len >= begun.context_len


@dataclass(frozen=True, slots=True)
class Opening:
    """Everything that a session needs to begin, or to begin again.

    `fingerprint` is the vocabulary's, shortened to 16 hex digits. `committed_ids` are the generated tokens that the
    target has seen. Speech is sent in half precision, so round it first with `Media.rounded`. KV is shared with earlier
    prompts of the same owner and `cache_scope`; "" shares none. `target` is the target that began the text, None before
    that. With `num_best` its tokens are scored.
    """

    fingerprint: str
    prompt: Prompt
    committed_ids: tuple[int, ...] = ()
    params: DecodingParams = field(default_factory=DecodingParams)
    cache_scope: str = ""
    target: TargetId | None = None
    num_best: int | None = None

    @property
    def num_ids(self) -> int:
        return len(self.prompt.token_ids) + len(self.committed_ids)

    def begins_like(self, other: Opening) -> bool:
        mine, theirs = ((o.prompt, o.params, o.cache_scope, o.num_best) for o in (self, other))
        return mine == theirs


@dataclass(frozen=True, slots=True)
class OpenCall:
    kind: ClassVar[str] = "open"
    session: int
    epoch: int
    opening: Opening

    @property
    def base(self) -> int:
        return len(self.opening.committed_ids)

    @property
    def num_rows(self) -> int:
        return self.opening.num_ids


@dataclass(frozen=True, slots=True)
class VerifyCall:
    """Asks for the verdict on `draft_ids` after `base` generated tokens, which end with `catch_up_ids`."""

    kind: ClassVar[str] = "verify"
    session: int
    epoch: int
    base: int
    catch_up_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    digest: int
    opening: Opening | None = None
    write: int = 0  # tokens that the target may write after the verdict

    @property
    def block(self) -> DraftBlock:
        return DraftBlock(self.base, self.draft_ids)

    @property
    def num_rows(self) -> int:
        """The most rows of the target for the verdict, with prompt and replay, without written tokens."""
        return len(self.catch_up_ids) + len(self.draft_ids) + 1 + (self.opening.num_ids if self.opening else 0)


@dataclass(frozen=True, slots=True)
class CloseCall:
    session: int


@dataclass(frozen=True, slots=True)
class Opened:
    """Answers an opening: the session holds `base` generated tokens. Equality ignores `cost`, the prompt's cost."""

    base: int
    cost: Cost = field(default=Cost(), compare=False)


@dataclass(frozen=True, slots=True)
class Stopped:
    """The last answer to a verify whose target was stopped: the session holds `base` generated tokens."""

    base: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Sizes are in tokens."""

    version: str
    model: str
    fingerprint: str  # of the vocabulary
    vocab_size: int
    context_len: int
    execution: Execution
    max_sessions: int
    num_sessions: int
    weights: str = ""  # fingerprint of the model
