from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from skydraft.choosing.chooser import Chooser
from skydraft.config import DecodingParams
from skydraft.engines.base import Engine
from skydraft.engines.vocab import num_shared
from skydraft.types import Prompt

T = TypeVar("T")


class TextReader(Generic[T]):
    """Reads answers to a prompt: for each token it returns the model's own choice and the result of `look`.

    A beginning shared with the last text is not computed again. Each forward has at most `invariant_rows` rows, so the
    choices equal plain decoding bit for bit. `look` gets the raw logits [vocab] at a token, and the token.
    """

    def __init__(self, engine: Engine, prompt: Prompt, params: DecodingParams, look: Callable[[Any, int], T]) -> None:
        self._engine, self._look = engine, look
        self._chooser = Chooser(params, engine.vocab, len(prompt.token_ids))
        self._last = self._prompt = np.array(prompt.token_ids, np.int32)
        self._found: list[tuple[int, T]] = []
        self._sequence = engine.open(prompt.token_ids, prompt.media)

    def read(self, token_ids: Sequence[int]) -> list[tuple[int, T]]:
        whole = np.concatenate([self._prompt, np.array(token_ids, np.int32)])
        base = num_shared(whole, self._last)
        del self._found[base - len(self._prompt) :]
        self._last = whole
        self._sequence.align(whole[:base])
        # The forward of token n - 1 gives the row after n tokens.
        for start in range(base - 1, len(whole) - 1, self._engine.invariant_rows):
            rows = self._sequence.extend(whole[start : min(start + self._engine.invariant_rows, len(whole) - 1)])
            for index, row in enumerate(rows, start + 1):
                self._found.append((self._chooser.choose(row, whole[:index]), self._look(row, int(whole[index]))))
        return list(self._found)

    def close(self) -> None:
        self._sequence.close()
