"""Which blocks to check, and what ends one, replayed along the target's own texts of comparisons, hand-back `agree:4`.

    python -m bench.ends [FOLDER …]

A line each: tokens kept, texts in which a wrong token is kept, calls a token, written, rows, and steps of the draft
model. Replayed: a real run leaves a text after a wrong token, and then differs more.
"""

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.workload import labelled
from skydraft.evaluation.records import read_records
from skydraft.gating.fitting import LabelledText
from skydraft.types import Signals

_FOLDER = Path(__file__).parent.parent / "docs" / "report-zh-dev"
_AGREED = 4
_EndsBlock = Callable[[Sequence[Signals]], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """Blocks of at most `k`; checked above `nats` at a token, and those that begin among the first `start` tokens."""

    name: str
    k: int
    nats: float = -1.0
    start: int = 0
    ends: _EndsBlock = lambda block: False


def product_below(least: float) -> _EndsBlock:
    return lambda block: math.prod(token.top_prob for token in block) < least


def rules() -> Iterator[Rule]:
    yield Rule("3.25 nats", 6, 3.25)
    yield Rule("2 nats + 32", 6, 2.0, 32)
    yield Rule("1 nat + 32", 16, 1.0, 32)
    for k in (6, 16, 24, 32):
        yield Rule("always", k)
    for nats in (1.0, 1.5, 2.0, 2.5):
        yield Rule(f"token > {nats} nats", 16, ends=lambda block, nats=nats: block[-1].entropy > nats)
    for nats in (3.0, 4.0, 6.0):
        yield Rule(f"sum > {nats} nats", 16, ends=lambda block, nats=nats: sum(token.entropy for token in block) > nats)
    for prob in (0.3, 0.4):
        yield Rule(f"token < {prob}", 16, ends=lambda block, prob=prob: block[-1].top_prob < prob)
    for prob in (0.5, 0.3, 0.2, 0.1, 0.05):
        yield Rule(f"block < {prob}", 16, ends=product_below(prob))
    for k in (24, 32):
        yield Rule("block < 0.2", k, ends=product_below(0.2))


def replay(text: LabelledText, rule: Rule) -> Counter[str]:
    """What one text costs. The target's own token follows a block that is right, and ends a correction."""
    counts, at, num_seen, num_tokens = Counter[str](tokens=len(text.disagrees)), 0, 0, len(text.disagrees)
    while at < num_tokens:
        end = next(
            (end for end in range(at + 1, num_tokens) if end - at == rule.k or rule.ends(text.signals[at:end])),
            num_tokens,
        )
        counts["drafted"] += end - at
        if max(token.entropy for token in text.signals[at:end]) <= rule.nats and num_seen >= rule.start:
            counts["wrong"] += sum(text.disagrees[at:end])
            at = end
            continue
        wrong = next((index for index in range(at, end) if text.disagrees[index]), None)
        counts.update(calls=1, rows=end - at + 1)
        at = end if wrong is None else wrong
        counts["written"] += at < num_tokens
        at += 1
        num_agreed = _AGREED if wrong is None else 0
        while at < num_tokens and num_agreed < _AGREED:
            num_agreed = 0 if text.disagrees[at] else num_agreed + 1
            counts.update(written=1, rows=1)
            at += 1
        num_seen = at
    counts["parted"] = int(counts["wrong"] > 0)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[_FOLDER], help="with records.jsonl of comparisons")
    texts = list[LabelledText]()
    for folder in parser.parse_args().folders:
        records = read_records(folder / "records.jsonl")
        alone = {(line.prompt, line.token_ids) for line in records.generations if line.mode == "cloud"}
        texts += [labelled(line, "target") for line in records.scores if (line.prompt, line.token_ids) in alone]
    print(f"{len(texts)} texts; kept, parted, calls, written, rows, drafted")
    for rule in rules():
        counts = sum((replay(text, rule) for text in texts), Counter[str]())
        kept, shares = 1 - counts["wrong"] / counts["tokens"], ("calls", "written", "rows", "drafted")
        costs = "".join(f"  {counts[name] / counts['tokens']:.3f}" for name in shares)
        print(f"{rule.name:<18} {rule.k:>2}  {kept:.3f}  {counts['parted'] / len(texts):.2f}{costs}")


if __name__ == "__main__":
    main()
