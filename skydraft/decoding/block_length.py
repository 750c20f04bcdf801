"""The length of a block and the turn of the target, if they are not fixed: what is worth its time.

All n drafts of a block stand with the chance S = (1 - risk 1) ... (1 - risk n). Then m more drafts gain S alpha + ... +
S alpha^m tokens, and cost their steps and the time of judging their rows. They are worth it if that time gives fewer
tokens otherwise, by the tokens per millisecond of the rounds so far, or of the target alone. The more tokens in a row
the draft model would have written as the target did, the likelier is the next one.
"""

import math
from bisect import bisect
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from skydraft.decoding.cost_model import CostModel, expected_tokens
from skydraft.decoding.turns import Turns, run_of
from skydraft.gating.calibration import BinShares, bin_of, counted_risks
from skydraft.gating.hand_back import HandBack
from skydraft.types import WRITE_ALL, Round, Signals, StepRecord

MAX_AUTO_K = 16
_PRIOR_WEIGHT = 8.0  # of what is assumed at first, in judged tokens
_MEMORY, _RISK_MEMORY = 200.0, 400.0  # judged tokens of a bin, of runs and of certainty; older ones fade
_RUNS = (1, 2, 3, 4, 6, 9, 16)  # lengths of runs that are told apart
# A little below the demo pair's on long texts (NOTES.md): a text that is easier to predict shows it soon.
PRIOR_BY_RUN = (0.62, 0.68, 0.71, 0.74, 0.76, 0.79, 0.86, 0.92)
_MIN_GAIN = 1.05  # what drafting must promise over the target alone
_SMOOTHING, _ROUND_SMOOTHING = 0.2, 0.05  # of times; of the tokens of a round, which vary a lot
_LEAST_SLOWDOWN = 1e-3  # a server may report any times, even 0 or negative ones
_MAY_LOSE, _FREE_TOKENS = 0.03, 4.0  # a share of the target's time, and that of so many tokens
_CURIOSITY = 0.01  # share of the target's time for blocks that do not seem to pay: the link or the text may change
_MOST_SAVED = 20.0  # tokens of the target; what was gained beyond that does not pay for later losses


class RunAcceptance(BinShares):
    """The chance that the next token is accepted after a run of agreements. Each length of run has its own."""

    def after(self, run: int) -> float:
        return self.of(bisect(_RUNS, run))

    def observe(self, run: int, agrees: Seq[bool | None]) -> int:
        """Count tokens that follow `run` agreements, but for forced ones; returns the run at their end."""
        for is_right in agrees:
            if is_right is not None:
                self.count(bisect(_RUNS, run), is_right)
            run = run_of([is_right], run)
        return run


class AutoTurns(Turns):
    """Turns and lengths that promise the most tokens a second: by `costs` at first, then by the times of rounds.

    With `may_stream` the target writes while that is faster, and the draft model reads along to notice a text that it
    can predict. What reading and blocks lose is bounded by a share of the time of the target alone. `prompt_ms` is how
    much later than the target the draft model has read the prompt, `read_ms` its time a token where it reads many.
    """

    def __init__(
        self, costs: CostModel, *, may_stream: bool = True, max_k: int = MAX_AUTO_K, prompt_ms: float = 0.0,
        read_ms: float = math.inf,
    ) -> None:  # fmt: skip
        super().__init__(max(min(max_k, MAX_AUTO_K), 1), HandBack())
        self.costs = costs
        self._risk = counted_risks(_RISK_MEMORY)
        self._by_run = RunAcceptance(PRIOR_BY_RUN, _PRIOR_WEIGHT, _MEMORY)
        self._run, self._may_stream = 0, may_stream
        self._prompt_ms, self._read_ms = prompt_ms, min(read_ms, costs.draft_ms)
        self._lost_ms = self._streamed_ms = self._queue_ms = 0.0
        typical = PRIOR_BY_RUN[len(PRIOR_BY_RUN) // 2]
        k = max(range(1, self._k + 1), key=lambda k: costs.tokens_per_s(typical, k))
        self._drafts, self._tokens = float(k), expected_tokens(typical, k)  # of a round, moving averages
        self._is_flowing = False  # the last token came from a stream that went on
        self._is_targets = may_stream and not self._pays(0)
        self._num_unread = int(self._is_targets)  # at first the prompt

    @property
    def _plain_ms(self) -> float:
        """Milliseconds a token of the target alone, which waits for its turn at each, as a block does once."""
        return self.costs.pass_ms(1) + (0.0 if self.costs.streams else self.costs.wire_ms) + self._queue_ms

    def _best(self, chance_of: Callable[[int], float], run: int, wire_ms: float) -> tuple[float, float]:
        """(milliseconds of the target alone for the tokens to expect, milliseconds) of the block that promises most."""
        chance, tokens, found = 1.0, 1.0, list[tuple[float, float]]()
        for k in range(1, self._k + 1):
            chance *= chance_of(run + k - 1)
            tokens += chance
            ms = k * self.costs.draft_ms + wire_ms + self.costs.verify_ms(chance_of(run), k)
            found.append((tokens * self._plain_ms, ms))
        return max(found, key=lambda each: each[0] / each[1])

    def _pays(self, run: int) -> bool:
        plain_ms, ms = self._best(self._by_run.after, run, self.costs.wire_ms)
        return plain_ms >= _MIN_GAIN * ms

    @property
    def _may_pay(self) -> bool:
        """Whether a block may pay after the longest run, if the link gets fast and the text easy."""
        plain_ms, ms = self._best(lambda run: PRIOR_BY_RUN[-1], 0, 0.0)
        return plain_ms >= _MIN_GAIN * ms

    def _may_lose(self, ms: float) -> bool:
        """Whether so many milliseconds more may be lost; in one process a short text never waits for a prompt."""
        free_tokens = 0.0 if self._prompt_ms and not self.costs.streams else _FREE_TOKENS
        return self._lost_ms + ms <= free_tokens * self._plain_ms + _MAY_LOSE * self._streamed_ms

    @property
    def _is_curious(self) -> bool:
        plain_ms, ms = self._best(self._by_run.after, self._run, self.costs.wire_ms)
        return max(self._lost_ms, 0.0) + max(ms - plain_ms, self._plain_ms) <= _CURIOSITY * self._streamed_ms

    @property
    def _shadow_ms(self) -> float:
        """How long the draft model may compute until the next token comes from a target on another machine."""
        return self._plain_ms if self.costs.streams else 0.0

    def to_write(self) -> int:
        return WRITE_ALL if self._may_stream and (self._is_targets or not self._pays(0)) else 0

    @property
    def reads(self) -> bool:
        """Whether a block may pay, and reading costs no time or little."""
        if not self._num_unread or not self._may_pay:
            return False
        late_ms = [max(ms - self._shadow_ms, 0.0) for ms in (self.costs.draft_ms, self._read_ms)]
        ms = self._prompt_ms + late_ms[0] + self._num_unread * late_ms[1]
        return not ms or self._may_lose(ms)

    def read(self, agrees: Seq[bool | None]) -> None:
        self._lost_ms, self._prompt_ms = self._lost_ms + self._prompt_ms, 0.0
        self._run = self._by_run.observe(self._run, agrees)
        if agrees:
            self._num_unread = 0
            self._decide()

    def _decide(self) -> None:
        drafts = (self._pays(self._run) and self._may_lose(0.0)) or self._is_curious
        self._is_targets = self._may_stream and not drafts

    def is_enough(self, signals: Seq[Signals]) -> bool:
        costs, num_drafts = self.costs, len(signals)
        alpha = self._by_run.after(self._run)
        round_ms = self._drafts * costs.draft_ms + costs.wire_ms + costs.verify_ms(alpha, round(self._drafts))
        speed = max(self._tokens / round_ms, 1 / self._plain_ms if self._may_stream else 0.0)  # tokens a millisecond
        chance = math.prod(1 - self._risk.of(bin_of(each)) for each in signals)
        gain, so_far_ms = 0.0, costs.verify_ms(alpha, num_drafts)
        for more in range(1, self._k - num_drafts + 1):
            chance *= self._by_run.after(self._run + num_drafts + more - 1)
            gain += chance
            if gain >= speed * (more * costs.draft_ms + costs.verify_ms(alpha, num_drafts + more) - so_far_ms):
                return False
        return True

    def observe(self, done: Round) -> None:
        record = done.record
        if record.outcome not in ("verified", "written"):
            return
        was_flowing, self._is_flowing = self._is_flowing, record.outcome == "written" and self._is_targets
        drafted = record.num_draft and not done.block.is_copied
        if drafted:
            self._learn(done, record)
        else:
            self._num_unread += record.num_committed
        # The first round includes the prefill, so its times tell nothing about steps.
        if record.round:
            self._count_loss(record)
            self._follow_costs(record, was_flowing=was_flowing)
        if self._may_stream and drafted:
            self._decide()

    def _count_loss(self, record: StepRecord) -> None:
        """Note the time beyond that of the target alone; that of reading the prompt was noted when it was read."""
        wall_ms = record.wall_ms - record.draft.prefill_ms
        if self._is_flowing:  # what a stream takes is the target's time, but for the reading that it waited for
            late_ms = max(record.draft.forward_ms - record.draft.prefill_ms - self._shadow_ms, 0.0)
            self._lost_ms += late_ms
            self._streamed_ms += max(wall_ms - late_ms, 0.0)
        else:
            self._lost_ms += wall_ms - record.num_committed * self._plain_ms
        self._lost_ms = max(self._lost_ms, -_MOST_SAVED * self._plain_ms)

    def _learn(self, done: Round, record: StepRecord) -> None:
        self._prompt_ms = 0.0  # it is read
        # Judging ends at the first difference: one more draft is judged than accepted, if any is left.
        stands = [True] * record.num_accepted + [False] * (record.num_accepted < record.num_draft)
        judged = [each for index, each in enumerate(stands) if not done.block.is_forced(index)]
        self._run = self._by_run.observe(self._run, judged)
        for signals, is_right in zip(done.block.free_signals, judged, strict=False):
            self._risk.count(bin_of(signals), not is_right)
        self._drafts = _moved(self._drafts, record.num_draft, _ROUND_SMOOTHING)
        self._tokens = _moved(self._tokens, record.num_committed, _ROUND_SMOOTHING)

    def _follow_costs(self, record: StepRecord, *, was_flowing: bool) -> None:
        costs, target = self.costs, record.target
        if 0 < record.draft.num_rows < 2 * record.draft.num_passes:  # many rows at once are no steps
            # A slow step includes the draft model's prefill.
            step_ms = (record.draft.forward_ms - record.draft.prefill_ms) / record.draft.num_passes
            costs = replace(costs, draft_ms=_moved(costs.draft_ms, min(step_ms, 3 * costs.draft_ms), _SMOOTHING))
        if target.num_passes:
            expected_ms = target.num_passes * costs.pass_ms(max(1, round(target.num_rows / target.num_passes)))
            slowdown = costs.slowdown * (target.forward_ms - target.prefill_ms) / expected_ms
            costs = replace(costs, slowdown=max(_moved(costs.slowdown, slowdown, _SMOOTHING), _LEAST_SLOWDOWN))
            self._queue_ms = _moved(self._queue_ms, max(target.queue_ms, 0.0) / target.num_passes, _SMOOTHING)
        if record.link.rtt_ms and (record.num_draft or not costs.streams):
            wire_ms = max(record.link.rtt_ms - target.forward_ms, 0.0)
            # A round that stopped a stream has waited for the end of it, too, so its wait is only a bound.
            weight = _SMOOTHING if not was_flowing else 0.5 if wire_ms < costs.wire_ms else 0.0
            costs = replace(costs, wire_ms=_moved(costs.wire_ms, wire_ms, weight))
        self.costs = costs


def _moved(old: float, new: float, weight: float) -> float:
    return (1 - weight) * old + weight * new
