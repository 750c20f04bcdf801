"""Rounds of two models that compute in turn, on the same processor: blocks only while they beat the target alone."""

from skydraft.decoding.branch import Worth
from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.turns import Turns
from skydraft.gating.hand_back import HandBack
from skydraft.types import Round

MAX_BLOCK_LEN = 16
TYPICAL = 0.75  # of drafts are right, where nothing is known of a text
_MIN_GAIN = 1.02
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # tokens that the target writes alone after blocks did not pay


class Blocks(Turns):
    """Blocks of the length that `costs` promise most of, by the share of drafts that were right so far.

    Where none promises more than the target alone, the target writes, and a block is tried again after some tokens.
    Before its first block the draft model has to read the prompt, in `prompt_ms`: the target writes until the text is
    long enough for that to pay.
    """

    def __init__(self, costs: CostModel, prompt_ms: float, max_k: int = MAX_BLOCK_LEN) -> None:
        self._costs, self._max_k = costs, max(min(max_k, MAX_BLOCK_LEN), 1)
        self._worth, self._pause = Worth(TYPICAL), _FIRST_PAUSE
        _, gain = costs.best(TYPICAL, self._max_k)
        saved_ms = costs.plain_ms * (1 - 1 / gain)  # by each token
        self._num_left = round(prompt_ms / saved_ms) if gain >= _MIN_GAIN else _LONGEST_PAUSE
        super().__init__(self._length(), HandBack())
        self._is_targets = self._num_left > 0

    def _length(self) -> int:
        k, gain = self._costs.best(self._worth.share, self._max_k)
        return k if gain >= _MIN_GAIN else 0

    def longest(self) -> int:
        return 0 if self._is_targets else self._k

    def to_write(self) -> int:
        return max(self._num_left - 1, 0) if self._is_targets else 0

    def observe(self, done: Round) -> None:
        record = done.record
        if self._is_targets:
            self._num_left -= record.num_committed
            self._is_targets = self._num_left > 0
        elif record.num_draft and not done.block.is_copied and record.outcome == "verified":
            for index in range(min(record.num_accepted + 1, record.num_draft)):
                self._worth.note(index < record.num_accepted)
        if not self._is_targets and not (length := self._length()):
            self._is_targets, self._num_left = True, self._pause
            self._pause, self._worth = min(2 * self._pause, _LONGEST_PAUSE), Worth(TYPICAL)
        elif not self._is_targets:
            self._k = length
