"""Score finished texts: both models read each text once, after the runs and outside their times."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from skydraft.config import DecodingParams
from skydraft.decoding.reading import TextReader
from skydraft.engines.base import Engine
from skydraft.gating.gates import measure
from skydraft.lab.evaluation.records import ScoreLine, signals_entry
from skydraft.prompts.pair import PromptPair


def scores(
    pair: tuple[Engine, Engine], prompt: str, prompts: PromptPair, params: DecodingParams,
    texts: Iterable[tuple[int, ...]], style: str | None = None,
) -> Iterator[ScoreLine]:  # fmt: skip
    """Yield the scores of `texts` that answer one prompt. Choices are greedy, whatever the run's temperature."""
    draft, target = pair
    params = replace(params, temperature=0.0)
    with (
        closing(TextReader(draft, prompts.edge, params, lambda row, _: signals_entry(measure(row)))) as drafting,
        closing(TextReader(target, prompts.target, params, _nll)) as judging,
    ):
        for token_ids in texts:
            drafted, judged = drafting.read(token_ids), judging.read(token_ids)
            yield ScoreLine(
                prompt=prompt, style=style, token_ids=token_ids, choices=tuple(choice for choice, _ in judged),
                choice_pieces=tuple(target.vocab.written([choice]) for choice, _ in judged),
                nll=tuple(nll for _, nll in judged), signals=tuple(signals for _, signals in drafted),
                drafted=tuple(choice for choice, _ in drafted),
            )  # fmt: skip


def _nll(row: Any, token_id: int) -> float:
    """Return -log p of a token in nats, rounded for the file."""
    highest = row.max()
    return round(float(np.log(np.exp(row - highest).sum()) + highest - row[token_id]), 5)
