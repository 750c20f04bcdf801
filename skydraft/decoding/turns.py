"""Who writes next: the draft model, a block that the target may judge, or the target alone."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from skydraft.gating.hand_back import HandBack
from skydraft.types import Round, Signals


class Turns:
    """Blocks of at most `k` tokens, the first one of at most `opening`; after a correction the target writes on as
    `hand_back` says. With `streams` it is the target's turn at first, and after each verdict."""

    def __init__(self, k: int, hand_back: HandBack, opening: int = 0, *, streams: bool = False) -> None:
        self._k, self._opening = k, max(opening, k)
        self._hand_back = hand_back
        self._is_targets = self._streams = streams
        self._num_written = self._num_agreed = 0  # in the target's turn; agreed: the last ones, without a gap
        self._num_unread = 0

    def longest(self) -> int:
        """The most tokens of the next block; 0 while it is the target's turn."""
        return 0 if self._is_targets else self._opening

    def end_of_opening(self, is_unsure: Callable[[Seq[Signals]], bool]) -> Callable[[Seq[Signals]], bool] | None:
        """What ends a first block beyond `k`: that the draft model is unsure. None if it is as long as the others."""
        if self._opening == self._k:
            return None
        return lambda signals: self._k <= len(signals) < self._opening and is_unsure(signals)

    def to_write(self) -> int:
        """How many more tokens the target may write after its next verdict, if it corrects the block."""
        return max(self._hand_back.num_tokens - (self._num_written + 1 if self._is_targets else 0), 0)

    @property
    def reads(self) -> bool:
        """Whether the draft model reads along now: also what crosses the stop, which teaches."""
        return self._hand_back.reads and self._num_unread > 0

    def read(self, agrees: Seq[bool | None]) -> None:
        """Take in which of the last tokens the draft model would have written itself; none until all are read."""
        if agrees:
            self._num_unread = 0
        for each in agrees:
            self._num_agreed = run_of([each], self._num_agreed)
            self._end_if_over()

    def hand_back(self) -> None:
        """End the target's turn."""
        self._is_targets = False

    def observe(self, done: Round) -> None:
        """Take in a committed round. A correction begins the target's turn."""
        record, self._opening = done.record, self._k
        if record.num_draft and record.outcome != "written":
            is_corrected = record.outcome == "verified" and (record.num_accepted < record.num_draft or self._streams)
            self._is_targets, self._num_written, self._num_agreed, self._num_unread = is_corrected, 0, 0, 0
        else:
            self._num_written += record.num_committed
            self._num_unread += record.num_committed
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._hand_back.is_over(self._num_written, self._num_agreed):
            self.hand_back()


def run_of(agrees: Seq[bool | None], before: int) -> int:
    """Length of the run of agreements at the end, if `before` agreements preceded these. A token that the grammar
    forces (None) says nothing about the model: it neither extends nor breaks a run."""
    for each in agrees:
        before = before if each is None else before + 1 if each else 0
    return before
