"""`make demo`: what the pair gains on this machine, measured there and then, and what a link adds, from the figures.

python -m bench demo
"""

import argparse
import json
import os
import random
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

import skydraft
from skydraft.cli.options.pair import ModelChoice
from skydraft.cli.terminal import TERMINAL, console_for, is_colored, legend, show_tokens
from skydraft.config import DecodingParams
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import make_plan
from skydraft.engines.base import Engine
from skydraft.errors import SkydraftError
from skydraft.lab.evaluation.comparison import request_of
from skydraft.lab.evaluation.modes import Mode
from skydraft.lab.evaluation.records import PromptEntry
from skydraft.lab.tasks.sets import read_tasks
from skydraft.models.adapters import shipped

ROOT = Path(__file__).parent.parent
TASK_SET, NUM_TASKS = "zh-extract", 6
EDIT = "Correct the one spelling mistake in this text and print the whole text again, nothing else:\n\n" + (
    "The old lighthouse stands at the end of the pier. Every evening the keeper climbs the ninety steps to the lamp "
    "room, cleans the glass and lights the lamp. Ships that come from the north see the light at a distance of twenty "
    "miles. In winter the storms are so strong that nobody can walk along the pier, and the keeper stays in the tower "
    "for several days. He has a small libary, a stove and enough food for two weeks."
)
_HERE = "" if shutil.which("skydraft") else f"{os.path.relpath(sys.prefix)}/bin/"  # where no environment is active
_EDIT_PARAMS = DecodingParams(max_new_tokens=150)


def tasks() -> list[PromptEntry]:
    """The first six tasks of the held-out half, shuffled with seed 0. The adapter has learned from the other half."""
    shuffled = list(read_tasks(TASK_SET).prompts)
    random.Random(0).shuffle(shuffled)
    return shuffled[:NUM_TASKS]


def demo() -> None:
    console, models = console_for("auto"), replace(ModelChoice(), adapter="none")
    edge, target = models.load_pair()
    console.print(f"\n{edge.name} drafts, {target.name} checks. Here both run on this machine.", style="bold")
    _edit(console, edge, target)
    _taught(console, edge, target)
    console.print(f"\n{link()}\nTry it: {_HERE}skydraft chat. A chat page, and any app: {_HERE}skydraft gateway")


def _edit(console: Console, edge: Engine, target: Engine) -> None:
    """The large model's own text of an edit, with drafts and without; the better of two runs each, in turn."""
    console.print("\n1. An edit. The large model writes a text again and corrects its one spelling mistake:\n")
    with _writing(EDIT, "lossless", edge, target) as generation:
        for _, tokens in generation.rounds():
            show_tokens(console, tokens)
        speeds, texts = {"lossless": [_speed(generation)], "cloud": []}, {generation.text}
    if is_colored(console):
        console.print("\n", legend(generation.origins), sep="")
    for mode in ("cloud", "lossless", "cloud"):
        with TERMINAL.state(f"The same in mode {mode}…"), _writing(EDIT, mode, edge, target) as again:
            texts.add(again.run().text)
            speeds[mode].append(_speed(again))
    with_drafts, stream = (max(speeds[mode]) for mode in ("lossless", "cloud"))
    same = "The same text as" if len(texts) == 1 else "Another text than"
    console.print(
        f"\n{same} the large model alone, at {with_drafts / stream:.1f} times its speed ({with_drafts:.1f} and "
        f"{stream:.1f} tokens a second after the first one, the better of two runs each).", style="bold",
    )  # fmt: skip


def _speed(generation: Generation) -> float:
    """Tokens a second from the first one on."""
    first, last = generation.records[0], generation.records[-1]
    seconds = (last.ended_ms - first.ended_ms) / 1e3
    return (generation.stats.num_tokens - first.num_committed) / seconds if seconds else 0.0


def _writing(prompt: str, mode: str, edge: Engine, target: Engine) -> Generation:
    return skydraft.generate(prompt, edge=edge, cloud=target, plan=make_plan(mode), params=_EDIT_PARAMS)


@dataclass
class Row:
    right: int = 0
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.right} of {NUM_TASKS}{self.calls:>10}{self.tokens / self.seconds:>14.1f}"


def _taught(console: Console, edge: Engine, target: Engine) -> None:
    """Six tasks by the small model, by the same after it has learned the task, and by the large model."""
    console.print("\n2. A task that the small model has learned: facts of Chinese notes as JSON. For example:\n")
    wanted = tasks()
    console.print(f"   {wanted[0].prompt.splitlines()[-1]}", markup=False, highlight=False)
    console.print(f"\n{'six such notes':<34}right     calls  tokens a second", style="bold")
    adapter = str(shipped(TASK_SET))
    ways = {
        "small model": ("edge", "none"), "small model that has learned it": ("edge", adapter),
        "large model": ("cloud", "none"),
    }  # fmt: skip
    for name, (mode, used) in ways.items():
        with TERMINAL.state(f"{name}…"):
            row = _answered(wanted, mode, used, edge, target)
        console.print(f"{name:<34}{row}")
    console.print("It has learned from answers of the large model: docs/learning.md.")


def _answered(wanted: list[PromptEntry], mode: str, adapter: str, edge: Engine, target: Engine) -> Row:
    row, used = Row(), Mode(mode, make_plan(mode), DecodingParams())
    for prompt in wanted:
        assert prompt.task is not None  # sets have checks
        request = replace(request_of(prompt, used), adapter=adapter)
        with skydraft.start(request, edge=edge, cloud=target) as generation:
            text, stats = generation.run().text, generation.stats
        row.right += prompt.task.check.judge(text).score == 1
        row.calls += stats.num_escalated
        row.tokens += stats.num_tokens
        row.seconds += stats.num_tokens / (stats.tokens_per_s or 1.0)
    return row


def link() -> str:
    """One sentence on a link, by the figures that `bench link` has measured."""
    points = json.loads((ROOT / "docs/figures/link.json").read_text())["points"]
    wanted = {"zh": "Chinese answers", "code": "code", "edits": "edits"}
    speeds = {
        point["kind"]: point["ways"]["lossless"]["speed"]
        for point in points
        if (point["rtt_ms"], point["step_ms"], point["kind"] in wanted) == (20.0, 25.0, True)
    }
    told = ", ".join(f"{name} {speeds[kind]:.2f}" for kind, name in wanted.items())
    return (
        "3. Not measured now: over an emulated link of 20 ms, with a large model of 45 ms a token, the speed is "
        f"{told} of its own stream (docs/measuring.md)."
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        demo()
    except SkydraftError as error:
        sys.exit(f"skydraft: {error.line}")
