"""Seats of sessions, which are sequences of the engine, and what the engine serves."""

from __future__ import annotations

from dataclasses import dataclass

from skydraft.config import Execution
from skydraft.decoding.verification import TargetSession
from skydraft.engines.base import Engine
from skydraft.engines.vocab import Vocab
from skydraft.protocol.codec import target_id
from skydraft.protocol.values import Opening, TargetId
from skydraft.types import Reuse


@dataclass(frozen=True, slots=True)
class Served:
    """The model of a server, and its settings. `weights` is a fingerprint; `forward_ms` is as in ServerInfo."""

    name: str
    weights: str
    vocab: Vocab
    context_len: int
    execution: Execution
    max_rows: int
    invariant_rows: int
    forward_ms: tuple[float, ...]
    takes_audio: bool

    @property
    def target_id(self) -> TargetId:
        """The identity of the target: everything that its choices depend on."""
        return target_id(self.weights, self.execution, self.context_len)


class Seats:
    """Gives sessions their sequences."""

    def __init__(self, engine: Engine, execution: Execution = "exact") -> None:
        self._engine = engine
        self.served = Served(
            name=engine.name,
            weights=engine.fingerprint,
            vocab=engine.vocab,
            context_len=engine.context_len,
            execution=execution,
            max_rows=engine.max_rows(execution),
            invariant_rows=engine.invariant_rows,
            forward_ms=engine.profile.forward_ms,
            takes_audio=engine.takes_audio,
        )

    def target(self, opening: Opening) -> TargetSession:
        """The target's side of a new session, without a sequence. Raises UsageError."""
        return TargetSession(
            self._engine, opening.prompt, opening.params, top=opening.top, committed=opening.committed_ids
        )

    def seat(self, target: TargetSession, opening: Opening, reuse: Reuse | None) -> None:
        """Give `target` a new sequence. Raises PromptError."""
        target.adopt(self._engine.begin(opening.prompt.token_ids, opening.prompt.media, reuse))

    def forget_kept(self, older_than_s: float) -> None:
        """Release sequences that were kept for reuse for longer than this."""
        self._engine.forget_kept(older_than_s)
