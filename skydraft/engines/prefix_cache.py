"""Prefix caching: closed sequences keep their KV, so that a later prompt that begins alike feeds only its new text.

Feeding a part of a prompt gives other bits than feeding single rows. So exact execution reuses only whole parts of an
earlier prompt, which end at the same places in every prompt: caching changes when a token comes, never which. The chat
template's text before the first user text is a part too, fed once and copied into every sequence that begins with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from skydraft.engines.model import Model, Sequence
from skydraft.engines.vocab import TokenIds, num_shared
from skydraft.types import Cost, Recordings, Reuse


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

    def shared_len(self, prompt: TokenIds, media: Recordings, reuse: Reuse, parts: Parts) -> int:
        both = min(len(self.media), len(media))
        if self.reuse.scope != reuse.scope or self.media[:both] != media[:both]:
            return 0
        shared = num_shared(self.token_ids, prompt[:-1])  # the last one is fed by the first `extend`
        # A token that means audio means nothing outside a prompt: it must not be taken for speech.
        return parts.last_end(prompt[: min(shared, self.whole_len)]) if reuse.exact or media else shared


class PrefixCache:
    """Closed sequences of one engine, kept while there is room, and how many are open. `drop` alone needs no floor."""

    def __init__(self) -> None:
        self._beginning: tuple[int, ...] = ()
        self._begun: Sequence | None = None  # it holds the beginning, and nothing else
        self._dropped: list[Sequence] = []  # closed, and neither kept nor released yet
        self._kept: list[Kept] = []  # the longest kept first
        self._open: set[int] = set()  # by identity

    @property
    def beginning(self) -> tuple[int, ...]:
        return self._beginning

    @property
    def num_open(self) -> int:
        """How many sequences are neither kept nor released."""
        return len(self._open) - len(self._dropped)

    def share(self, beginning: Seq[int]) -> None:
        """Let all prompts that begin with these tokens share their KV. To be called before any prompt."""
        self._beginning = tuple(beginning)

    def begin(self, engine: Model, prompt: Seq[int] | TokenIds, media: Recordings, reuse: Reuse | None) -> Sequence:
        """A sequence that holds the tokens that a kept one shares with `prompt`; an empty one where none shares a part.

        A kept one of which less than half is shared is another conversation with the same beginning: it is taken only
        where there is no room beside it.
        """
        self.settle(engine)
        ids, parts = np.asarray(prompt, np.int32), Parts(engine.max_batch_rows, self._beginning)
        shared = [kept.shared_len(ids, media, reuse, parts) if reuse else 0 for kept in self._kept]
        length = max(shared, default=0)
        is_full = len(self._open) + len(self._kept) >= engine.max_sequences
        if length < parts.part_len or (2 * length < self._kept[shared.index(length)].whole_len and not is_full):
            self._make_room(engine, 1)
            sequence = Sequence(engine, engine.allocate(), media, reuse)
            self._open.add(id(sequence))
            return sequence
        kept = self._kept.pop(shared.index(length))
        whole_len = min(kept.whole_len, length)
        sequence = Sequence(engine, kept.slot, media, reuse, kept.token_ids[:length], whole_len)
        self._open.add(id(sequence))
        try:
            engine.roll_back(sequence, length)
        except BaseException:
            sequence.discard()
            raise
        return sequence

    def feed(self, engine: Model, sequence: Sequence, prompt: Seq[int] | TokenIds) -> bool:
        """Feed the next part; returns whether there is more. Parts end at the same places whatever was reused."""
        parts = Parts(engine.max_batch_rows, self._beginning)
        begins = parts.begins(prompt[:-1])
        if self._begun and not sequence.length and begins:
            self._copy_beginning(engine, self._begun, sequence)
        start, end = sequence.length, len(prompt) - 1
        part_end = parts.next_end(start, prompt)
        chunk = prompt[start : min(part_end, end)]
        if len(chunk):
            began = time.perf_counter()
            try:
                engine.forward([(sequence, chunk)], want_logits=False)
                sequence.record(chunk)
                if sequence.length == part_end and sequence.whole_len == start == parts.last_end(prompt[:start]):
                    sequence.whole_len = part_end
                    if begins and not self._begun and part_end >= len(self._beginning):
                        self._keep_beginning(engine, sequence)
            finally:
                ms = (time.perf_counter() - began) * 1e3
                sequence.prefill_cost += Cost(forward_ms=ms, prefill_ms=ms)
        return sequence.length < end

    def _copy_beginning(self, engine: Model, source: Sequence, target: Sequence) -> None:
        length = len(self._beginning)
        engine.copy(source, target, length)
        target.record(self._beginning)
        target.whole_len = length
        target.prefill_cost += Cost(num_cached=length)

    def _keep_beginning(self, engine: Model, sequence: Sequence) -> None:
        if (slot := engine.allocate_beginning()) is not None:
            begun = Sequence(engine, slot)
            self._copy_beginning(engine, sequence, begun)
            self._begun = begun

    def drop(self, sequence: Sequence) -> None:
        self._dropped.append(sequence)

    def settle(self, engine: Model) -> None:
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

    def _make_room(self, engine: Model, num_wanted: int) -> None:
        while self._kept and len(self._open) + num_wanted + len(self._kept) > engine.max_sequences:
            engine.release(Sequence(engine, self._kept.pop(0).slot))

    def forget(self, engine: Model, older_than_s: float) -> None:
        self.settle(engine)
        latest = time.perf_counter() - older_than_s
        while self._kept and self._kept[0].since <= latest:
            engine.release(Sequence(engine, self._kept.pop(0).slot))
