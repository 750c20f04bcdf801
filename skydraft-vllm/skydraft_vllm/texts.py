"""The texts with drafts from devices: find their rows in a step, and choose how many drafts to check."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
TAIL = 8  # tokens before a draft that must equal the text's
_KEPT = 64  # tokens to keep before the newest ones
_FEW, _NONE = 0.2, 0.05  # below these shares of right drafts a text gets half its drafts; one every `_REST` tokens
_REST = 64
_PRIOR, _WEIGHT, _MEMORY = 0.7, 8.0, 64.0
_MAY_DELAY = 1.1  # the most that drafts may slow a step in which some text has none
_NUM_TIMES, _KNOWN, _TRY_AGAIN = 9, 3, 256  # times kept for a number of rows; times needed; steps between trials


class Row(NamedTuple):
    """A row of a step. The first `length` ids of `token_ids`, an array of vLLM, are the text."""

    at: int
    length: int
    token_ids: Ids


@dataclass(eq=False)
class Text:
    """A device's request; vLLM has its `name`, too. `ids` has the prompt's last tokens, then the text as the device
    expects it: tokens that vLLM has written, then drafts."""

    name: str
    prompt_len: int
    ids: list[int]
    share: float = _PRIOR
    num_judged: float = _WEIGHT
    given: tuple[int, list[int]] = (0, [])  # (the text's length before the last drafts, these drafts)
    offset: int = field(init=False)

    def __post_init__(self) -> None:
        self.offset = self.prompt_len - len(self.ids)

    def go_on(self, place: int, token_ids: list[int]) -> None:
        """Replace the tokens from `place` after the prompt. Do nothing if earlier tokens are missing."""
        begin = self.prompt_len - self.offset + place
        if 0 <= begin <= len(self.ids):
            self.ids[begin:] = token_ids
            spare = max(begin - _KEPT, 0)
            self.offset += spare
            del self.ids[:spare]

    def matches(self, row: Row) -> bool:
        """Return whether the row ends with the tokens that the device expects."""
        place = row.length - self.offset
        num = min(TAIL, place)
        if row.length <= self.prompt_len - 1 or not 0 < place <= len(self.ids):
            return False
        return bool(row.token_ids[row.length - num : row.length].tolist() == self.ids[place - num : place])

    def drafts(self, row: Row, most: int) -> list[int]:
        """Return at most `most` drafts: fewer if many were wrong, one now and then if nearly all were."""
        if self.share < _NONE:
            most = min(most, int(row.length % _REST == 0))
        elif self.share < _FEW:
            most = (most + 1) // 2
        place = row.length - self.offset
        return self.ids[place : place + max(most, 0)]

    def judge(self, row: Row) -> None:
        """Update the share of right drafts from the row's new tokens."""
        length, drafts = self.given
        self.given = 0, []
        if not drafts or row.length <= length:
            return
        written = row.token_ids[length : min(row.length, length + len(drafts))].tolist()
        for index, token_id in enumerate(drafts):
            is_right = index < len(written) and written[index] == token_id
            weight = min(self.num_judged + 1, _MEMORY)
            self.share += (is_right - self.share) / weight
            self.num_judged = weight
            if not is_right:
                break


class Times:
    """Times of steps by their number of rows: medians of the time between two calls."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._ms: dict[int, float] = {}  # medians of numbers measured at least `_KNOWN` times
        self._num_steps = 0

    def note(self, num_rows: int, ms: float) -> None:
        seen = self._seen.setdefault(num_rows, deque(maxlen=_NUM_TIMES))
        seen.append(ms)
        if len(seen) >= _KNOWN:
            self._ms[num_rows] = median(seen)

    def best(self, num_rows: int, gains: npt.NDArray[np.float64], *, may_delay: bool) -> int:
        """Return how many drafts give the most tokens a second beside `num_rows` rows. `gains` has their expected
        tokens, largest first. Where times are unknown, return all, so that they get measured."""
        self._num_steps += 1
        if num_rows not in self._ms or self._num_steps % _TRY_AGAIN == 0:
            return len(gains)
        known = sorted(num for num in self._ms if num >= num_rows)
        took = np.interp(num_rows + np.arange(len(gains) + 1), known, [self._ms[num] for num in known])
        speeds = (num_rows + np.concatenate(([0.0], np.cumsum(gains)))) / took
        if not may_delay:
            speeds[took > _MAY_DELAY * took[0]] = 0.0
        return int(np.argmax(speeds))


class Texts:
    """All texts, under one lock: vLLM's thread calls `drafts_for`, the port's threads call the rest.

    A step takes at most `most` drafts of a text. Ids are below `vocab_size`; a text has at most `max_len` tokens.
    """

    def __init__(self, most: int, vocab_size: int, max_len: int) -> None:
        self.most, self.vocab_size, self.max_len = most, vocab_size, max_len
        self._lock = threading.Lock()
        self._texts = dict[str, Text]()  # by name
        self._times = Times()
        # Time, lengths and number of rows of the last step, unless it read a prompt.
        self._last: tuple[float, Sequence[int], int] | None = None

    @property
    def is_empty(self) -> bool:
        return not self._texts

    def add(self, text: Text) -> None:
        with self._lock:
            self._texts[text.name] = text

    def go_on(self, text: Text, place: int, token_ids: list[int]) -> None:
        with self._lock:
            text.go_on(place, token_ids)

    def end(self, text: Text) -> None:
        with self._lock:
            if self._texts.get(text.name) is text:
                del self._texts[text.name]

    def drafts_for(
        self, sampled: Sequence[Sequence[int]], lengths: Sequence[int], token_ids: Ids,
        named: Mapping[str, tuple[int, int]], now: float,
    ) -> list[list[int]]:  # fmt: skip
        """Return drafts for each row of a step that ended at `now`. `named` has (row, prompt length) by name."""
        num_rows = len(sampled)
        before = [length - len(ids) for length, ids in zip(lengths, sampled, strict=True)]
        drafts: list[list[int]] = [[] for _ in sampled]
        with self._lock:
            found = self._found(sampled, lengths, token_ids, named)
            if self._last is not None and self._last[1] == before:  # no other step ran for these rows in between
                self._times.note(self._last[2], (now - self._last[0]) * 1e3)
            waiting = [(text, row, text.drafts(row, self._most(row))) for text, row in found]
            lengths_of = np.array([len(ids) for _, _, ids in waiting], int)
            shares = np.array([text.share for text, _, _ in waiting])
            # A draft is useful only if all drafts before it are right.
            gains: npt.NDArray[np.float64] = shares[:, None] ** np.arange(1, self.most + 1)
            gains[np.arange(self.most) >= lengths_of[:, None]] = 0.0
            order = np.argsort(-gains, axis=None)[: lengths_of.sum()]
            num = self._times.best(num_rows, gains.ravel()[order], may_delay=len(found) == num_rows)
            counts = np.bincount(order[:num] // self.most, minlength=len(waiting)).tolist()
            for (text, row, ids), count in zip(waiting, counts, strict=True):
                drafts[row.at] = ids[:count]
                text.given = row.length, ids[:count]
            self._last = (now, lengths, num_rows + num) if all(sampled) else None
        return drafts

    def _most(self, row: Row) -> int:
        return min(self.most, self.max_len - row.length - 1)

    def _found(
        self, sampled: Sequence[Sequence[int]], lengths: Sequence[int], token_ids: Ids,
        named: Mapping[str, tuple[int, int]],
    ) -> list[tuple[Text, Row]]:  # fmt: skip
        """Return the texts found in this step, with their rows. Rows move between steps, so compare each time."""
        found = list[tuple[Text, Row]]()
        for name, (index, prompt_len) in named.items():
            text, row = self._texts.get(name), Row(index, lengths[index], token_ids[index])
            if text and text.prompt_len == prompt_len and sampled[index] and text.matches(row):
                text.judge(row)
                found.append((text, row))
        return found
