"""Where blocks should end in lossless decoding: replayed on committed records, with stated times.

    python -m bench.lengths [FOLDER] [--draft-ms 12] [--target-ms 45]

Along the target's own texts of a comparison, with the draft model's signals there: tokens a second of streaming, of the
best fixed k, and of `--k auto`, over round trips. Simulated: a draft step and a forward, whatever its rows, take what
is stated; nothing is run.
"""

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.workload import labelled
from skydraft.decoding.block_length import AutoTurns
from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.turns import Turns
from skydraft.evaluation.records import read_records
from skydraft.gating.fitting import LabelledText
from skydraft.gating.hand_back import HandBack
from skydraft.types import WRITE_ALL, Cost, DraftBlock, LinkCost, Round, StepRecord

_FOLDER = Path(__file__).parent.parent / "docs" / "report-zh-dev"
ROUND_TRIPS = (0, 10, 20, 40, 60, 80, 120, 150)
FIXED = range(1, 13)
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

    @property
    def acceptance(self) -> float:
        return self.num_accepted / max(self.num_draft, 1)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=_FOLDER, help="with the records.jsonl of a comparison")
    parser.add_argument("--draft-ms", type=float, default=12.0)
    parser.add_argument("--target-ms", type=float, default=45.0)
    asked = parser.parse_args()
    records = read_records(asked.folder / "records.jsonl")
    alone = {(line.prompt, line.token_ids) for line in records.generations if line.mode == "cloud"}
    texts = [labelled(line, "target") for line in records.scores if (line.prompt, line.token_ids) in alone]
    links = {f"{rtt} ms": (lambda base, rtt=rtt: float(rtt)) for rtt in ROUND_TRIPS}
    links |= {"10, 120, 10 ms": lambda base: 120.0 if 12 <= base < 24 else 10.0}
    print(f"{len(texts)} texts; t_d {asked.draft_ms:g} ms, t_v {asked.target_ms:g} ms; tokens/s, simulated")
    print(f"{'round trip':<16}{'stream':>8}{'best k':>14}{'auto':>10}{'/ max':>8}{'/ stream':>10}"
          f"{'never streams':>16}{'/ best':>8}{'acceptance':>12}")  # fmt: skip
    for name, rtt_ms in links.items():
        times = Times(asked.draft_ms, asked.target_ms, rtt_ms)
        print(f"{name:<16}{line(texts, times)}")


def line(texts: list[LabelledText], times: Times) -> str:
    plain = over(texts, times, partial(fixed, 0))
    by_k = {k: over(texts, times, partial(fixed, k)) for k in FIXED}
    k = max(by_k, key=lambda k: by_k[k].tokens_per_s)
    auto = over(texts, times, lambda: AutoTurns(times.costs))
    always = over(texts, times, lambda: AutoTurns(times.costs, may_stream=False))
    best = max(plain.tokens_per_s, by_k[k].tokens_per_s)
    return (
        f"{plain.tokens_per_s:>8.1f}{by_k[k].tokens_per_s:>8.1f} (k={k:>2}){auto.tokens_per_s:>10.1f}"
        f"{auto.tokens_per_s / best:>8.2f}{auto.tokens_per_s / plain.tokens_per_s:>10.2f}"
        f"{always.tokens_per_s:>16.1f}{always.tokens_per_s / by_k[k].tokens_per_s:>8.2f}{always.acceptance:>12.2f}"
    )


if __name__ == "__main__":
    main()
