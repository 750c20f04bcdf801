"""Lossless texts replayed with stated times, as the tests of `AutoTurns` compare block lengths.

Simulated: a draft step and a forward, whatever its rows, take what is stated; nothing is run.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from skydraft.decoding.block_length import AutoTurns
from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.turns import Turns
from skydraft.gating.fitting import LabelledText
from skydraft.gating.hand_back import HandBack
from skydraft.types import WRITE_ALL, Cost, DraftBlock, LinkCost, Round, StepRecord

_AT_ONCE = 16  # tokens that the draft model reads in one forward


@dataclass
class Replayed:
    """Sums over texts."""

    num_tokens: int = 0
    num_draft: int = 0
    num_accepted: int = 0
    spent_ms: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.num_tokens / self.spent_ms


@dataclass(frozen=True)
class Times:
    """Milliseconds of a draft step, a forward of the target, and a round trip that may change within a text.

    Unless the target `streams`, both models compute in turn, in one process.
    """

    draft_ms: float
    target_ms: float
    rtt_ms: Callable[[int], float]
    streams: bool = True

    @property
    def costs(self) -> CostModel:
        return CostModel(self.draft_ms, (self.target_ms,) * 16, 16, wire_ms=self.rtt_ms(0), streams=self.streams)


def replay(text: LabelledText, turns: Turns, times: Times, total: Replayed) -> None:
    """One text, its rounds added to `total`. The draft model reads along while the target writes, if it is asked to."""
    base = number = num_unread = num_crossing = 0
    is_writing, size = False, len(text.disagrees)
    while base < size:
        read: tuple[bool, ...] = ()
        read_ms = 0.0
        if turns.reads:
            read_ms = 0.0 if times.streams else times.draft_ms * math.ceil(num_unread / _AT_ONCE)
            read = tuple(not wrong for wrong in text.disagrees[base - num_unread : base])
            turns.read(read)
            num_unread = 0
        rtt_ms, spent_ms = times.rtt_ms(base), 0.0
        if turns.longest() and is_writing:  # a stop crosses what the target writes meanwhile
            is_writing, num_crossing, spent_ms = False, int(rtt_ms / times.target_ms), rtt_ms
        is_written = is_writing or num_crossing > 0
        block = range(0) if is_written else _drafted(text, base, turns)
        accepted = next((i for i in range(len(block)) if text.disagrees[base + i]), len(block))
        committed = min(accepted + 1, size - base)
        waited_ms = times.target_ms if is_writing else 0.0 if is_written else times.target_ms + rtt_ms
        spent_ms += read_ms + times.draft_ms * len(block) + waited_ms
        is_writing = is_writing or (turns.to_write() > 0 and not is_written and accepted < max(len(block), 1))
        num_crossing = max(num_crossing - 1, 0)
        num_unread += committed if not block else 0
        record = StepRecord(
            number, base, len(block), accepted, committed, "written" if is_written else "verified", "always",
            spent_ms, 0.0, draft=Cost(len(block), len(block), read_ms + times.draft_ms * len(block)),
            target=Cost(1, len(block) + 1, times.target_ms), link=LinkCost(waited_ms),
        )  # fmt: skip
        signals = tuple(text.signals[base : base + len(block)])
        turns.observe(Round(record, DraftBlock(base, tuple(range(len(block))), signals, read=read), (), ()))
        total.num_tokens += committed
        total.num_draft += len(block)
        total.num_accepted += accepted
        total.spent_ms += spent_ms
        base, number = base + committed, number + 1


def _drafted(text: LabelledText, base: int, turns: Turns) -> range:
    longest = min(turns.longest(), len(text.disagrees) - base)
    for num in range(1, longest + 1):
        if isinstance(turns, AutoTurns) and turns.is_enough(text.signals[base : base + num]):
            return range(num)
    return range(longest)


def fixed(k: int) -> Turns:
    """Blocks of `k` tokens; with 0 the target streams."""
    return Turns(k, HandBack(0 if k else WRITE_ALL))


def over(texts: Iterable[LabelledText], times: Times, make: Callable[[], Turns]) -> Replayed:
    total = Replayed()
    for text in texts:
        replay(text, make(), times, total)
    return total
