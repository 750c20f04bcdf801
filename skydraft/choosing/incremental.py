"""Caches for growing prefixes: a call costs the tokens that differ from the last call's prefix. Results never change.

Comparing the two prefixes reads 4 bytes a token: 4 microseconds for 16,000 tokens.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from skydraft.engines.base import TokenBuffer
from skydraft.engines.vocab import TokenIds, num_shared

S = TypeVar("S")


class Follower(TokenBuffer, ABC):
    """Reads prefixes token by token, and goes back to the first difference. For one thread at a time.

    If `_back` or `_on` raises, it holds only tokens that were fully processed.
    """

    def follow(self, prefix: TokenIds) -> None:
        shared = num_shared(self.token_ids, prefix)
        self._back(shared)
        self._cut(shared)
        self._on(prefix[shared:])
        self._add(prefix[shared:])

    @abstractmethod
    def _back(self, length: int) -> None:
        """Forget all tokens after the first `length`."""

    @abstractmethod
    def _on(self, token_ids: TokenIds) -> None: ...


class Along(Follower, Generic[S]):
    """The state after a prefix: `start`, then one `step` for each token. A call costs the new tokens."""

    def __init__(self, start: S, step: Callable[[S, int], S]) -> None:
        super().__init__()
        self._step, self._states = step, [start]  # the state after each token

    def at(self, prefix: TokenIds) -> S:
        self.follow(prefix)
        return self._states[-1]

    def _back(self, length: int) -> None:
        del self._states[length + 1 :]

    def _on(self, token_ids: TokenIds) -> None:
        for token_id in token_ids.tolist():
            self._states.append(self._step(self._states[-1], token_id))


class Tally(Follower):
    """Counts of the tokens in a prefix, or in its last `window` tokens. A call costs the changed tokens or the window,
    and the distinct tokens."""

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self._window, self._counts = window, Counter[int]()

    def counts(self, prefix: TokenIds) -> tuple[TokenIds, npt.NDArray[np.int64]]:
        if self._window:
            return np.unique(prefix[-self._window :], return_counts=True)
        self.follow(prefix)
        sizes = self._counts.values()
        return np.fromiter(self._counts, np.int32, len(sizes)), np.fromiter(sizes, np.int64, len(sizes))

    def _back(self, length: int) -> None:
        for token_id in self.token_ids[length:].tolist():
            _uncount(self._counts, token_id)

    def _on(self, token_ids: TokenIds) -> None:
        self._counts.update(token_ids.tolist())


class Repeats(Follower):
    """The tokens after each run of `size` - 1 tokens in a prefix. A call costs the new tokens and one run."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._run_len = size - 1
        self._followers = defaultdict[bytes, Counter[int]](Counter)  # by run: counts of the tokens after it

    def after(self, prefix: TokenIds) -> TokenIds:
        """Return the distinct tokens that followed earlier copies of the last run; none for a shorter prefix."""
        self.follow(prefix)
        after = self._followers.get(self._key(prefix, len(prefix)), ()) if len(prefix) >= self._run_len else ()
        return np.fromiter(after, np.int32, len(after))

    def _key(self, token_ids: TokenIds, end: int) -> bytes:
        # Hashed, since a run may be long.
        return hashlib.blake2b(token_ids[end - self._run_len : end].tobytes(), digest_size=16).digest()

    def _back(self, length: int) -> None:
        known = self.token_ids
        for end in range(len(known) - 1, max(length, self._run_len) - 1, -1):
            counts = self._followers[key := self._key(known, end)]
            _uncount(counts, int(known[end]))
            if not counts:
                del self._followers[key]

    def _on(self, token_ids: TokenIds) -> None:
        run_len, before = self._run_len, self.token_ids
        tokens = np.concatenate((before[max(len(before) - run_len, 0) :], token_ids))
        for end in range(max(len(tokens) - len(token_ids), run_len), len(tokens)):
            self._followers[self._key(tokens, end)][int(tokens[end])] += 1


def _uncount(counts: Counter[int], token_id: int) -> None:
    counts[token_id] -= 1
    if not counts[token_id]:
        del counts[token_id]
