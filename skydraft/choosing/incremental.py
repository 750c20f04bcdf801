"""What is known of a prefix, kept from one question to the next: a row costs what the prefix has that the last had not.

Nothing but a cache: every answer is a function of the prefix alone, and equal to one that begins anew. Comparing the
two prefixes reads 4 bytes a token, 4 microseconds for 16,000.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from skydraft.engines.base import TokenBuffer
from skydraft.engines.vocab import TokenIds

S = TypeVar("S")


class Follower(ABC):
    """Reads prefixes token by token, and back where one differs from the last. For one thread at a time."""

    def __init__(self) -> None:
        self._read = TokenBuffer()

    def follow(self, prefix: TokenIds) -> None:
        """Come to where `prefix` ends."""
        common = min(len(self._read), len(prefix))
        equal = self._read.view[:common] == prefix[:common]
        shared = common if equal.all() else int(equal.argmin())
        try:
            self._back(shared)
            self._read.truncate(shared)
            self._on(prefix[shared:])
            self._read.extend(prefix[shared:])
        except BaseException:  # half-way is nowhere: begin anew the next time
            self._back(0)
            self._read.truncate(0)
            raise

    @abstractmethod
    def _back(self, length: int) -> None:
        """Know the first `length` tokens only."""

    @abstractmethod
    def _on(self, token_ids: TokenIds) -> None:
        """Know these too."""


class Along(Follower, Generic[S]):
    """A state that grows along a prefix, from `start` by a `step` for each token. A row costs its new tokens."""

    def __init__(self, start: S, step: Callable[[S, int], S]) -> None:
        super().__init__()
        self._step = step
        self._states = [start]  # after each number of tokens

    def at(self, prefix: TokenIds) -> S:
        """The state after the tokens of `prefix`."""
        self.follow(prefix)
        return self._states[-1]

    def _back(self, length: int) -> None:
        del self._states[length + 1 :]

    def _on(self, token_ids: TokenIds) -> None:
        for token_id in token_ids.tolist():
            self._states.append(self._step(self._states[-1], token_id))


class Tally(Follower):
    """Which tokens a prefix holds, and how often. A row costs what is different in it, and its distinct tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[int, int] = {}  # in the order of first occurrence
        self._ids = TokenBuffer()  # the keys of it, as an array

    def distinct(self, prefix: TokenIds) -> TokenIds:
        """The tokens of `prefix`, each once; valid until the next question."""
        self.follow(prefix)
        return self._ids.view

    def counts(self, prefix: TokenIds) -> tuple[TokenIds, npt.NDArray[np.int64]]:
        """The tokens of `prefix`, each once, and how often each occurs."""
        self.follow(prefix)
        return self._ids.view, np.fromiter(self._counts.values(), np.int64, len(self._counts))

    def _back(self, length: int) -> None:
        for token_id in self._read.view[length:][::-1].tolist():
            left = self._counts.get(token_id, 0) - 1
            if left > 0:
                self._counts[token_id] = left
            elif left == 0:
                del self._counts[token_id]
        self._ids.truncate(len(self._counts))

    def _on(self, token_ids: TokenIds) -> None:
        for token_id in token_ids.tolist():
            if token_id in self._counts:
                self._counts[token_id] += 1
            else:
                self._counts[token_id] = 1
                self._ids.extend([token_id])
