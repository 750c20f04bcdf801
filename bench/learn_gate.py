"""Does a calibrated gate keep its word on prompts that nobody tuned to, and does watching the audits help?

    python -m bench.learn_gate --out DIR [--asked 0.9] [--prompts 60] [--adapter FILE]

The held-out prompts of bench.learn (descriptions of products, of which the calibration of the demo pair has none) are
answered with `calibrated:ASKED`, once as it is, where audits below what was expected tighten the gate, and once with
that switched off. Agreement is measured along the text that was written. Rows are kept in DIR; a second start goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np

import skydraft
from bench.learn import PARAMS, PRODUCTS, Row, kept, prompts_of
from skydraft.decoding.plan import make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.evaluation.intervals import Resamples
from skydraft.evaluation.scoring import Scorer
from skydraft.gating.calibration import CalibratedGate
from skydraft.learning.adapter import open_learned
from skydraft.models import cache_dir, default_pair
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt

WAYS = {"watching": None, "not watching": 1.0}  # what risks are multiplied by


def measure(edge: Engine, cloud: Engine, agreement: float, prompts: Sequence[str]) -> Iterator[Row]:
    """Tokens, calls and agreed tokens of both ways, for each prompt."""
    scorer, plan = Scorer(edge, cloud, PARAMS), make_plan(gate=f"calibrated:{agreement}", k=12, eager=True)
    for prompt in prompts:
        row: Row = {"prompt": prompt}
        for name, factor in WAYS.items():
            correction = CalibratedGate.correction if factor is None else property(lambda self: 1.0)
            with patch.object(CalibratedGate, "correction", correction):
                request = GenerateRequest(asked(prompt), plan=plan, params=PARAMS)
                done = skydraft.start(request, edge=edge, cloud=cloud).run()
            line = scorer.score("", read_prompt(edge, asked(prompt)), done.token_ids)
            scorer.close()
            agreed = sum(mine == theirs for mine, theirs in zip(line.token_ids, line.choices, strict=True))
            row[name] = {"tokens": len(done.token_ids), "calls": done.stats.num_escalated, "agreed": agreed}
        yield row


def _bounds(interval: tuple[float, float] | None) -> str:
    return f"[{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("learn-bench"))
    parser.add_argument("--asked", type=float, default=0.9)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--adapter", type=Path)
    given = parser.parse_args()
    prompts, pair = prompts_of(PRODUCTS)[-given.prompts :], default_pair()
    with closing(skydraft.load(pair.target)) as cloud:
        if given.adapter:
            edge = open_learned(pair.draft, given.adapter, skydraft.load, cache_dir())
        else:
            edge = skydraft.load(pair.draft)
        with closing(edge):
            name = f"gate-{given.asked:g}-{given.adapter.stem if given.adapter else 'before'}.jsonl"
            rows = kept(given.out / name, partial(measure, edge, cloud, given.asked), prompts)
    print(f"\n{edge.name}, {len(rows)} prompts, an agreement of {given.asked:g} asked for")
    for name in WAYS:
        tokens, calls, agreed = (
            np.array([row[name][key] for row in rows], float) for key in ("tokens", "calls", "agreed")
        )
        interval = Resamples(len(rows)).ratio(agreed, tokens)
        print(f"{name:<14} agreement {agreed.sum() / tokens.sum():.3f} {_bounds(interval)}, calls a token "
              f"{calls.sum() / tokens.sum():.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
