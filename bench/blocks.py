"""How long the blocks of a calibrated gate should be, and where they should end: replayed on committed records.

    python -m bench.blocks [FOLDER]

Along the target's own texts of a comparison, with the risks of the shipped calibration: calls per token over the bound
A - alpha at two agreements, and drafted tokens per token. Replayed, not run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from skydraft.evaluation.gate_study import labelled, oracle_calls
from skydraft.evaluation.records import read_records
from skydraft.gating.calibration import find_calibration
from skydraft.gating.fitting import LabelledText, walk

_FOLDER = Path(__file__).parent.parent / "docs" / "report-zh-dev"
_LIMITS = np.geomspace(0.01, 12.0, 120)


def cheapest(
    texts: Sequence[LabelledText], risks: Sequence[Sequence[float]], k: int, asked: float, *, ends: bool
) -> tuple[float, float]:
    """(calls, drafted tokens), both per token, of the loosest limit that keeps the agreement."""
    kept = []
    for limit in _LIMITS:
        found = [walk(r, t.disagrees, float(limit), k, ends=ends) for t, r in zip(texts, risks, strict=True)]
        num_tokens = sum(replay.num_tokens for replay in found)
        if 1 - sum(replay.num_wrong for replay in found) / num_tokens >= asked:
            calls, drafted = (sum(getattr(replay, name) for replay in found) for name in ("num_calls", "num_drafted"))
            kept.append((calls / num_tokens, drafted / num_tokens))
    return min(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=_FOLDER, help="with the records.jsonl of a comparison")
    records = read_records(parser.parse_args().folder / "records.jsonl")
    run = records.run
    calibration = find_calibration([], run.draft.fingerprint, run.target.fingerprint, "these models")
    alone = {(line.prompt, line.token_ids) for line in records.generations if line.mode == "cloud"}
    texts = [labelled(line, "target") for line in records.scores if (line.prompt, line.token_ids) in alone]
    risks = [[calibration.risk(signals) for signals in text.signals] for text in texts]
    num_tokens = sum(len(text.disagrees) for text in texts)
    alpha = 1 - sum(sum(text.disagrees) for text in texts) / num_tokens
    print(f"{len(texts)} texts, {num_tokens} tokens, alpha {alpha:.3f}")
    print(f"{'blocks':<24}{'A = 0.90':>10}{'A = 0.95':>10}{'drafts a token at 0.95':>25}")
    for k in (4, 8, 12, 16):
        for ends in (False, True):
            shares = [cheapest(texts, risks, k, asked, ends=ends) for asked in (0.90, 0.95)]
            ratios = [
                calls / oracle_calls(asked, alpha) for (calls, _), asked in zip(shares, (0.90, 0.95), strict=True)
            ]
            name = f"{k}, {'ended by the gate' if ends else 'whole'}"
            print(f"{name:<24}{ratios[0]:>10.2f}{ratios[1]:>10.2f}{shares[1][1]:>25.2f}")


if __name__ == "__main__":
    main()
