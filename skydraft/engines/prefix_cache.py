"""Sequences after their use, so that a prompt that begins like theirs need not be fed again (prefix caching).

Rows of a prompt's part and single rows give other bits. So in exact execution no more is reused than whole parts of an
earlier prompt, which end at the same places in every prompt: what was kept may change how soon a token comes, not
which.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from skydraft.engines.vocab import TokenIds
from skydraft.types import Recordings, Reuse

if TYPE_CHECKING:
    from skydraft.engines.base import Engine, Sequence


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of a closed sequence: its KV, what that is of, and since when. It does not refer to its engine."""

    slot: Any
    token_ids: TokenIds
    whole_len: int
    media: Recordings
    reuse: Reuse
    since: float

    def shared_len(self, prompt: TokenIds, media: Recordings, reuse: Reuse, part_len: int) -> int:
        """How many of its tokens a prompt may take over."""
        both = min(len(self.media), len(media))
        if self.reuse.scope != reuse.scope or self.media[:both] != media[:both]:
            return 0
        num_ids = min(len(self.token_ids), len(prompt) - 1)  # the last one is fed by the first `extend`
        differs = np.flatnonzero(self.token_ids[:num_ids] != prompt[:num_ids])
        shared = int(differs[0]) if len(differs) else num_ids
        # Outside a prompt, a token that means audio means nothing: none of those may be taken for speech.
        return min(shared, self.whole_len) // part_len * part_len if reuse.exact or media else shared


class PrefixCache:
    """The sequences of one engine that were closed, and how many are open.

    One with `reuse` is kept while there is room for it. All but `drop` want the engine's turn.
    """

    def __init__(self) -> None:
        self._dropped: list[Sequence] = []  # closed, and neither kept nor released yet
        self._kept: list[Kept] = []  # the longest kept first
        self._open: set[int] = set()  # by identity

    def begin(self, engine: Engine, prompt: Seq[int] | TokenIds, media: Recordings, reuse: Reuse | None) -> Sequence:
        """A sequence that holds what a kept one shares with `prompt`; an empty one where none shares a part of it.

        A kept one of which less than half is shared, another conversation with the same beginning, is taken only where
        there is no room beside it.
        """
        self.settle(engine)
        ids, part_len = np.asarray(prompt, np.int32), engine.max_batch_rows
        shared = [kept.shared_len(ids, media, reuse, part_len) if reuse else 0 for kept in self._kept]
        length = max(shared, default=0)
        is_full = len(self._open) + len(self._kept) >= engine.max_sequences
        if length < part_len or (2 * length < self._kept[shared.index(length)].whole_len and not is_full):
            self._make_room(engine, 1)
            sequence = engine.sequence(engine.allocate(), media, reuse)
            self._open.add(id(sequence))
            return sequence
        kept = self._kept.pop(shared.index(length))
        sequence = engine.sequence(kept.slot, media, reuse, kept.token_ids[:length], min(kept.whole_len, length))
        self._open.add(id(sequence))
        try:
            engine.roll_back(sequence, length)
        except BaseException:
            sequence.discard()
            raise
        return sequence

    def drop(self, sequence: Sequence) -> None:
        """Note that a sequence was closed."""
        self._dropped.append(sequence)

    def settle(self, engine: Engine) -> None:
        """Keep or release what was closed."""
        while self._dropped:
            done = self._dropped.pop()
            if id(done) not in self._open:
                continue  # two threads have closed it
            self._open.remove(id(done))
            if done.reuse and done.length:
                now, ids = time.perf_counter(), done.token_ids.copy()
                self._kept.append(Kept(done.slot, ids, done.whole_len, done.media, done.reuse, now))
            else:
                engine.release(done)
        self._make_room(engine, 0)

    def _make_room(self, engine: Engine, num_wanted: int) -> None:
        while self._kept and len(self._open) + num_wanted + len(self._kept) > engine.max_sequences:
            engine.release(engine.sequence(self._kept.pop(0).slot))

    def forget(self, engine: Engine, older_than_s: float) -> None:
        """Release what has been kept for so long."""
        self.settle(engine)
        latest = time.perf_counter() - older_than_s
        while self._kept and self._kept[0].since <= latest:
            engine.release(engine.sequence(self._kept.pop(0).slot))
