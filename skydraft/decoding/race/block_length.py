"""Rounds of two models on the same processor: blocks are drafted only while they beat the target alone."""

from collections.abc import Sequence as Seq

from skydraft.decoding.race.branch import Worth
from skydraft.decoding.race.cost_model import CostModel, Losses
from skydraft.decoding.turns import Turns
from skydraft.gating.hand_back import HandBack
from skydraft.types import WRITE_ALL, Round

MAX_BLOCK_LEN = 16
TYPICAL, EASY = 0.75, 0.95  # share of right drafts: in an unknown text; in a text that repeats itself
_MIN_GAIN = 1.02
_SAMPLE = 32  # tokens of the target that show how well the draft model knows a text
_FREE_TOKENS = 8.0  # reading may cost the target's time for this many tokens
_BLOCKS_MAY_LOSE = 2.0  # more tokens, so that one bad block after reading does not end drafting


class Blocks(Turns):
    """Chooses the best block length by `costs` and the share of right drafts.

    At first the target writes. Then the draft model reads its prompt of `num_prompt` tokens and the text. It drafts
    while that should be faster than the target alone. A share of the target's time bounds the expected loss.
    """

    def __init__(self, costs: CostModel, read_ms: float, num_prompt: int, max_k: int = MAX_BLOCK_LEN) -> None:
        super().__init__(1, HandBack())
        self._costs, self._read_ms, self._max_k = costs, read_ms, max(min(max_k, MAX_BLOCK_LEN), 1)
        self._worth, self._is_targets = Worth(TYPICAL), True
        self._num_unread, self._num_fresh = num_prompt, 0  # fresh: since the model has read
        self._losses = Losses(costs.plain_ms, _FREE_TOKENS)
        self._may_pay = costs.best(EASY, self._max_k)[1] >= _MIN_GAIN

    def longest(self) -> int:
        return 0 if self._is_targets else self._k

    def to_write(self) -> int:
        return WRITE_ALL if self._is_targets else 0

    @property
    def reads(self) -> bool:
        wants = self._is_targets and self._may_pay and self._num_fresh >= _SAMPLE
        return wants and self._losses.allow(self._num_unread * self._read_ms)

    def read(self, agrees: Seq[bool | None]) -> None:
        if not agrees:
            return
        self._losses.note(self._num_unread * self._read_ms)
        self._num_unread = self._num_fresh = 0
        for each in agrees[-_SAMPLE:]:
            self._worth.note(bool(each), each is not None)
        self._decide()

    def _decide(self) -> None:
        self._k, gain = self._costs.best(self._worth.share, self._max_k)
        self._is_targets = gain < _MIN_GAIN or not self._losses.allow(more=_BLOCKS_MAY_LOSE)

    def observe(self, done: Round) -> None:
        record, costs = done.record, self._costs
        if not record.num_draft or done.block.is_copied:
            self._losses.wrote(record.num_committed)
            self._num_unread += record.num_committed
            self._num_fresh += record.num_committed
            return
        for index in range(min(record.num_accepted + 1, record.num_draft)):
            self._worth.note(index < record.num_accepted)
        spent_ms = record.num_draft * costs.draft_ms + costs.verify_ms(self._worth.share, record.num_draft)
        self._losses.note(spent_ms, record.num_committed)
        self._decide()
