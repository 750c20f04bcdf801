"""Scores: log-probabilities of tokens, from a model's raw logits at temperature 1."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import closing
from typing import Any

import numpy as np

from skydraft.engines.base import Engine
from skydraft.types import Prompt, Score

_MOST_ROWS = 64  # of one forward over a prompt: 40 MB with a vocabulary of 150,000 tokens


def score(row: Any, token_id: int, num_best: int) -> Score:
    """Score a token, rounded to single precision, as scores cross a link."""
    logits = row.astype(np.float64)
    top = float(logits.max())
    logprobs = (logits - (top + float(np.log(np.exp(logits - top).sum())))).astype(np.float32)
    near = np.argpartition(-logits, num_best)[:num_best] if num_best < len(logits) else np.arange(len(logits))
    best = sorted(near.tolist(), key=lambda each: (-logits[each], each))
    return Score(token_id, float(logprobs[token_id]), tuple((each, float(logprobs[each])) for each in best))


class Scores:
    """Scores of one text by both models, for the tokens that each has read. Places count from the end of the prompt.

    Tokens before `first` are not scored. The draft model reads rows before or after the token at their place is
    settled. The target also judges tokens of earlier rounds, so a token may get a score late.
    """

    def __init__(self, num_best: int, first: int = 0) -> None:
        self.num_best, self._first = num_best, first
        self._rows: dict[int, Any] = {}  # the draft model's, of places that are not settled
        self._draft: dict[int, Score] = {}
        self._target: dict[int, Score] = {}

    def drafted(self, place: int, row: Any) -> None:
        """Keep the draft model's raw logits [vocab] for the token that will stand at `place`."""
        self._rows[place] = row.copy()

    def read(self, place: int, row: Any, token_id: int) -> None:
        """Score the committed token at `place` by the draft model's raw logits [vocab]."""
        if place >= self._first:
            self._draft[place] = score(row, token_id, self.num_best)

    def judged(self, place: int, scores: Seq[Score]) -> None:
        """Store the target's scores for the tokens from `place` on."""
        self._target |= dict(enumerate(scores, place))

    def settle(self, place: int, token_ids: Seq[int]) -> None:
        """Score these final tokens from `place` on. Rows that belong to rejected drafts are dropped."""
        rows, self._rows = self._rows, {}
        for at, token_id in enumerate(token_ids, place):
            if at in rows:
                self.read(at, rows[at], token_id)

    def between(self, start: int, end: int) -> tuple[Score, ...]:
        """Return the target's score for each token that it has judged, else the draft model's."""
        return tuple(self._target.get(place) or self._draft[place] for place in range(start, end))

    def of_both(self, start: int, end: int) -> tuple[tuple[Score | None, ...], tuple[Score | None, ...]]:
        """Return (the draft model's scores, the target's); None for a token that a model has not read."""
        places = range(start, end)
        return tuple(map(self._draft.get, places)), tuple(map(self._target.get, places))


def prompt_scores(engine: Engine, prompt: Prompt, num_best: int) -> Iterator[Score]:
    """Yield the scores of a prompt's tokens. Other threads may use the engine between forwards. Raises PromptError."""
    token_ids = prompt.token_ids
    yield Score(token_ids[0], None)
    with closing(engine.begin(token_ids, prompt.media)) as sequence:
        for start in range(0, len(token_ids) - 1, num_rows := min(engine.max_output_rows, _MOST_ROWS)):
            fed, following = token_ids[start : start + num_rows], token_ids[start + 1 : start + 1 + num_rows]
            with engine.floor:
                rows = sequence.extend(fed[: len(following)])
                scores = [score(row, each, num_best) for row, each in zip(rows, following, strict=True)]
            yield from scores
