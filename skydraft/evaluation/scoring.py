"""Scores of finished texts: one pass of each model over a text, after the runs and outside their times.

Each forward has at most `invariant_rows` rows, so choices are bit for bit those of the model decoding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skydraft.choosing.chooser import Chooser
from skydraft.config import DecodingParams
from skydraft.engines.base import Engine
from skydraft.engines.base import Sequence as EngineSequence
from skydraft.engines.vocab import TokenIds
from skydraft.evaluation.records import ScoreLine, signals_entry
from skydraft.gating.gates import measure
from skydraft.prompts.pair import PromptPair
from skydraft.types import Prompt

# At a token: the model's own choice there, and the token's nll (target) or the signals (draft model).
Finding = tuple[int, Any]


class Scorer:
    """Scores texts prompt by prompt; a text reuses the KV of the beginning that it shares with the one before.

    Choices are greedy, whatever the temperature of the run, under the constraints of `params`.
    """

    def __init__(self, draft: Engine, target: Engine, params: DecodingParams, style: str | None = None) -> None:
        self._draft, self._target = draft, target
        self._style = style
        self._params = replace(params, temperature=0.0)
        self._prompts: PromptPair | None = None
        self._sides: tuple[_Side, _Side] | None = None

    def score(self, prompt: str, prompts: PromptPair, token_ids: tuple[int, ...]) -> ScoreLine:
        """The score of one text that answers `prompts`; `prompt` is their id."""
        drafts, judges = self._sides_of(prompts)
        drafted, judged = drafts.findings(token_ids), judges.findings(token_ids)
        vocab = self._target.vocab
        return ScoreLine(
            prompt=prompt,
            style=self._style,
            token_ids=token_ids,
            choices=tuple(choice for choice, _ in judged),
            choice_pieces=tuple(vocab.written([choice]) for choice, _ in judged),
            nll=tuple(nll for _, nll in judged),
            signals=tuple(signals for _, signals in drafted),
            drafted=tuple(choice for choice, _ in drafted),
        )

    def _sides_of(self, prompts: PromptPair) -> tuple[_Side, _Side]:
        """Both models' passes over texts that answer `prompts`; new ones if the last text answered others."""
        if self._sides is not None and prompts == self._prompts:
            return self._sides
        self.close()
        judge = Chooser(self._params, self._target.vocab, len(prompts.target.token_ids))
        drafter = Chooser(self._params, self._draft.vocab, len(prompts.edge.token_ids))
        self._prompts = prompts
        self._sides = (
            _Side(self._draft, prompts.edge, drafter, lambda row, _: signals_entry(measure(row))),
            _Side(self._target, prompts.target, judge, _nll),
        )
        return self._sides

    def close(self) -> None:
        """Free both sequences; the engines stay open."""
        for side in self._sides or ():
            side.close()
        self._sides = None


class _Side:
    """One model's pass over the texts of one prompt; keeps the findings of the last text."""

    def __init__(self, engine: Engine, prompt: Prompt, chooser: Chooser, look: Callable[[Any, int], Any]) -> None:
        self._engine, self._chooser, self._look = engine, chooser, look
        self._prompt_ids = prompt.token_ids
        self._sequence: EngineSequence = engine.open(prompt.token_ids, prompt.media)
        self._last: TokenIds = np.array(prompt.token_ids, np.int32)
        self._findings: list[Finding] = []

    def findings(self, token_ids: Sequence[int]) -> list[Finding]:
        """The finding at each token."""
        whole = np.concatenate([self._prompt_ids, token_ids]).astype(np.int32)
        shared = min(len(whole), len(self._last))
        differs = np.flatnonzero(whole[:shared] != self._last[:shared])
        known = (int(differs[0]) if len(differs) else shared) - len(self._prompt_ids)
        del self._findings[known:]
        self._last = whole
        # The forward of token n - 1 gives the row after n tokens.
        base = len(self._prompt_ids) + known
        self._sequence.align(whole[:base])
        for start in range(base - 1, len(whole) - 1, self._engine.invariant_rows):
            rows = self._sequence.extend(whole[start : min(start + self._engine.invariant_rows, len(whole) - 1)])
            for index, row in enumerate(rows, start + 1):
                self._findings.append((self._chooser.choose(row, whole[:index]), self._look(row, int(whole[index]))))
        return self._findings

    def close(self) -> None:
        self._sequence.close()


def _nll(row: Any, token_id: int) -> float:
    """-log p of a token, in nats, rounded for the file."""
    highest = row.max()
    return round(float(np.log(np.exp(row - highest).sum()) + highest - row[token_id]), 5)
