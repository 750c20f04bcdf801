"""Who writes next: the draft model, in a block that the target may judge, or the target alone."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from skydraft.gating.hand_back import HandBack
from skydraft.types import Round, Signals


class Turns:
    """The draft model writes blocks of up to `k` tokens, the first of up to `opening`. After a correction the target
    writes until `hand_back` ends it. With `streams` the target writes first, and after each verdict."""

    def __init__(self, k: int, hand_back: HandBack, opening: int = 0, *, streams: bool = False) -> None:
        self._k, self._opening = k, max(opening, k)
        self._hand_back = hand_back
        self._is_targets = self._streams = streams
        self._num_written = self._num_agreed = 0  # by the target now; its last tokens in a row that the drafter shares
        self._num_unread = 0

    def longest(self) -> int:
        """Return the longest next block in tokens; 0 while the target writes."""
        return 0 if self._is_targets else self._opening

    def end_of_opening(self, is_unsure: Callable[[Seq[Signals]], bool]) -> Callable[[Seq[Signals]], bool] | None:
        """Return the test that ends a first block beyond `k` once the draft model is unsure; None without `opening`."""
        if self._opening == self._k:
            return None
        return lambda signals: self._k <= len(signals) < self._opening and is_unsure(signals)

    def to_write(self) -> int:
        """Return how many tokens the target may write after its next verdict, if it corrects the block."""
        return max(self._hand_back.num_tokens - (self._num_written + 1 if self._is_targets else 0), 0)

    @property
    def reads(self) -> bool:
        """Whether the draft model should read the target's tokens now. Learning also uses those after a hand-back."""
        return self._hand_back.reads and self._num_unread > 0

    def read(self, agrees: Seq[bool | None]) -> None:
        """Record, for each token just read, whether the draft model agrees. Empty until all are read."""
        if agrees:
            self._num_unread = 0
        for each in agrees:
            self._num_agreed = run_of([each], self._num_agreed)
            self._end_if_over()

    def hand_back(self) -> None:
        """Let the draft model write next."""
        self._is_targets = False

    def observe(self, done: Round) -> None:
        """Record a committed round. After a correction the target writes next."""
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
    """Return the length of the run of agreements at the end, after a run of `before`. A forced token (None) says
    nothing about the model: it neither extends nor breaks a run."""
    for each in agrees:
        before = before if each is None else before + 1 if each else 0
    return before
