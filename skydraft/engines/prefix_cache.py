"""Sequences after their use, so that a prompt that begins like theirs need not be fed again (prefix caching).

Rows of a prompt's part and single rows give other bits. So in exact execution no more is reused than whole parts of an
earlier prompt, which end at the same places in every prompt: what was kept may change how soon a token comes, not
which. What a chat template says before any text of a user is such a part too. It holds nothing of anybody, so it is
fed once and copied into every sequence that begins with it, whoever's that is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from skydraft.engines.vocab import TokenIds
from skydraft.types import Cost, Recordings, Reuse

if TYPE_CHECKING:
    from skydraft.engines.base import Engine, Sequence


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the parts of prompts end: where `beginning` does in those that begin with it, and at multiples of
    `part_len`."""

    part_len: int
    beginning: tuple[int, ...] = ()

    def begins(self, token_ids: Seq[int] | TokenIds) -> bool:
        """Whether these tokens begin with the beginning."""
        length = len(self.beginning)
        return 0 < length <= len(token_ids) and tuple(map(int, token_ids[:length])) == self.beginning

    def next_end(self, length: int, token_ids: Seq[int] | TokenIds) -> int:
        """Where the part of `token_ids` ends that begins at or before `length`."""
        end = (length // self.part_len + 1) * self.part_len
        return len(self.beginning) if length < len(self.beginning) < end and self.begins(token_ids) else end

    def last_end(self, token_ids: TokenIds) -> int:
        """Where the last whole part of `token_ids` ends; 0 where none does."""
        end = len(token_ids) // self.part_len * self.part_len
        return len(self.beginning) if end < len(self.beginning) and self.begins(token_ids) else end


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of a closed sequence: its KV, what that is of, and since when. It does not refer to its engine."""

    slot: Any
    token_ids: TokenIds
    whole_len: int
    media: Recordings
    reuse: Reuse
    since: float

    def shared_len(self, prompt: TokenIds, media: Recordings, reuse: Reuse, parts: Parts) -> int:
        """How many of its tokens a prompt may take over."""
        both = min(len(self.media), len(media))
        if self.reuse.scope != reuse.scope or self.media[:both] != media[:both]:
            return 0
        num_ids = min(len(self.token_ids), len(prompt) - 1)  # the last one is fed by the first `extend`
        differs = np.flatnonzero(self.token_ids[:num_ids] != prompt[:num_ids])
        shared = int(differs[0]) if len(differs) else num_ids
        # Outside a prompt, a token that means audio means nothing: none of those may be taken for speech.
        return parts.last_end(prompt[: min(shared, self.whole_len)]) if reuse.exact or media else shared


class PrefixCache:
    """The sequences of one engine that were closed, and how many are open.

    One with `reuse` is kept while there is room for it. All but `drop` want the engine's turn.
    """

    def __init__(self) -> None:
        self._beginning: tuple[int, ...] = ()
        self._begun: Sequence | None = None  # it holds the beginning, and nothing else
        self._dropped: list[Sequence] = []  # closed, and neither kept nor released yet
        self._kept: list[Kept] = []  # the longest kept first
        self._open: set[int] = set()  # by identity

    def share(self, beginning: Seq[int]) -> None:
        """Let prompts that begin with these tokens, nobody's text, share their KV. To be said before any prompt."""
        self._beginning = tuple(beginning)

    def parts(self, engine: Engine) -> Parts:
        """Where the parts of the engine's prompts end."""
        return Parts(engine.max_batch_rows, self._beginning)

    def begin(self, engine: Engine, prompt: Seq[int] | TokenIds, media: Recordings, reuse: Reuse | None) -> Sequence:
        """A sequence that holds what a kept one shares with `prompt`; an empty one where none shares a part of it.

        A kept one of which less than half is shared, another conversation with the same beginning, is taken only where
        there is no room beside it.
        """
        self.settle(engine)
        ids, part_len = np.asarray(prompt, np.int32), engine.max_batch_rows
        shared = [kept.shared_len(ids, media, reuse, self.parts(engine)) if reuse else 0 for kept in self._kept]
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

    def take_beginning(self, engine: Engine, sequence: Sequence, prompt: Seq[int] | TokenIds) -> None:
        """Copy the beginning of a prompt into its sequence, which is empty, where it was fed before."""
        length = len(self._beginning)
        if self._begun is None or sequence.length or length >= len(prompt) or not self.parts(engine).begins(prompt):
            return
        engine.copy(self._begun, sequence, length)
        sequence.record(self._beginning)
        sequence.whole_len = length
        sequence.prefill_cost += Cost(num_cached=length)

    def keep_beginning(self, engine: Engine, sequence: Sequence) -> None:
        """Keep the beginning of the first prompt that has fed it, where the engine has a place for it."""
        length = len(self._beginning)
        if self._begun is None and length <= sequence.length and self.parts(engine).begins(sequence.token_ids):
            slot = engine.allocate_beginning()
            if slot is not None:
                begun = engine.sequence(slot)
                engine.copy(sequence, begun, length)
                begun.record(self._beginning)
                self._begun = begun

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
