"""What a server serves."""

from __future__ import annotations

from dataclasses import dataclass

from skydraft.config import Execution
from skydraft.engines.base import Engine
from skydraft.protocol.codec import target_id
from skydraft.protocol.values import TargetId


@dataclass(frozen=True, slots=True)
class Served:
    """The target model of a server, and how its rows are computed."""

    engine: Engine
    execution: Execution = "exact"

    @property
    def target_id(self) -> TargetId:
        """The identity of the target: everything that its choices depend on."""
        return target_id(self.engine.fingerprint, self.execution, self.engine.context_len)
