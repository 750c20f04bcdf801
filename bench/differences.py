"""Which differences between two models change the check of a task, and whether the device could see which.

    python -m bench.differences label OUT.jsonl --sets arithmetic:dev,zh-extract:dev,zh-words:dev --tasks 50 --each 3
    python -m bench.differences report OUT.jsonl

`label` lets the target answer each task, finds where the draft model would have written another token, puts that token
in, and lets the target finish. A difference is neutral if the verdict stays the same. It takes some 4 s a label on one
core, and goes on where it was stopped. `report` fits a logistic regression on what the device sees for free, leaving
one set out at a time.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from skydraft import api
from skydraft.choosing.chooser import Chooser
from skydraft.config import DecodingParams
from skydraft.engines.base import Engine
from skydraft.evaluation.tasks.sets import read_tasks
from skydraft.gating.fitting import auroc, sklearn_linear
from skydraft.learning.calibrating import read_along
from skydraft.prompts.messages import Message
from skydraft.prompts.pair import read_prompt
from skydraft.types import Prompt

_LATELY = 8  # tokens
_KINDS = ("digit", "chinese", "letters", "space", "mark")


def finish(target: Engine, prompt: Prompt, begun: Sequence[int], params: DecodingParams) -> tuple[int, ...]:
    """The target's greedy text that begins with `begun`."""
    chooser = Chooser(params, target.vocab, len(prompt.token_ids))
    whole = [*prompt.token_ids, *begun]
    with closing(target.open(whole)) as sequence:
        while len(whole) - len(prompt.token_ids) < params.max_new_tokens and whole[-1] not in target.vocab.end_ids:
            row = sequence.extend(whole[-1:])[0]
            whole.append(chooser.choose(row, np.array(whole, np.int32)))
    return tuple(whole[len(prompt.token_ids) :])


def kind_of(piece: str) -> str:
    text = piece.strip()
    if not text:
        return "space"
    if any(each.isdigit() for each in text):
        return "digit"
    if any("一" <= each <= "鿿" for each in text):
        return "chinese"
    return "letters" if text[0].isalpha() else "mark"


def label(args: argparse.Namespace) -> None:
    out = Path(args.out)
    done = {line["task"] for line in read(out)} if out.exists() else set()
    edge, target = (api.load(name, threads=args.threads) for name in (args.edge_model, args.cloud_model))
    rng = random.Random(7)
    tasks = list(read_tasks(args.sets, limit=args.tasks).prompts)
    rng.shuffle(tasks)
    with open(out, "a", encoding="utf-8") as file:
        for entry in tasks:
            if entry.id in done:
                continue
            for line in labels_of(entry, edge, target, args.each) or [{"task": entry.id, "set": entry.category}]:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()


def labels_of(entry: Any, edge: Engine, target: Engine, most: int) -> list[dict[str, Any]]:
    """A line for each of up to `most` differences of one task, chosen at random."""
    task = entry.task
    params = DecodingParams(max_new_tokens=task.max_new_tokens or 64, grammar=task.grammar)
    prompt = read_prompt(edge, (Message("user", entry.prompt),)).edge
    text = finish(target, prompt, (), params)
    along = read_along(edge, prompt, text, params)
    agrees = [choice == token for (choice, _), token in zip(along, text, strict=True)]
    differs = [index for index, same in enumerate(agrees) if not same]
    rng = random.Random(entry.id)
    written = target.vocab.decode
    before = task.check.judge(written(text))
    lines = []
    for index in sorted(rng.sample(differs, min(most, len(differs)))):
        choice, signals = along[index]
        other = finish(target, prompt, [*text[:index], choice], params)
        after = task.check.judge(written(other))
        lately = agrees[max(0, index - _LATELY) : index]
        lines.append({
            "task": entry.id, "set": entry.category, "index": index, "num_tokens": len(text),
            "num_differs": len(differs),
            "wanted": written([text[index]]), "drafted": written([choice]), "ends": choice in target.vocab.end_ids,
            "entropy": signals.entropy, "margin": signals.margin, "top_prob": signals.top_prob,
            "lately": sum(lately) / max(len(lately), 1), "after_entropy": along[index - 1][1].entropy if index else 0.0,
            "was": before.score, "now": after.score, "answer": before.answer, "other": after.answer,
        })  # fmt: skip
    return lines


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def features_of(line: dict[str, Any]) -> list[float]:
    """What the device knows of the token that it drafted, before anybody checks it."""
    kind = kind_of(line["drafted"])
    return [
        line["entropy"], line["margin"], line["top_prob"], line["after_entropy"], line["lately"],
        float(line["ends"]), float(line["index"] < _LATELY), min(line["index"], 100) / 100,
        *(float(kind == each) for each in _KINDS),
    ]  # fmt: skip


def report(args: argparse.Namespace) -> None:
    lines = [line for line in read(Path(args.out)) if "index" in line]
    rows = np.array([features_of(line) for line in lines])
    for name, wanted in (("the verdict", ("was", "now")), ("the answer", ("answer", "other"))):
        changes = np.array([line[wanted[0]] != line[wanted[1]] for line in lines])
        print(f"{len(lines)} differences, {changes.mean():.3f} of them change {name}")
        for left_out, inside in folds(lines):
            fitted = sklearn_linear().LogisticRegression(max_iter=5000)
            mean, scale = rows[~inside].mean(0), np.maximum(rows[~inside].std(0), 1e-9)
            fitted.fit((rows[~inside] - mean) / scale, changes[~inside])
            learned = auroc(fitted.decision_function((rows[inside] - mean) / scale), changes[inside])
            plain = auroc(rows[inside, 0], changes[inside])
            print(
                f"  {left_out}: {inside.sum()} differences, {changes[inside].mean():.3f} change it, AUROC of a fit on "
                f"the other sets {learned:.2f}, of the entropy alone {plain:.2f}"
            )
            for kind in _KINDS:
                of = inside & np.array([kind_of(line["drafted"]) == kind for line in lines])
                if of.any():
                    print(f"    {kind}: {of.sum()}, {changes[of].mean():.2f} change it")


def folds(lines: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Each set's name, and which lines are of it."""
    sets = np.array([line["set"] for line in lines])
    for name in sorted(set(sets)):
        yield str(name), sets == name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("label", "report"))
    parser.add_argument("out")
    parser.add_argument("--sets", default="arithmetic:dev,zh-extract:dev,zh-words:dev")
    parser.add_argument("--tasks", type=int, default=50, help="of each set")
    parser.add_argument("--each", type=int, default=3, help="differences of a task")
    parser.add_argument("--edge-model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--cloud-model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    (label if args.what == "label" else report)(args)


if __name__ == "__main__":
    main()
