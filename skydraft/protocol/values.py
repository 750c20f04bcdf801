"""The requests and answers of the protocol as values. verifier.proto says what each field means."""

from __future__ import annotations

from dataclasses import dataclass, field

from skydraft.config import DecodingParams, Execution
from skydraft.types import Cost, DraftBlock, FinishReason, Prompt

SERVICE = "skydraft.verifier.v1.Verifier"
MAX_SESSION = 2**21 - 1  # three bytes on the wire

# How both sides set up their channels: no pings that probe the bandwidth; and a stream's window well below that of the
# connection, which is 64 kB, so that the latter is not renewed with each message before 48 kB have come.
FEW_FRAMES = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 * 1024))

TokenTuple = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TargetId:
    """What decides a target's choices: 8 hex digits of its weights and execution, and the tokens of its context."""

    weights: str
    context_len: int

    def will_do_for(self, begun: TargetId) -> bool:
        """Whether a text that `begun` began can go on here."""
        return self.weights == begun.weights and self.context_len >= begun.context_len


@dataclass(frozen=True, slots=True)
class Opening:
    """All that a session needs to begin, or to begin again.

    `fingerprint` is the vocabulary's, shortened to 16 hex digits. `committed_ids` are generated tokens that the server
    had seen before. `model` "" means the one that the server has; `top` 0 exact acceptance. Speech in the prompt
    crosses in half precision, so it has to be rounded before: `Media.rounded`. KV may be shared with earlier prompts of
    the same owner and `cache_scope`; with "" it is not. `target` is what the text was begun with, None before.
    """

    fingerprint: str
    prompt: Prompt
    committed_ids: TokenTuple = ()
    params: DecodingParams = field(default_factory=DecodingParams)
    top: int = 0
    model: str = ""
    cache_scope: str = ""
    target: TargetId | None = None

    @property
    def num_ids(self) -> int:
        """Tokens of the prompt and committed ones: rows that it takes to open."""
        return len(self.prompt.token_ids) + len(self.committed_ids)

    def begins_like(self, other: Opening) -> bool:
        """Whether both belong to one generation, however far it had come."""
        mine, theirs = ((o.prompt, o.params, o.top, o.cache_scope) for o in (self, other))
        return mine == theirs


@dataclass(frozen=True, slots=True)
class SessionCall:
    """Open, or Generate: `opening` begins epoch `epoch` of session `session`."""

    session: int
    epoch: int
    opening: Opening


@dataclass(frozen=True, slots=True)
class Opened:
    """A session holds `base` generated tokens; `cost`, of its prompt, is no part of equality."""

    base: int
    cost: Cost = field(default=Cost(), compare=False)


@dataclass(frozen=True, slots=True)
class VerifyCall:
    """Judge `draft_ids` after `base` generated tokens, the last of which are `catch_up_ids`."""

    session: int
    epoch: int
    base: int
    catch_up_ids: TokenTuple
    draft_ids: TokenTuple
    digest: int
    opening: Opening | None = None

    @property
    def block(self) -> DraftBlock:
        """The draft as the verifier takes it."""
        return DraftBlock(self.base, self.draft_ids)

    @property
    def num_rows(self) -> int:
        """Rows of the target that this may take, prompt and replay included."""
        return len(self.catch_up_ids) + len(self.draft_ids) + 1 + (self.opening.num_ids if self.opening else 0)


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens of the target alone, streamed: they extend `base` generated tokens."""

    base: int
    token_ids: TokenTuple
    finish: FinishReason | None = None
    cost: Cost = field(default_factory=Cost)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server runs: sizes in tokens and rows; `forward_ms[n - 1]` is a forward of n rows when it was loaded.

    `fingerprint` is the vocabulary's, `weights` the model's. `engine` and `dtype` are "" for an engine of ours.
    """

    version: str
    model: str
    fingerprint: str
    vocab_size: int
    context_len: int
    execution: Execution
    max_rows: int
    max_block: int
    max_sessions: int
    num_sessions: int
    invariant_rows: int
    forward_ms: tuple[float, ...]
    weights: str = ""
    engine: str = ""
    dtype: str = ""
