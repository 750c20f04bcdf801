"""Where verdicts come from, as the one who starts a generation sees it: an engine in this process, or a cloud."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from skydraft.config import MAX_K, DecodingParams, Execution
from skydraft.decoding.context import Committed
from skydraft.decoding.plan import Plan
from skydraft.decoding.verification import TargetSession, Verifier
from skydraft.engines.base import Engine
from skydraft.engines.vocab import Vocab
from skydraft.types import Cost, DraftBlock, LinkCost, Prompt, Reuse, Verdict


@dataclass(frozen=True, slots=True)
class TargetCosts:
    """What an adaptive k weighs on this side, as in `CostModel`; `max_block` is the longest block that it takes.

    `model` and `weights` name what computes, for whoever has measured how often the draft model disagrees with it.
    """

    forward_ms: tuple[float, ...]
    max_rows: int
    wire_ms: float = 0.0
    streams: bool = False
    max_block: int = MAX_K
    model: str = ""
    weights: str = ""


class Target(Protocol):
    """What a generation needs of the side that verifies."""

    @property
    def engine(self) -> Engine | None:
        """The model itself, where it is in this process: its context bounds the text."""

    def verifier(
        self, context: Committed, prompt: Prompt, vocab: Vocab, plan: Plan, params: DecodingParams, cache_scope: str,
        *, drafts_first: bool = True, traceparent: str = "",
    ) -> Verifier:  # fmt: skip
        """The verifier of one generation, whose committed tokens are `context` and which reads `prompt`.

        Ids are those of `vocab`. With a `cache_scope` KV may be shared with earlier prompts of that scope. Unless it
        `drafts_first`, the first round asks for the target's own token.
        """

    @property
    def works_ahead(self) -> bool:
        """Whether the draft model is to draft while a verdict is waited for: not where that slows the target."""

    def falls_back(self, plan: Plan) -> bool:
        """Whether a generation goes on without its verifier when that is lost."""

    def costs(self, *, quick: bool) -> TargetCosts:
        """What an adaptive k starts from; where `quick`, a silence is not waited out."""

    def max_block(self, *, quick: bool) -> int:
        """The longest block that it takes; where `quick`, a silence is not waited out."""

    def weights(self, *, quick: bool) -> tuple[str, str]:
        """(name, fingerprint of the weights) of the target model; where `quick`, a silence is not waited out."""


class LocalTarget:
    """A target in this process."""

    works_ahead = False

    def __init__(self, engine: Engine, execution: Execution) -> None:
        self.engine = engine
        self._execution = execution
        self._max_rows = engine.max_rows(execution)

    def verifier(
        self, context: Committed, prompt: Prompt, vocab: Vocab, plan: Plan, params: DecodingParams, cache_scope: str,
        *, drafts_first: bool = True, traceparent: str = "",
    ) -> Verifier:  # fmt: skip
        reuse = Reuse(cache_scope, self._execution == "exact") if cache_scope else None
        return LocalVerifier(self.engine, prompt, params, max_rows=self._max_rows, top=plan.top, reuse=reuse)

    def falls_back(self, plan: Plan) -> bool:
        return False

    def costs(self, *, quick: bool) -> TargetCosts:
        engine = self.engine
        return TargetCosts(engine.profile.forward_ms, self._max_rows, model=engine.name, weights=engine.fingerprint)

    def max_block(self, *, quick: bool) -> int:
        """Any block may be as long as blocks get."""
        return MAX_K

    def weights(self, *, quick: bool) -> tuple[str, str]:
        return self.engine.name, self.engine.fingerprint


class LocalVerifier:
    """The target in this process; its sequence is opened at the first verification.

    `max_rows` bounds the rows of one forward: `engine.invariant_rows` makes every verdict bit-exact, more is faster
    on hardware where rows are nearly free. `reuse` is as in `Engine.begin`.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        params: DecodingParams,
        *,
        max_rows: int | None = None,
        top: int = 0,
        reuse: Reuse | None = None,
    ) -> None:
        self._engine = engine
        self._reuse = reuse
        self._prompt = prompt
        self._max_rows = max_rows or engine.invariant_rows
        self._session = TargetSession(engine, prompt, params, top=top)
        self._is_cancelled = False

    def verify(self, block: DraftBlock, catch_up: Seq[int]) -> Verdict:
        """Raises BaseMismatch, and changes nothing, when the block extends another length."""
        self._session.check(block, catch_up)
        cost = Cost() if self._session.is_seated else self._open()
        with self._engine.floor:
            return self._judge(block, catch_up, cost)

    def _judge(self, block: DraftBlock, catch_up: Seq[int], cost: Cost) -> Verdict:
        work = self._session.begin(block, catch_up)
        while (token_ids := work.next_feed(self._max_rows)) is not None:
            began = time.perf_counter()
            rows = work.sequence.extend(token_ids)
            cost += Cost(1, len(token_ids), forward_ms=(time.perf_counter() - began) * 1e3)
            work.absorb(rows)
        return self._session.commit(work, cost)

    def _open(self) -> Cost:
        """Put the prompt into the cache; returns what that took. A failure leaves the session without a sequence."""
        with self._engine.floor:
            sequence = self._engine.begin(self._prompt.token_ids, self._prompt.media, self._reuse)
        self._session.adopt(sequence)
        if self._is_cancelled:
            self.close()
        try:
            self._engine.fill(sequence, self._prompt.token_ids)
        except BaseException:
            self._session.close()
            raise
        return sequence.take_prefill_cost()

    def spent(self) -> LinkCost:
        """Nothing: the target is here."""
        return LinkCost()

    def cancel(self) -> None:
        """End what is being read or verified with an error. From any thread."""
        self._is_cancelled = True
        self._session.close()

    def close(self) -> None:
        """Free the sequence; the engine stays open."""
        self._session.close()
