"""Whether the device can tell which of its own answers the target would have given: a study on records of tasks.

    python -m bench.confidence FOLDER… [--edge-model NAME]

FOLDER holds the records of `skydraft compare --tasks … --modes edge,cloud,…`. The draft model reads its answers again.
A logistic regression on what it saw there, fitted on half of the tasks, or on the other sets, gives the chance that the
target's answer is the same. Reported: its calibration error and AUROC; and what asking the target for the whole answer
below a chance costs and mends, beside the other modes of the records.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from skydraft import api
from skydraft.config import DecodingParams
from skydraft.evaluation.records import GenerationLine, Records, read_records
from skydraft.gating.fitting import auroc, sklearn_linear
from skydraft.learning.calibrating import read_along
from skydraft.prompts.messages import Message
from skydraft.prompts.pair import read_prompt

_NUM_BINS = 10
_BELOW = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Answer:
    """A task that both models answered alone: what the device saw of its answer, and how both did."""

    set: str
    features: tuple[float, ...]
    is_same: bool
    edge_score: float
    cloud_score: float
    num_edge: int
    num_cloud: int


def answers(records: Records, edge: Any) -> Iterator[Answer]:
    """The tasks of a run."""
    verdicts = {(line.prompt, line.token_ids): line for line in records.verdicts}
    texts = {(line.mode, line.prompt): line for line in records.generations}
    for entry in records.run.prompts:
        mine, theirs = (texts.get((mode, entry.id)) for mode in ("edge", "cloud"))
        if mine is None or theirs is None or entry.task is None:
            continue
        one, other = (verdicts[entry.id, line.token_ids] for line in (mine, theirs))
        yield Answer(
            entry.category, features(edge, entry, mine), one.answer == other.answer, one.score, other.score,
            len(mine.token_ids), len(theirs.token_ids),
        )  # fmt: skip


def features(edge: Any, entry: Any, line: GenerationLine) -> tuple[float, ...]:
    """What the draft model saw of its own answer: doubts summed, at their worst, at the start, and its length."""
    params = DecodingParams(max_new_tokens=1024, grammar=entry.task.grammar)
    prompt = read_prompt(edge, (Message("user", entry.prompt),)).edge
    signals = [signals for _, signals in read_along(edge, prompt, line.token_ids, params)]
    nll = -np.log([each.top_prob for each in signals])
    entropy = np.array([each.entropy for each in signals])
    return (
        float(nll.sum()), float(nll.max()), float(nll.mean()), float(entropy[0]), float(entropy[:4].mean()),
        float(entropy.max()), float(np.log(len(nll))),
    )  # fmt: skip


def chances(rows: Any, same: Any, fitted_on: Any) -> Any:
    """The chance of each row, by a logistic regression on the rows that `fitted_on` marks."""
    mean, scale = rows[fitted_on].mean(0), np.maximum(rows[fitted_on].std(0), 1e-9)
    model = sklearn_linear().LogisticRegression(max_iter=5000).fit((rows[fitted_on] - mean) / scale, same[fitted_on])
    return model.predict_proba((rows - mean) / scale)[:, 1]


def calibration_error(chance: Any, same: Any) -> float:
    """Expected calibration error with bins of equal width."""
    bins = np.minimum((chance * _NUM_BINS).astype(int), _NUM_BINS - 1)
    return float(sum(abs((chance - same)[bins == each].sum()) for each in range(_NUM_BINS)) / len(chance))


def say(title: str, found: Sequence[Answer], chance: Any) -> None:
    same = np.array([each.is_same for each in found])
    print(
        f"{title}: {len(found)} answers, {same.mean():.2f} the same; calibration error "
        f"{calibration_error(chance, same):.3f}, AUROC {auroc(chance, same):.2f}"
    )
    edge, cloud = (np.mean([getattr(each, f"{side}_score") for each in found]) for side in ("edge", "cloud"))
    for below in _BELOW:
        asked = chance < below
        score = np.mean([each.cloud_score if up else each.edge_score for each, up in zip(found, asked, strict=True)])
        written = sum(each.num_cloud for each, up in zip(found, asked, strict=True) if up)
        tokens = written + sum(each.num_edge for each, up in zip(found, asked, strict=True) if not up)
        line = edge + (cloud - edge) * written / tokens  # whole answers handed over at random
        print(
            f"  below {below:.2f}: asked {asked.mean():.2f}, score {score:.3f}, gap closed "
            f"{(score - edge) / (cloud - edge):.2f}, written {written / tokens:.2f}, at random {line:.3f}"
        )


def modes_of(records: Records) -> None:
    """The other modes of the records: score, and tokens written by the target."""
    verdicts = {(line.prompt, line.token_ids): line.score for line in records.verdicts}
    tokens, written, scores = Counter[str](), Counter[str](), dict[str, list[float]]()
    for line in records.generations:
        tokens[line.mode] += len(line.token_ids)
        written[line.mode] += sum(each in ("cloud", "recovered", "bonus") for each in line.origins)
        scores.setdefault(line.mode, []).append(verdicts[line.prompt, line.token_ids])
    for mode, each in scores.items():
        print(f"  {mode}: {len(each)} tasks, score {np.mean(each):.3f}, written {written[mode] / tokens[mode]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--edge-model", default="qwen2.5-coder-0.5b")
    args = parser.parse_args()
    edge = api.load(args.edge_model, threads=1)
    found: list[Answer] = []
    for folder in args.folders:
        records = read_records(folder / "records.jsonl")
        modes_of(records)
        found += answers(records, edge)
    rows, same = np.array([each.features for each in found]), np.array([each.is_same for each in found])
    half = np.arange(len(found)) % 2 == 0
    crossed = np.where(half, chances(rows, same, ~half), chances(rows, same, half))
    for name in sorted({each.set for each in found}):
        inside = np.array([each.set == name for each in found])
        those = [each for each in found if each.set == name]
        say(f"{name}, fitted on half of all tasks", those, crossed[inside])
        if not inside.all():
            say(f"{name}, fitted on the other sets", those, chances(rows, same, ~inside)[inside])
    say("all, fitted on half", found, crossed)


if __name__ == "__main__":
    main()
