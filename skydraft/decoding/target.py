"""Where verdicts come from, as the one who starts a generation sees it: an engine in this process, or a cloud."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from skydraft.config import MAX_K, DecodingParams
from skydraft.decoding.choose import Chooser
from skydraft.decoding.context import Committed
from skydraft.decoding.plan import Plan
from skydraft.decoding.stopping import Stopping
from skydraft.decoding.verification import TargetVerifier, Verifier
from skydraft.engines.base import Engine, RowProfile
from skydraft.engines.vocab import Vocab

Execution = Literal["exact", "throughput"]


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides one generation, on both sides: how to decode, and the parameters made into questions."""

    plan: Plan
    params: DecodingParams
    vocab: Vocab
    chooser: Chooser
    stopping: Stopping


@dataclass(frozen=True, slots=True)
class TargetCosts:
    """What an adaptive k weighs: forwards of n rows, the most rows of one, the longest block, and the wire.

    `wire_ms` is what a round takes beside forwards; None where there is no wire.
    """

    profile: RowProfile
    max_rows: int
    wire_ms: float | None = None
    max_block: int = MAX_K


class Target(Protocol):
    """What `generate` needs of the side that verifies."""

    def verifier(self, context: Committed, rules: Rules) -> Verifier:
        """The verifier of one generation, whose committed tokens are `context`."""

    def falls_back(self, plan: Plan) -> bool:
        """Whether a generation goes on without its verifier when that is lost."""

    def costs(self, *, quick: bool) -> TargetCosts:
        """What an adaptive k starts from; where `quick`, a silence is not waited out."""

    def weights(self, *, quick: bool) -> tuple[str, str]:
        """(name, fingerprint of the weights) of the target model; where `quick`, a silence is not waited out."""


class InProcess:
    """A target in this process."""

    def __init__(self, engine: Engine, execution: Execution) -> None:
        self._engine = engine
        self._max_rows = engine.invariant_rows if execution == "exact" else engine.max_output_rows

    def verifier(self, context: Committed, rules: Rules) -> Verifier:
        prompt_ids = context.token_ids[: context.prompt_len].tolist()
        return TargetVerifier(
            self._engine,
            prompt_ids,
            rules.chooser,
            rules.stopping,
            max_rows=self._max_rows,
            top=rules.plan.top,
            media=context.media,
        )

    def falls_back(self, plan: Plan) -> bool:
        return False

    def costs(self, *, quick: bool) -> TargetCosts:
        return TargetCosts(self._engine.profile, self._max_rows)

    def weights(self, *, quick: bool) -> tuple[str, str]:
        return self._engine.name, self._engine.fingerprint
