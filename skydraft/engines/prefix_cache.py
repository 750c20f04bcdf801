"""Prefix caching: closed sequences keep their KV, so that a later prompt with the same beginning feeds only new text.

Feeding a part of a prompt gives other bits than feeding single rows. So exact execution reuses only whole parts of an
earlier prompt, which end at the same places in every prompt: caching never changes a token. The chat template's text
before the first user text is also a part. It is fed once and copied into every sequence that begins with it. Longer
beginnings that conversations of one owner share are copied too.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from skydraft.engines.model import Sequence
from skydraft.engines.vocab import TokenIds, num_shared
from skydraft.errors import EngineError, or_else
from skydraft.types import Cost, Recordings, Reuse

if TYPE_CHECKING:
    from skydraft.engines.base import Engine


def part_ends(token_ids: Seq[int] | TokenIds, part_len: int, beginning: tuple[int, ...]) -> list[int]:
    """Return the ends of a prompt's parts, and 0: multiples of `part_len`, and the end of `beginning` if present."""
    ends = {*range(0, len(token_ids) + 1, part_len)}
    return sorted(ends | {len(beginning)} if _begins(token_ids, beginning) else ends)


def _begins(token_ids: Seq[int] | TokenIds, beginning: tuple[int, ...]) -> bool:
    length = len(beginning)
    return 0 < length <= len(token_ids) and tuple(map(int, token_ids[:length])) == beginning


class PrefixCache:
    """Kept and open sequences of one engine. `drop` and `progress` need no lock."""

    def __init__(self) -> None:
        # Sequences neither kept nor released. Weak, so that one lost to an interrupt does not stay.
        self._taken: weakref.WeakSet[Sequence] = weakref.WeakSet()
        self._progress: dict[int, tuple[int, int]] = {}  # by identity, of prompts that are being read
        self.beginning: tuple[int, ...] = ()  # prompts that begin with it share its KV; set before any prompt
        self._begun: Sequence | None = None  # holds exactly the beginning
        self._dropped: list[Sequence] = []  # closed, and neither kept nor released yet
        self._kept: dict[Sequence, float] = {}  # closed sequences and their times, oldest first

    @property
    def num_open(self) -> int:
        """Number of open sequences."""
        return len(self._taken) - len(self._dropped)

    @property
    def slots(self) -> list[Any]:
        """Slots in use."""
        return [each.slot for each in (*self._taken, *self._kept, self._begun) if each]

    @property
    def progress(self) -> tuple[int, int]:
        """(Tokens read, all tokens) of the prompts that are being read."""
        reading = list(self._progress.values())
        return sum(done for done, _ in reading), sum(all_of for _, all_of in reading)

    def begin(self, engine: Engine, prompt: Seq[int] | TokenIds, media: Recordings, reuse: Reuse | None) -> Sequence:
        """Open a sequence with the tokens that an earlier one shares with `prompt`; empty if none does.

        If less than half of a kept sequence is shared, it is another conversation with the same beginning. Then the
        shared part is copied; the sequence itself is taken only if there is no room for another.
        """
        self.settle(engine)
        ids = np.asarray(prompt, np.int32)
        source, length = self._source(engine, ids, media, reuse)
        is_full = len(self._taken) + len(self._kept) >= engine.max_sequences
        whole_len = min(length, source.whole_len) if source else 0
        if source and source in self._kept and (is_full or 2 * length >= source.whole_len):
            del self._kept[source]
            sequence = Sequence(engine, source.slot, media, reuse, source.token_ids[:length], whole_len)
        else:
            self.make_room(engine, 1)
            sequence = Sequence(engine, engine.allocate(len(ids)), media, reuse)
        self._taken.add(sequence)
        with or_else(sequence.discard):
            if sequence.length:
                engine.roll_back(sequence, length)
            elif source and engine.can_copy:
                self._give(engine, source, sequence, ids[:length], whole_len)
        return sequence

    def _source(
        self, engine: Engine, ids: TokenIds, media: Recordings, reuse: Reuse | None
    ) -> tuple[Sequence | None, int]:
        """Return (the sequence that shares most with a prompt, shared length), kept ones first; None if too little."""
        found = [*self._kept, *(each for each in self._taken if engine.can_copy and not each.is_closed)]
        shared = [self._shared_len(engine, each, ids, media, reuse) if reuse else 0 for each in found]
        length = max(shared, default=0)
        return (found[shared.index(length)], length) if length >= engine.max_batch_rows else (None, 0)

    def _shared_len(self, engine: Engine, held: Sequence, prompt: TokenIds, media: Recordings, reuse: Reuse) -> int:
        both = min(len(held.media), len(media))
        if held.reuse is None or held.reuse.scope != reuse.scope or held.media[:both] != media[:both]:
            return 0
        shared = num_shared(held.token_ids, prompt[:-1])  # the first `extend` feeds the last token
        # A generated audio token is no speech, so with media only prompt parts are shared.
        whole = prompt[: min(shared, held.whole_len)]
        return part_ends(whole, engine.max_batch_rows, self.beginning)[-1] if reuse.exact or media else shared

    @staticmethod
    def _give(
        engine: Engine, source: Sequence, sequence: Sequence, token_ids: Seq[int] | TokenIds, whole_len: int
    ) -> None:
        """Copy the KV of these tokens into an empty sequence. If that fails it stays empty, and they will be fed."""
        with suppress(EngineError, MemoryError):
            engine.copy(source, sequence, len(token_ids))
            if engine.kv_length(sequence) == len(token_ids):
                sequence.record(token_ids)
                sequence.whole_len = whole_len
                sequence.prefill_cost += Cost(num_cached=len(token_ids))
                return
        engine.roll_back(sequence, 0)

    def feed(self, engine: Engine, sequence: Sequence, prompt: Seq[int] | TokenIds) -> bool:
        """Feed the next part; returns whether there is more. Parts end at the same places, with or without reuse."""
        begins, end = _begins(prompt[:-1], self.beginning), len(prompt) - 1
        if self._begun and not sequence.length and begins:
            self._give(engine, self._begun, sequence, self.beginning, len(self.beginning))
        ends, start = part_ends(prompt[:-1], engine.max_batch_rows, self.beginning), sequence.length
        part_end = next((each for each in ends if each > start), end)
        if start < part_end:
            began = time.perf_counter()
            try:
                engine.feed([(sequence, prompt[start:part_end])], want_logits=False)
                if sequence.whole_len == start and {start, part_end} <= {*ends}:
                    sequence.whole_len = part_end
                    if begins and not self._begun and part_end >= len(self.beginning):
                        self._keep_beginning(engine, sequence)
            finally:
                ms = (time.perf_counter() - began) * 1e3
                sequence.prefill_cost += Cost(forward_ms=ms, prefill_ms=ms)
        self._progress[id(sequence)] = sequence.length, end
        has_more = sequence.length < end
        if not has_more or sequence.is_closed:  # closed meanwhile: `drop` came before the line above
            self._progress.pop(id(sequence), None)
        return has_more

    def _keep_beginning(self, engine: Engine, sequence: Sequence) -> None:
        if engine.can_copy:
            begun = Sequence(engine, engine.allocate(len(self.beginning)))
            self._give(engine, sequence, begun, self.beginning, len(self.beginning))
            self._begun = begun if begun.length else None

    def drop(self, sequence: Sequence) -> None:
        self._progress.pop(id(sequence), None)
        self._dropped.append(sequence)

    def settle(self, engine: Engine) -> None:
        while self._dropped:
            done = self._dropped.pop()
            if done not in self._taken:
                continue  # two threads closed it
            self._taken.remove(done)
            if done.reuse and done.length:
                self._kept[done] = time.perf_counter()
            else:
                engine.release(done)
        self.make_room(engine, 0)

    def make_room(self, engine: Engine, num_wanted: int) -> None:
        while self._kept and (
            len(self._taken) + num_wanted + len(self._kept) > engine.max_sequences
            or (engine.slots and engine.slots.is_full)
        ):
            self._release_oldest(engine)

    def forget(self, engine: Engine, older_than_s: float) -> None:
        self.settle(engine)
        latest = time.perf_counter() - older_than_s
        while self._kept and next(iter(self._kept.values())) <= latest:
            self._release_oldest(engine)

    def _release_oldest(self, engine: Engine) -> None:
        oldest = next(iter(self._kept))
        del self._kept[oldest]
        engine.release(oldest)
