"""The calibrated gate: skip what is expected to leave the text in agreement with the target, and watch if it does."""

from __future__ import annotations

from collections.abc import Sequence

from skydraft.engines.vocab import Vocab
from skydraft.gating.calibration import Calibration
from skydraft.gating.gates import GateSpec, History, Reason, text_reason
from skydraft.types import DraftBlock, Round, Signals

_PRIOR = 4.0  # expected disagreements by which the calibration outweighs what is seen in one text


class CalibratedGate:
    """Holds the agreement of one generation.

    A block is escalated when its risk, the sum of the chances that the target disagrees with its tokens, exceeds the
    limit that gave the wanted agreement, with blocks of up to `k` tokens, when the gate was calibrated. The controller:
    audits tell which skipped tokens the target would have written too, and risks are multiplied by
    (4 + disagreements seen) / (4 + disagreements expected among the audited tokens), so a text that is harder than the
    calibration thought is escalated more. Where nothing is ever escalated, nothing is audited.
    """

    def __init__(self, spec: GateSpec, calibration: Calibration, k: int) -> None:
        self._spec = spec
        self._calibration = calibration
        self._limit = calibration.limit(spec.threshold, k)
        self._unaudited: list[float] = []  # risks of tokens committed since the last verdict
        self._num_seen = 0.0
        self._num_expected = 0.0

    @property
    def correction(self) -> float:
        """By what risks are multiplied."""
        return (_PRIOR + self._num_seen) / (_PRIOR + self._num_expected)

    def is_unsure(self, signals: Sequence[Signals]) -> bool:
        """Whether tokens with these signals, skipped together, are expected to disagree too much."""
        return self.correction * sum(map(self._calibration.risk, signals)) > self._limit

    def reason(self, history: History, block: DraftBlock, vocab: Vocab) -> Reason:
        """Why the block has to be escalated, or "" to skip it."""
        if not block.token_ids:
            return "always"
        return "uncertain" if self.is_unsure(block.free_signals) else text_reason(self._spec, history, block, vocab)

    def _risks(self, block: DraftBlock) -> list[float]:
        """The chance that the target disagrees, for each token; it cannot where a grammar allows nothing else."""
        risks = map(self._calibration.risk, block.signals)
        return [0.0 if block.is_forced(index) else risk for index, risk in enumerate(risks)]

    def observe(self, done: Round) -> None:
        """Take in a committed round: risks of what it skipped, or audits of what was skipped before."""
        if done.record.outcome != "verified":
            self._unaudited += self._risks(done.block)
            return
        self._num_expected += sum(self._unaudited[: len(done.audit)])
        self._num_seen += done.audit.count(False)
        self._unaudited.clear()
