"""Scores: log-probabilities of tokens by a model, from its raw logits at temperature 1."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import closing
from typing import Any

import numpy as np

from skydraft.engines.base import Engine
from skydraft.types import Prompt, Score

_MOST_ROWS = 64  # of one forward over a prompt: with 150,000 tokens in a vocabulary these are 40 MB


def score(row: Any, token_id: int, num_best: int) -> Score:
    """Rounded to single precision, as scores cross a link."""
    logits = row.astype(np.float64)
    top = float(logits.max())
    logprobs = (logits - (top + float(np.log(np.exp(logits - top).sum())))).astype(np.float32)
    near = np.argpartition(-logits, num_best)[:num_best] if num_best < len(logits) else np.arange(len(logits))
    best = sorted(near.tolist(), key=lambda each: (-logits[each], each))
    return Score(token_id, float(logprobs[token_id]), tuple((each, float(logprobs[each])) for each in best))


class Scores:
    """Scores of one text by both models, each where it read. Places count from the end of the prompt.

    Tokens before `first` are not scored. The draft model reads rows before it is settled which token stands there, or
    later; the target judges tokens of earlier rounds too, so what is known of a token may grow until the text ends.
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
        """Take the target's scores of the tokens from `place` on."""
        self._target |= dict(enumerate(scores, place))

    def settle(self, place: int, token_ids: Seq[int]) -> None:
        """These tokens stand from `place` on. What was drafted after another token than these is dropped."""
        rows, self._rows = self._rows, {}
        for at, token_id in enumerate(token_ids, place):
            if at in rows:
                self.read(at, rows[at], token_id)

    def between(self, start: int, end: int) -> tuple[Score, ...]:
        """Of each token, that of the target if it has judged it, else that of the draft model."""
        return tuple(self._target.get(place) or self._draft[place] for place in range(start, end))

    def of_both(self, start: int, end: int) -> tuple[tuple[Score | None, ...], tuple[Score | None, ...]]:
        """Those of the draft model and those of the target; None for a token of which a model knows nothing."""
        places = range(start, end)
        return tuple(map(self._draft.get, places)), tuple(map(self._target.get, places))


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
