"""How long blocks of a calibrated gate should be, where they should end, and how long the target should write on.

    python -m bench.blocks [FOLDER]

Along the target's own texts of a comparison, as a calibrated gate adds up risks: the loosest limit that keeps an
agreement, and what it takes per token. Replayed, not run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.workload import labelled
from skydraft.evaluation.records import read_records
from skydraft.gating.calibration import MAX_BLOCK, find_calibration
from skydraft.gating.fitting import LabelledText, Replay, walk
from skydraft.gating.hand_back import parse_hand_back

_FOLDER = Path(__file__).parent.parent / "docs" / "report-zh-dev"
_LIMITS = np.geomspace(0.01, 20.0, 120)
_HAND_BACKS = ("0", "4", "8", "16", "agree:2", "agree:4", "agree:6", "text")


def cheapest(
    texts: Sequence[LabelledText], risks: Sequence[Sequence[float]], asked: float, k: int = MAX_BLOCK, **given: Any
) -> dict[str, float]:
    """What the limit with the fewest calls that keeps the agreement takes per token; `given` is for `walk`."""
    kept = []
    for limit in _LIMITS:
        found = [walk(r, t.disagrees, float(limit), k, **given) for t, r in zip(texts, risks, strict=True)]
        total = {name: sum(getattr(replay, name) for replay in found) for name in Replay.__slots__}
        if 1 - total["num_wrong"] / total["num_tokens"] >= asked:
            kept.append({name: count / total["num_tokens"] for name, count in total.items()})
    return min(kept, key=lambda taken: taken["num_calls"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=_FOLDER, help="with the records.jsonl of a comparison")
    records = read_records(parser.parse_args().folder / "records.jsonl")
    run = records.run
    calibration = find_calibration([], run.draft.fingerprint, run.target.fingerprint, "these models")
    alone = {(line.prompt, line.token_ids) for line in records.generations if line.mode == "cloud"}
    texts = [labelled(line, "target") for line in records.scores if (line.prompt, line.token_ids) in alone]
    risks = [[calibration.risk([signals]) for signals in text.signals] for text in texts]
    num_tokens = sum(len(text.disagrees) for text in texts)
    alpha = 1 - sum(sum(text.disagrees) for text in texts) / num_tokens
    print(f"{len(texts)} texts, {num_tokens} tokens, alpha {alpha:.3f}")
    print(f"\n{'blocks, no hand-back':<24}{'calls over A - alpha: 0.90':>28}{'0.95':>8}{'drafts a token at 0.95':>25}")
    for k in (4, 8, MAX_BLOCK, 16):
        for ends in (False, True):
            low, high = (cheapest(texts, risks, asked, k, ends=ends) for asked in (0.90, 0.95))
            ratios = low["num_calls"] / (0.90 - alpha), high["num_calls"] / (0.95 - alpha)
            name = f"{k}, {'ended by the gate' if ends else 'whole'}"
            print(f"{name:<24}{ratios[0]:>28.2f}{ratios[1]:>8.2f}{high['num_drafted']:>25.2f}")
    print(f"\n{'hand-back, a token at':<24}{'calls':>8}{'written':>9}{'rows':>7}{'drafted':>9}  (k = {MAX_BLOCK})")
    for asked in (0.95, 0.90):
        for name in _HAND_BACKS:
            taken = cheapest(texts, risks, asked, hand_back=parse_hand_back(name))
            print(
                f"{f'{asked}, {name}':<24}{taken['num_calls']:>8.3f}{taken['num_written']:>9.3f}"
                f"{taken['num_rows']:>7.2f}{taken['num_drafted']:>9.2f}"
            )


if __name__ == "__main__":
    main()
