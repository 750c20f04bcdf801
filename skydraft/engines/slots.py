"""Slots limit how many texts a model and its adapters write at a time, and how many of these are long. Others wait."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from itertools import takewhile
from typing import TYPE_CHECKING, TypeAlias

from skydraft.errors import EngineBusy, EngineError

if TYPE_CHECKING:
    from skydraft.engines.base import Engine

SHORT = 4096  # tokens; a longer text needs a slot for long texts
_lock = threading.RLock()  # reentrant: the garbage collector may give slots back anywhere in this file
_LOOK_S = 0.01


class Slots:
    """The slots of one model and its adapters: `num` sequences, with memory for `total_len` tokens together.

    Each sequence has room for a short text. A text that has grown long waits for a long slot and keeps its short one
    meanwhile. This cannot deadlock, since holders of a long slot wait for nothing more.
    """

    def __init__(self, name: str, num: int, context_len: int, total_len: int = 0, wait_s: float = 300.0) -> None:
        self.name, self.num, self.wait_s = name, num, wait_s
        self.total_len = total_len or num * context_len
        self.short_len = min(SHORT, context_len)
        more_len = context_len - self.short_len
        self.num_long = min((self.total_len - num * self.short_len) // more_len, num) if more_len else num
        self.num_long = max(self.num_long, 1)
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self.holders: set[Seats] = set()
        self.line: list[Seats] = []  # in order of arrival

    @property
    def is_full(self) -> bool:
        """Whether sequences use more memory than allowed; then no closed ones are kept."""
        return sum(engine.num_cells for engine in [*self.engines]) > self.total_len


_Kind: TypeAlias = tuple[Slots, bool]  # True: the slots for long texts


class Seats:
    """The slots of one text on its models. It takes all that it needs at once, so that no two texts wait for each
    other."""

    def __init__(self, engines: Iterable[Engine | None]) -> None:
        self._engines = [each for each in engines if each is not None and each.slots]
        self._has, self._wants = Counter[_Kind](), Counter[_Kind]()
        self._thread = 0  # the last thread that took slots
        self._is_over = False

    def take(self, num_tokens: int = 0) -> float:
        """Wait for the slots of a text of `num_tokens`. Returns the number of tokens that it now has room for; 0 if the
        wait was ended. Raises EngineError."""
        needs = Counter((each.slots, False) for each in self._engines if each.slots)
        needs += Counter((slots, True) for slots, _ in needs.elements() if num_tokens > slots.short_len)
        if not self._is_over and needs - self._has:
            self._wait(needs)
        if needs - self._has:
            return 0
        return min((slots.short_len for slots, _ in needs if not needs[slots, True]), default=math.inf)

    def _wait(self, needs: Counter[_Kind]) -> None:
        late_at = time.monotonic() + min(slots.wait_s for slots, _ in needs)
        try:
            while (full := self._granted(needs)) is not None:
                self._check(full, late_at - time.monotonic())
                time.sleep(_LOOK_S)  # polls, since Ctrl-C may break any way to wake a thread
        finally:
            self._leave()

    def _granted(self, needs: Counter[_Kind]) -> Slots | None:
        """Take all `needs`, or wait in line; returns the slots that are missing."""
        with _lock:
            self._thread, self._wants = threading.get_ident(), needs - self._has
            for slots, _ in self._wants:
                if self not in slots.line:
                    slots.line.append(self)
            full = None if self._is_over else self._full()
            if full is None and not self._is_over:
                self._has = needs
                for slots, _ in needs:
                    slots.holders.add(self)
            return full

    def _leave(self) -> None:
        with _lock:
            for slots, _ in self._wants | self._has:
                slots.line[:] = [each for each in slots.line if each is not self]

    def end_wait(self) -> None:
        """Take no slots from now on. Any thread may call this, and `give_back`."""
        self._is_over = True

    def give_back(self) -> None:
        with _lock:
            self._is_over = True
            for slots, _ in self._has:
                slots.holders.discard(self)
            self._leave()  # after an interrupt it may still be in line
            self._has = Counter()

    def _full(self) -> Slots | None:
        """Return slots with too few free ones for this text, after current holders and texts before it in line."""
        for kind, num in self._wants.items():
            slots, is_long = kind
            taken = sum(each._has[kind] for each in slots.holders)
            taken += sum(each._wants[kind] for each in takewhile(lambda each: each is not self, slots.line))
            if taken + num > (slots.num_long if is_long else slots.num):
                return slots
        return None

    def _check(self, full: Slots, left_s: float) -> None:
        for engine in self._engines:
            engine.lock.check_open()
        for (slots, is_long), num in self._wants.items():
            if num > (slots.num_long if is_long else slots.num):
                hint = f"Load it with parallel={num}."
                raise EngineError(f"This text needs {num} sequences of {slots.name}.", hint=hint)
        holders = {each._thread for each in full.holders if each is not self}
        # Only in the main thread: in a pool, another thread may continue a text that this one began.
        is_own = holders == {self._thread} and self._thread == threading.main_thread().ident
        if is_own or left_s <= 0:
            why = "by an unfinished generation of this thread" if is_own else f"and none was free in {full.wait_s:g} s"
            hint = "End or close() each generation, or load the model with parallel=4, for example."
            raise EngineBusy(f"All sequences of {full.name} are in use, {why}.", hint=hint)
