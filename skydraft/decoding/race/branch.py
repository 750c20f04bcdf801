"""Drafts that arrive while the target writes: which drafts still fit the text, and how many a forward takes."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeAlias

from skydraft.engines.vocab import TokenIds
from skydraft.types import Draft

Came: TypeAlias = Callable[[int, Seq[int], int], None]  # gets the target's tokens: base, tokens, number of drafts
MAX_AHEAD, MAX_KEPT = 32, 64  # drafts beyond the text: made by a device; kept by a target
_PRIOR, _PRIOR_WEIGHT, _MEMORY = 0.7, 8.0, 64.0  # share, its weight, and memory, both in judged drafts
_MAY_DELAY = 1.1  # how much longer drafts may make a forward, if a text in it has none


class Worth:
    """The recent share of right drafts, at first `share`; `of` gets all notes, too."""

    def __init__(self, share: float = _PRIOR, of: "Worth | None" = None) -> None:
        self._num_right, self._num_judged, self._of = share * _PRIOR_WEIGHT, _PRIOR_WEIGHT, of

    @property
    def share(self) -> float:
        return self._num_right / self._num_judged

    def note(self, share: float, num: float = 1) -> None:
        """Record that the `share` of `num` judged drafts was right."""
        keeps = 1 - num / _MEMORY
        self._num_right = self._num_right * keeps + num * share
        self._num_judged = self._num_judged * keeps + num
        if self._of is not None:
            self._of.note(share, num)


class Branch:
    """The newest branch of drafts for one text: a run of drafts that continue each other.

    Drafts that do not fit are dropped without an error. Drafts for places that the target has written meanwhile are
    compared with the text; the first difference ends the branch.
    """

    def __init__(self, worth: Worth) -> None:
        self.worth, self.number = worth, 0
        self.has_begun = False  # whether the device has sent a draft
        self._base, self._token_ids = 0, list[int]()
        self._num_compared = 0  # drafts compared with the text
        self._is_dead = True  # takes no further drafts

    def take(self, draft: Draft, text: TokenIds) -> None:
        """Add drafts that arrive when the generated tokens are `text`."""
        self.has_begun = True
        if draft.branch:
            is_old = draft.branch < self.number or (draft.branch == self.number and self._is_dead)
            if is_old or draft.base > len(text):
                self._is_dead = True
                return
            self.after(text)  # counts the old branch's drafts first
            self.number, self._base, self._token_ids, self._num_compared = draft.branch, draft.base, [], 0
            self._is_dead = False
        if not self._is_dead:
            self._token_ids += draft.token_ids
            if len(self.after(text)) > MAX_KEPT:
                self._end()

    def after(self, text: TokenIds) -> tuple[int, ...]:
        """Return the drafts that may follow the generated tokens `text`."""
        end = len(text) - self._base
        begin, compared = self._base + self._num_compared, self._token_ids[self._num_compared : end]
        for token_id, written in zip(compared, text[begin : begin + len(compared)].tolist(), strict=False):
            self.worth.note(token_id == written)
            if token_id != written:
                self._end()
                return ()
        self._num_compared += len(compared)
        return tuple(self._token_ids[end:]) if end >= 0 else ()

    def _end(self) -> None:
        self._token_ids.clear()
        self._is_dead, self._num_compared = True, 0


def num_fed(
    num_rows: int, waiting: Seq[tuple[float, int]], max_rows: int, ms: Callable[[int], float], *, may_delay: bool
) -> list[int]:
    """Return how many drafts of each text to add to a forward of `num_rows` rows, for the most tokens a second.

    `waiting` has (worth, number of drafts) for each text; a draft counts only if all drafts before it are right. Unless
    it `may_delay`, the forward takes at most a tenth longer, since texts without drafts wait for it.
    """
    gains = sorted(
        ((worth**place, index) for index, (worth, num) in enumerate(waiting) for place in range(1, num + 1)),
        key=lambda gain: -gain[0],
    )
    plain_ms, tokens = ms(num_rows), float(num_rows)
    best, num_best = tokens / plain_ms, 0
    for num_more, (gain, _) in enumerate(gains[: max_rows - num_rows], 1):
        tokens, took_ms = tokens + gain, ms(num_rows + num_more)
        if tokens / took_ms > best and (may_delay or took_ms <= _MAY_DELAY * plain_ms):
            best, num_best = tokens / took_ms, num_more
    counts = [0] * len(waiting)
    for _, index in gains[:num_best]:
        counts[index] += 1
    return counts
