"""Scores of finished texts: one pass of each model over a text, after the runs and outside their times."""

from dataclasses import replace
from typing import Any

import numpy as np

from skydraft.config import DecodingParams
from skydraft.decoding.reading import TextReader
from skydraft.engines.base import Engine
from skydraft.evaluation.records import ScoreLine, signals_entry
from skydraft.gating.gates import measure
from skydraft.prompts.pair import PromptPair


class Scorer:
    """Scores texts prompt by prompt. Choices are greedy, whatever the temperature of the run."""

    def __init__(self, draft: Engine, target: Engine) -> None:
        self._draft, self._target = draft, target
        self._reads: tuple[PromptPair, DecodingParams] | None = None
        self._readers: tuple[TextReader[Any], ...] = ()

    def score(
        self, prompt: str, prompts: PromptPair, token_ids: tuple[int, ...], params: DecodingParams,
        style: str | None = None,
    ) -> ScoreLine:  # fmt: skip
        params = replace(params, temperature=0.0)
        if (prompts, params) != self._reads:
            self.close()
            self._readers = (
                TextReader(self._draft, prompts.edge, params, lambda row, _: signals_entry(measure(row))),
                TextReader(self._target, prompts.target, params, _nll),
            )
            self._reads = prompts, params
        drafted, judged = (reader.read(token_ids) for reader in self._readers)
        return ScoreLine(
            prompt=prompt, style=style, token_ids=token_ids,
            choices=tuple(choice for choice, _ in judged),
            choice_pieces=tuple(self._target.vocab.written([choice]) for choice, _ in judged),
            nll=tuple(nll for _, nll in judged),
            signals=tuple(signals for _, signals in drafted),
            drafted=tuple(choice for choice, _ in drafted),
        )  # fmt: skip

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self._reads, self._readers = None, ()


def _nll(row: Any, token_id: int) -> float:
    """-log p of a token, in nats, rounded for the file."""
    highest = row.max()
    return round(float(np.log(np.exp(row - highest).sum()) + highest - row[token_id]), 5)
