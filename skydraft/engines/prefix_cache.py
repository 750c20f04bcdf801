"""Prefix caching: closed sequences keep their KV, so that a later prompt that begins alike feeds only its new text.

Feeding a part of a prompt gives other bits than feeding single rows. So exact execution reuses only whole parts of an
earlier prompt, which end at the same places in every prompt: caching changes when a token comes, never which. The chat
template's text before the first user text is a part too, fed once and copied into every sequence that begins with it.
What conversations of one owner have in common beyond it is copied too.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from skydraft.engines.model import Sequence
from skydraft.engines.vocab import TokenIds, num_shared
from skydraft.errors import EngineError
from skydraft.types import Cost, Recordings, Reuse

if TYPE_CHECKING:
    from skydraft.engines.base import Engine


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the parts of prompts end: at multiples of `part_len`, and at the end of `beginning` if a prompt has it."""

    part_len: int
    beginning: tuple[int, ...] = ()

    def begins(self, token_ids: Seq[int] | TokenIds) -> bool:
        length = len(self.beginning)
        return 0 < length <= len(token_ids) and tuple(map(int, token_ids[:length])) == self.beginning

    def next_end(self, length: int, token_ids: Seq[int] | TokenIds) -> int:
        """Where the part of `token_ids` ends that begins at or before `length`."""
        end = (length // self.part_len + 1) * self.part_len
        return len(self.beginning) if length < len(self.beginning) < end and self.begins(token_ids) else end

    def last_end(self, token_ids: Seq[int] | TokenIds) -> int:
        """Where the last whole part of `token_ids` ends; 0 where none does."""
        end = len(token_ids) // self.part_len * self.part_len
        return len(self.beginning) if end < len(self.beginning) and self.begins(token_ids) else end


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of a closed sequence, and since when. It does not refer to its engine."""

    slot: Any
    token_ids: TokenIds
    whole_len: int
    media: Recordings
    reuse: Reuse
    since: float


def _shared_len(held: Kept | Sequence, prompt: TokenIds, media: Recordings, reuse: Reuse, parts: Parts) -> int:
    both = min(len(held.media), len(media))
    if held.reuse is None or held.reuse.scope != reuse.scope or held.media[:both] != media[:both]:
        return 0
    shared = num_shared(held.token_ids, prompt[:-1])  # the last one is fed by the first `extend`
    # A token that means audio means nothing outside a prompt: it must not be taken for speech.
    return parts.last_end(prompt[: min(shared, held.whole_len)]) if reuse.exact or media else shared


class PrefixCache:
    """Closed sequences of one engine, kept while there is room, and how many are open. `drop` and `progress` need no
    floor."""

    def __init__(self) -> None:
        # All that are neither kept nor released. One that an interrupt dropped before anybody had it is no longer here.
        self._taken: weakref.WeakSet[Sequence] = weakref.WeakSet()
        self._progress: dict[int, tuple[int, int]] = {}  # by identity, of prompts that are being read
        self.beginning: tuple[int, ...] = ()  # whose KV all prompts share that begin so; set before any prompt
        self._begun: Sequence | None = None  # it holds the beginning, and nothing else
        self._dropped: list[Sequence] = []  # closed, and neither kept nor released yet
        self._kept: list[Kept] = []  # the longest kept first

    @property
    def num_open(self) -> int:
        """How many sequences are neither closed nor lost."""
        return len(self._taken) - len(self._dropped)

    @property
    def slots(self) -> list[Any]:
        """Those that hold something."""
        begun = [self._begun.slot] if self._begun else []
        return [*(each.slot for each in self._taken), *(each.slot for each in self._kept), *begun]

    @property
    def progress(self) -> tuple[int, int]:
        """Tokens read, and all tokens, of the prompts that are being read."""
        reading = list(self._progress.values())
        return sum(done for done, _ in reading), sum(all_of for _, all_of in reading)

    def begin(self, engine: Engine, prompt: Seq[int] | TokenIds, media: Recordings, reuse: Reuse | None) -> Sequence:
        """A sequence that holds the tokens that an earlier one shares with `prompt`; an empty one where none does.

        A kept one of which less than half is shared is another conversation with the same beginning: it is taken only
        where there is no room beside it, and else what is shared is copied.
        """
        self.settle(engine)
        ids = np.asarray(prompt, np.int32)
        source, length = self._source(engine, ids, media, reuse)
        is_full = len(self._taken) + len(self._kept) >= engine.max_sequences
        whole_len = min(length, source.whole_len) if source else 0
        if isinstance(source, Kept) and (is_full or 2 * length >= source.whole_len):
            self._kept = [each for each in self._kept if each is not source]
            sequence = Sequence(engine, source.slot, media, reuse, source.token_ids[:length], whole_len)
        else:
            self.make_room(engine, 1)
            sequence = Sequence(engine, engine.allocate(len(ids)), media, reuse)
        self._taken.add(sequence)
        try:
            if sequence.length:
                engine.roll_back(sequence, length)
            elif source and engine.can_copy:
                self._give(engine, Sequence(engine, source.slot), sequence, ids[:length], whole_len)
        except BaseException:
            sequence.discard()
            raise
        return sequence

    def _source(
        self, engine: Engine, ids: TokenIds, media: Recordings, reuse: Reuse | None
    ) -> tuple[Kept | Sequence | None, int]:
        """What shares most with a prompt, a kept one rather than an open one, and how much; None where nothing does."""
        parts, found = Parts(engine.max_batch_rows, self.beginning), list[Kept | Sequence](self._kept)
        found += [each for each in self._taken if engine.can_copy and not each.is_closed]
        shared = [_shared_len(each, ids, media, reuse, parts) if reuse else 0 for each in found]
        length = max(shared, default=0)
        return (found[shared.index(length)], length) if length >= parts.part_len else (None, 0)

    @staticmethod
    def _give(
        engine: Engine, source: Sequence, sequence: Sequence, token_ids: Seq[int] | TokenIds, whole_len: int
    ) -> None:
        """Copy the KV of these tokens into an empty sequence. Where that fails it stays empty, and they are read."""
        with suppress(EngineError, MemoryError):
            engine.copy(source, sequence, len(token_ids))
            if engine.kv_length(sequence) == len(token_ids):
                sequence.record(token_ids)
                sequence.whole_len = whole_len
                sequence.prefill_cost += Cost(num_cached=len(token_ids))
                return
        engine.roll_back(sequence, 0)

    def feed(self, engine: Engine, sequence: Sequence, prompt: Seq[int] | TokenIds) -> bool:
        """Feed the next part; returns whether there is more. Parts end at the same places whatever was reused."""
        parts = Parts(engine.max_batch_rows, self.beginning)
        begins = parts.begins(prompt[:-1])
        if self._begun and not sequence.length and begins:
            self._give(engine, self._begun, sequence, self.beginning, len(self.beginning))
        start, end = sequence.length, len(prompt) - 1
        part_end = parts.next_end(start, prompt)
        chunk = prompt[start : min(part_end, end)]
        if len(chunk):
            began = time.perf_counter()
            try:
                engine.feed([(sequence, chunk)], want_logits=False)
                if sequence.length == part_end and sequence.whole_len == start == parts.last_end(prompt[:start]):
                    sequence.whole_len = part_end
                    if begins and not self._begun and part_end >= len(self.beginning):
                        self._keep_beginning(engine, sequence)
            finally:
                ms = (time.perf_counter() - began) * 1e3
                sequence.prefill_cost += Cost(forward_ms=ms, prefill_ms=ms)
        self._progress[id(sequence)] = sequence.length, end
        has_more = sequence.length < end
        if not has_more or sequence.is_closed:  # perhaps meanwhile, which `drop` has noted too early
            self._progress.pop(id(sequence), None)
        return has_more

    def _keep_beginning(self, engine: Engine, sequence: Sequence) -> None:
        if (slot := engine.allocate_beginning(len(self.beginning))) is not None:
            begun = Sequence(engine, slot)
            self._give(engine, sequence, begun, self.beginning, len(self.beginning))
            self._begun = begun if begun.length else None

    def drop(self, sequence: Sequence) -> None:
        self._progress.pop(id(sequence), None)
        self._dropped.append(sequence)

    def settle(self, engine: Engine) -> None:
        while self._dropped:
            done = self._dropped.pop()
            if done not in self._taken:
                continue  # two threads have closed it
            self._taken.remove(done)
            if done.reuse and done.length:
                now, ids = time.perf_counter(), done.token_ids.copy()
                self._kept.append(Kept(done.slot, ids, done.whole_len, done.media, done.reuse, now))
            else:
                engine.release(done)
        self.make_room(engine, 0)

    def make_room(self, engine: Engine, num_wanted: int) -> None:
        while self._kept and (
            len(self._taken) + num_wanted + len(self._kept) > engine.max_sequences
            or (engine.slots and engine.slots.is_full)
        ):
            engine.release(Sequence(engine, self._kept.pop(0).slot))

    def forget(self, engine: Engine, older_than_s: float) -> None:
        self.settle(engine)
        latest = time.perf_counter() - older_than_s
        while self._kept and self._kept[0].since <= latest:
            engine.release(Sequence(engine, self._kept.pop(0).slot))
