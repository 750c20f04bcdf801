"""Scores: log-probabilities of tokens by the model whose text they are, from its raw logits at temperature 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from skydraft.engines.base import Engine
from skydraft.types import Prompt

_MOST_ROWS = 64  # of one forward over a prompt: with 150,000 tokens in a vocabulary these are 40 MB


@dataclass(frozen=True, slots=True)
class Score:
    """A token's log-probability in nats, and the best tokens of its place with theirs, best first.

    `logprob` is None for the first token of a prompt, which nothing precedes.
    """

    token_id: int
    logprob: float | None
    best: tuple[tuple[int, float], ...] = ()


def score(row: Any, token_id: int, num_best: int) -> Score:
    logits = row.astype(np.float64)
    top = float(logits.max())
    total = top + float(np.log(np.exp(logits - top).sum()))
    near = np.argpartition(-logits, num_best)[:num_best] if num_best < len(logits) else np.arange(len(logits))
    best = sorted(((int(each), float(logits[each]) - total) for each in near), key=lambda each: (-each[1], each[0]))
    return Score(token_id, float(logits[token_id]) - total, tuple(best))


class Scores:
    """Scores of one text. The draft model notes what it drafts, then the target what it judges: the last note stays."""

    def __init__(self, num_best: int) -> None:
        self._num_best = num_best
        self._by_place: dict[int, Score] = {}

    def note(self, place: int, row: Any, token_id: int) -> None:
        """Score the token at `place`, counted from the end of the prompt, by the raw logits [vocab] of a model."""
        self._by_place[place] = score(row, token_id, self._num_best)

    def between(self, start: int, end: int) -> tuple[Score, ...]:
        return tuple(self._by_place[place] for place in range(start, end))


def prompt_scores(engine: Engine, prompt: Prompt, num_best: int) -> Iterator[Score]:
    """Scores of the tokens of a prompt. Between its forwards other threads may use the engine. Raises PromptError."""
    token_ids = prompt.token_ids
    yield Score(token_ids[0], None)
    with closing(engine.begin(token_ids, prompt.media)) as sequence:
        for start in range(0, len(token_ids) - 1, num_rows := min(engine.max_output_rows, _MOST_ROWS)):
            fed, following = token_ids[start : start + num_rows], token_ids[start + 1 : start + 1 + num_rows]
            with engine.floor:
                rows = sequence.extend(fed[: len(following)])
                scores = [score(row, each, num_best) for row, each in zip(rows, following, strict=True)]
            yield from scores
