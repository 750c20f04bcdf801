"""A simulated life of a device: it answers, learns from what was corrected every 60 answers, and asks less and less.

    python -m bench.learn_life --out DIR [--every 60] [--shown 30] [--layers 4] [--plot FILE.svg]

Of each 60 prompts the first 30 are answered in mode `quality`, by the draft model as it came and by the one that was
trained on all answers to earlier prompts. Simulated in one respect: what it learns from was collected with the draft
model as it came (DIR/lessons, by bench.learn), not with that of the day. A training that is not kept changes nothing.
Figures are paired over prompts, with intervals of 95 %. What is done is kept in DIR: started again, it goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import skydraft
from bench.learn import PARAMS, PRODUCTS, Row, collect, kept, learned, prompts_of
from skydraft.decoding.plan import make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.evaluation.bootstrap import Resamples
from skydraft.evaluation.scoring import Scorer
from skydraft.models import default_pair
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt

NUM_PROMPTS = 240


def answers(edge: Engine, cloud: Engine, prompts: Sequence[str]) -> Iterator[Row]:
    """Calls, tokens, and how many of these the target would have written, for each prompt in mode `quality`."""
    scorer = Scorer(edge, cloud, PARAMS)
    for prompt in prompts:
        request = GenerateRequest(asked(prompt), plan=make_plan("quality"), params=PARAMS)
        done = skydraft.start(request, edge=edge, cloud=cloud).run()
        line = scorer.score("", read_prompt(edge, asked(prompt)), done.token_ids)
        scorer.close()
        agreed = sum(mine == theirs for mine, theirs in zip(line.token_ids, line.choices, strict=True))
        yield {"prompt": prompt, "calls": done.stats.num_escalated, "tokens": len(done.token_ids), "agreed": agreed}


def show(days: list[tuple[list[Row], list[Row]]], every: int) -> list[dict[str, float]]:
    """A line for each stretch of prompts; returns what is drawn."""
    print(f"\n{'prompts':<12}{'calls a token':>14}{'learning':>10}{'difference':>12}{'agreement':>30}{'learning':>10}")
    drawn = []
    for day, sides in enumerate(days):
        calls, tokens, agreed = (
            [np.array([row[key] for row in rows], float) for rows in sides] for key in ("calls", "tokens", "agreed")
        )
        rates = [calls[side].sum() / tokens[side].sum() for side in (0, 1)]
        agreement = [agreed[side].sum() / tokens[side].sum() for side in (0, 1)]
        interval = Resamples(len(sides[0])).difference((calls[1], tokens[1]), (calls[0], tokens[0])) if day else None
        bounds = f"[{interval[0]:+.3f}, {interval[1]:+.3f}]" if interval else ""
        print(
            f"{day * every + 1:>4} to {(day + 1) * every:<4}{rates[0]:>14.3f}{rates[1]:>10.3f}"
            f"{rates[1] - rates[0]:>+12.3f} {bounds:<19}{agreement[0]:>10.3f}{agreement[1]:>10.3f}"
        )
        drawn.append({"at": (day + 0.5) * every, "before": rates[0], "after": rates[1]})
    return drawn


def draw(drawn: list[dict[str, float]], path: Path) -> None:
    """Calls a token over the prompts, with and without learning."""
    from skydraft.evaluation.report.plots import load_pyplot

    pyplot = load_pyplot()
    figure, panel = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for name, label, mark in (("before", "as it came", "o--"), ("after", "trained on all answers so far", "s-")):
        panel.plot([each["at"] for each in drawn], [each[name] for each in drawn], mark, label=label)
    panel.set(
        xlabel="prompts answered",
        ylabel="calls a token, quality",
        ylim=(0, None),
        title="a device that learns (simulated)",
    )
    panel.legend(fontsize=8)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measure, print the table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("learn-bench"))
    parser.add_argument("--every", type=int, default=60)
    parser.add_argument("--shown", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--edge-model", default=default_pair().draft)
    parser.add_argument("--cloud-model", default=default_pair().target)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    prompts = prompts_of(PRODUCTS)[:NUM_PROMPTS]
    days: list[tuple[list[Row], list[Row]]] = []
    with closing(skydraft.load(given.cloud_model)) as cloud:
        with closing(skydraft.load(given.edge_model)) as edge:
            collect(given.out / "lessons", edge, cloud, prompts)
        newest: Any = given.edge_model
        for begin in range(0, NUM_PROMPTS, given.every):
            chosen = prompts[begin : begin + given.shown]
            with closing(skydraft.load(given.edge_model)) as edge:
                before = kept(given.out / "life-before.jsonl", partial(answers, edge, cloud), chosen)
            if not begin:
                days.append((before, before))
                continue
            newest = learned(given, begin, prompts, f"{begin}-layers{given.layers}") or newest
            with closing(skydraft.load(newest)) as edge:
                after = kept(given.out / f"life-{begin}.jsonl", partial(answers, edge, cloud), chosen)
            days.append((before, after))
    drawn = show(days, given.every)
    if given.plot:
        draw(drawn, given.plot)


if __name__ == "__main__":
    main()
