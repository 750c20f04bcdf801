"""A simulated life of a device: it learns from what was corrected every 60 answers, and asks less and less.

    python -m bench.learn_life --out DIR [--every 60] [--layers 4] [--plot FILE.svg]

Of the answers in DIR/lessons (by bench.learn: 240, collected in mode `quality` with the draft model as it came) each
stretch of 60 is read again by two draft models: as it came, and trained on all answers before that stretch. Simulated:
the gate of `quality` is replayed along the texts as they were collected, with what the draft model says there now;
nothing is generated, and tokens that nobody judged count as agreed. Figures are paired over answers, with intervals of
95 %. A training that is not kept changes nothing. Adapters are kept in DIR.
"""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np

import skydraft
from bench.learn import PRODUCTS, add_settings, learned, prompts_of, setting_of
from bench.workload import difference
from skydraft.config import mode_spec
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.evaluation.intervals import Resamples
from skydraft.gating.fitting import LabelledText, walk
from skydraft.gating.gates import parse_gate
from skydraft.learning.calibrating import labelled
from skydraft.learning.lessons import Lesson, Store
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt

QUALITY = mode_spec("quality")
Row = dict[str, int]


def row_of(text: LabelledText) -> Row:
    """Calls of the gate of `quality` along a text, its tokens, and those that both models agree on."""
    threshold, longest = parse_gate(QUALITY.gate).threshold, int(QUALITY.k or 1)
    unsure = [float(signals.entropy > threshold) for signals in text.signals]
    calls = walk(unsure, text.disagrees, 0.0, longest, ends=False).num_calls
    size = len(unsure)
    return {"calls": calls, "tokens": size, "agreed": size - sum(text.disagrees)}


def rows_of(engine: Engine, lessons: list[Lesson]) -> list[Row]:
    """Each lesson as this draft model reads it."""
    return [row_of(labelled(engine, lesson)) for lesson in lessons]


def show(days: list[tuple[list[Row], list[Row]]], every: int) -> list[dict[str, float]]:
    """A line for each stretch; returns what is drawn."""
    print(f"\n{'answers':<12}{'calls a token':>14}{'learning':>10}{'difference':>12}{'α':>26}{'learning':>10}")
    drawn = []
    for day, sides in enumerate(days):
        calls, tokens, agreed = (
            [np.array([row[key] for row in rows], float) for rows in sides] for key in ("calls", "tokens", "agreed")
        )
        rates = [calls[side].sum() / tokens[side].sum() for side in (0, 1)]
        alpha = [agreed[side].sum() / tokens[side].sum() for side in (0, 1)]
        low, high = difference(Resamples(len(sides[0])), (calls[1], tokens[1]), (calls[0], tokens[0]))
        bounds = f"[{low:+.3f}, {high:+.3f}]" if day else ""
        print(
            f"{day * every + 1:>4} to {(day + 1) * every:<4}{rates[0]:>14.3f}{rates[1]:>10.3f}"
            f"{rates[1] - rates[0]:>+12.3f} {bounds:<18}{alpha[0]:>7.3f}{alpha[1]:>10.3f}"
        )
        drawn.append({"at": (day + 0.5) * every, "before": rates[0], "after": rates[1]})
    return drawn


def draw(drawn: list[dict[str, float]], path: Path) -> None:
    """Calls a token over the answers, with and without learning."""
    from skydraft.evaluation.report.plots import load_pyplot

    pyplot = load_pyplot()
    figure, panel = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for name, label, mark in (("before", "as it came", "o--"), ("after", "trained on all answers so far", "s-")):
        panel.plot([each["at"] for each in drawn], [each[name] for each in drawn], mark, label=label)
    panel.set(xlabel="answers so far", ylabel="calls a token, quality", ylim=(0, None))
    panel.set_title("A device that learns every 60 answers (replayed)", fontsize=10)
    panel.legend(fontsize=8)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Replay, print the table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("learn-bench"))
    parser.add_argument("--every", type=int, default=60)
    parser.add_argument("--plot", type=Path)
    add_settings(parser)
    given = parser.parse_args()
    prompts = prompts_of(PRODUCTS)
    by_prompt = {lesson.prompt_ids: lesson for lesson in Store(given.out / "lessons").lessons(Counter())}
    with closing(skydraft.load(given.edge_model)) as edge:
        ids = [read_prompt(edge, asked(prompt)).edge.token_ids for prompt in prompts]
    lessons = [by_prompt[each] for each in ids if each in by_prompt]
    days: list[tuple[list[Row], list[Row]]] = []
    newest: Path | None = None
    for begin in range(0, len(lessons), given.every):
        stretch = lessons[begin : begin + given.every]
        with closing(skydraft.load(given.edge_model)) as edge:
            before = rows_of(edge, stretch)
        if begin:
            newest = learned(given, begin, prompts, f"{begin}-{setting_of(given)}", calibrates=False) or newest
        with closing(skydraft.load(given.edge_model, EngineOptions(adapter=newest))) as edge:
            days.append((before, rows_of(edge, stretch) if begin else before))
    drawn = show(days, given.every)
    if given.plot:
        draw(drawn, given.plot)


if __name__ == "__main__":
    main()
