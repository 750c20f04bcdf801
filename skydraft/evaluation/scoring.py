"""What both models think of a finished text: one pass of each over it, after the runs and outside their times.

Rows go in within `invariant_rows`, so that choices are bit for bit those of the model decoding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from skydraft.choosing.chooser import Chooser
from skydraft.config import DecodingParams
from skydraft.engines.base import Engine
from skydraft.engines.base import Sequence as EngineSequence
from skydraft.engines.rows import at_least_float32, namespace_of
from skydraft.engines.vocab import TokenIds
from skydraft.evaluation.records import ScoreLine, signals_entry
from skydraft.gating.signals import measure
from skydraft.prompts.pair import PromptPair
from skydraft.types import Prompt

Finding = TypeVar("Finding")


@dataclass(frozen=True, slots=True)
class _Judged:
    choice: int
    nll: float


@dataclass(frozen=True, slots=True)
class _Drafted:
    choice: int
    signals: tuple[float, float, float]


class Scorer:
    """Scores the texts of one prompt after another; texts of the same prompt share what they begin with.

    Choices are greedy, whatever the temperature of the run, under the constraints of `params`.
    """

    def __init__(self, draft: Engine, target: Engine, params: DecodingParams, style: str | None = None) -> None:
        self._draft, self._target = draft, target
        self._style = style
        self._params = replace(params, temperature=0.0)
        self._prompts: PromptPair | None = None
        self._sides: tuple[_Side[_Drafted], _Side[_Judged]] | None = None

    def score(self, prompt: str, prompts: PromptPair, token_ids: tuple[int, ...]) -> ScoreLine:
        """The line about one text that answers `prompts`, whose id is `prompt`."""
        drafts, judges = self._sides_of(prompts)
        drafted, judged = drafts.findings(token_ids), judges.findings(token_ids)
        vocab = self._target.vocab
        return ScoreLine(
            prompt=prompt,
            style=self._style,
            token_ids=token_ids,
            choices=tuple(found.choice for found in judged),
            choice_pieces=tuple(vocab.written([found.choice]) for found in judged),
            nll=tuple(round(found.nll, 5) for found in judged),
            signals=tuple(found.signals for found in drafted),
            drafted=tuple(found.choice for found in drafted),
        )

    def _sides_of(self, prompts: PromptPair) -> tuple[_Side[_Drafted], _Side[_Judged]]:
        """Both models' passes over texts that answer `prompts`, begun where the last text answered others."""
        if self._sides is not None and prompts == self._prompts:
            return self._sides
        self.close()
        judge = Chooser(self._params, self._target.vocab, len(prompts.target.token_ids))
        drafter = Chooser(self._params, self._draft.vocab, len(prompts.edge.token_ids))
        drafts = _Side(self._draft, prompts.edge, lambda row, prefix, _: _drafted(drafter, row, prefix))
        judges = _Side(self._target, prompts.target, lambda row, prefix, token: _judged(judge, row, prefix, token))
        self._prompts, self._sides = prompts, (drafts, judges)
        return drafts, judges

    def close(self) -> None:
        """Free both sequences; the engines stay open."""
        for side in self._sides or ():
            side.close()
        self._sides = None


class _Side(Generic[Finding]):
    """One model's pass over texts of one prompt, remembering what it found about the last one."""

    def __init__(self, engine: Engine, prompt: Prompt, look: Callable[[Any, TokenIds, int], Finding]) -> None:
        self._engine = engine
        self._prompt_ids = prompt.token_ids
        self._look = look
        self._sequence: EngineSequence = engine.open(prompt.token_ids, prompt.media)
        self._last: TokenIds = np.array(prompt.token_ids, np.int32)
        self._findings: list[Finding] = []

    def findings(self, token_ids: Sequence[int]) -> list[Finding]:
        """What was found at each token."""
        whole = np.concatenate([self._prompt_ids, token_ids]).astype(np.int32)
        shared = min(len(whole), len(self._last))
        differs = np.flatnonzero(whole[:shared] != self._last[:shared])
        known = (int(differs[0]) if len(differs) else shared) - len(self._prompt_ids)
        del self._findings[known:]
        self._last = whole
        # The row that follows length n is the one of token n - 1.
        base = len(self._prompt_ids) + known
        self._sequence.align(whole[:base])
        for start in range(base - 1, len(whole) - 1, self._engine.invariant_rows):
            rows = self._sequence.extend(whole[start : min(start + self._engine.invariant_rows, len(whole) - 1)])
            for index, row in enumerate(rows, start + 1):
                self._findings.append(self._look(row, whole[:index], int(whole[index])))
        return self._findings

    def close(self) -> None:
        self._sequence.close()


def _judged(chooser: Chooser, row: Any, prefix: TokenIds, token_id: int) -> _Judged:
    wide = at_least_float32(row)
    xp = namespace_of(wide)
    highest = wide.max()
    nll = xp.log(xp.exp(wide - highest).sum()) + highest - wide[token_id]
    return _Judged(chooser.choose(row, prefix), float(nll))


def _drafted(chooser: Chooser, row: Any, prefix: TokenIds) -> _Drafted:
    choice = chooser.choose(row, prefix)
    return _Drafted(choice, signals_entry(measure(row)))
