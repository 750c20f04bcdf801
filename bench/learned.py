"""What learning a task brings: sets of tasks before and after, the draft model alone and through the modes.

    SKYDRAFT_HOME=DIR/home python -m bench learned DIR --sets arithmetic,zh-words      goes on where it was stopped
    … --tasks DIR/tests.jsonl --adapter HOME/adapters/MODEL/reviews/adapter.gguf      of what `learn run` has learned
    python -m bench learned DIR --show docs/learned        writes figures.json, sets that DIR has anew, and learning.svg

The target answers the `:dev` half of each set, the draft model learns from that, and the other half is answered: by
the target, by the draft model alone, and in each mode. One model alone writes its texts side by side, so there is no
speed. Modes write one at a time, in this process: a draft model that has sixteen texts to read along with hands each
back late, and the target writes up to three times as much.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import skydraft
from skydraft.access.limits import Limits
from skydraft.cloud.options import ServeOptions
from skydraft.cloud.server import CloudServer, loop_in_thread
from skydraft.cloud.worker import Worker
from skydraft.config import DecodingParams
from skydraft.decoding.plan import make_plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.intervals import Figure, Resamples, cell, share
from skydraft.lab.evaluation.comparison import request_of
from skydraft.lab.evaluation.modes import Mode, parse_mode
from skydraft.lab.evaluation.records import PromptEntry
from skydraft.lab.evaluation.report.plots import load_pyplot
from skydraft.lab.evaluation.workloads import Workload
from skydraft.lab.learning.answering import NUM_SIDE_BY_SIDE, Answering
from skydraft.lab.learning.calibrating import calibrate_lessons, read_lessons, write_calibration
from skydraft.lab.learning.dataset import prepare, weights_of
from skydraft.lab.learning.lessons import Lesson, Store
from skydraft.lab.learning.training import TrainSettings, train
from skydraft.lab.tasks.sets import read_tasks
from skydraft.models import cache_dir, default_pair

SETS = ("arithmetic", "zh-words", "zh-extract", "calendar", "logic")
LEARNED = "-learned"  # at the end of a name: with the adapter
OPTIONS = EngineOptions(context_len=1024, max_sequences=NUM_SIDE_BY_SIDE)
_PATIENT_S = 900.0
_SAME = (0.22, 0.1)  # between points whose labels would lie on each other
_AT_RANDOM = "whole answers at random"
# Labels, in points.
_BESIDE = {"edge": (-6, -10), "quality": (7, -9), "auto": (-6, 5), "answers": (6, 4), "cloud": (7, 2)}
Line = dict[str, Any]  # of one answer: id, right, tokens, calls, written


class Told:
    """Prints a line with the time that it took since the one before."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, *values: object) -> None:
        now = time.monotonic()
        print(*values, f"{now - self._began:.0f} s", flush=True)
        self._began = now


@contextmanager
def served(engine: Engine) -> Iterator[Cloud]:
    limits = Limits(max_sessions=NUM_SIDE_BY_SIDE)
    options = ServeOptions(port=0, execution="throughput", limits=limits)
    server = CloudServer(Worker(engine, limits, execution="throughput"), options)
    with loop_in_thread() as (_, run):
        port = run(server.start())
        try:
            with closing(skydraft.connect(f"127.0.0.1:{port}", require=True, timeout_s=_PATIENT_S)) as cloud:
                yield cloud
        finally:
            run(server.stop(0.0))


def answers(tasks: Workload, edge: Engine, cloud: Cloud, folder: Path) -> list[Lesson | None]:
    """What the model behind `cloud` answers alone, kept in `folder`."""
    mode = Mode("cloud", make_plan("cloud"), DecodingParams())
    requests = [request_of(prompt, mode) for prompt in tasks.prompts]
    return Answering(requests, edge, cloud, weights_of(cloud), Store(folder)).run(lambda lesson: None)


def lesson_score(prompt: PromptEntry, lesson: Lesson | None, edge: Engine) -> float:
    ids = lesson.token_ids if lesson else ()
    return text_score(prompt, edge.vocab.decode([each for each in ids if each not in edge.vocab.end_ids]))


def text_score(prompt: PromptEntry, text: str) -> float:
    assert prompt.task is not None  # sets have checks
    return prompt.task.check.judge(text).score


def write_alone(tasks: Workload, edge: Engine, cloud: Cloud, folder: Path, name: str) -> None:
    """A line for each task that the model behind `cloud` answers alone."""
    lines = list[Line]()
    for prompt, lesson in zip(tasks.prompts, answers(tasks, edge, cloud, folder / name), strict=True):
        num_tokens, right = len(lesson.token_ids) if lesson else 0, lesson_score(prompt, lesson, edge)
        of_target = num_tokens if name == "cloud" else 0
        lines.append({"id": prompt.id, "right": right, "tokens": num_tokens, "calls": 0, "written": of_target})
    folder.joinpath(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_mode(mode: str, tasks: Workload, edge: Engine, target: Engine, adapter: str, path: Path) -> None:
    """A line for each task that is answered in a mode; those that `path` has are not answered again."""
    done = {line["id"] for line in read(path)}
    used = parse_mode(mode, lambda style: DecodingParams())
    for prompt in (prompt for prompt in tasks.prompts if prompt.id not in done):
        request = replace(request_of(prompt, used), adapter=adapter)
        with skydraft.start(request, edge=edge, cloud=target) as generation:
            text, stats = generation.run().text, generation.stats
        written = round((stats.target_written_per_token or 0.0) * stats.num_tokens)
        line = {"id": prompt.id, "right": text_score(prompt, text), "tokens": stats.num_tokens}
        with path.open("a") as file:
            file.write(json.dumps({**line, "calls": stats.num_escalated, "written": written}) + "\n")


def read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def learned(name: str, edge: Engine, weights: str, home: Path, rank: int) -> Path:
    """Train on the answers to the dev half, calibrate on what was held out, and return the adapter."""
    adapter, done = home / "adapter.gguf", home / "training.json"
    if not done.exists():
        task = prepare(Store(home / "dev"), edge, weights)
        result = train(task, TrainSettings(rank), ("cpu", 0), lambda *given: None)
        result.write(adapter)
        adapted = edge.adapters.choose(str(adapter), ())
        texts = read_lessons(adapted, task.held_out, lambda: None)
        write_calibration(calibrate_lessons(task.held_out, texts, adapted, name)[0], cache_dir())
        numbers = {"trained": len(task.trained), "held_out": len(task.held_out), "agreement": str(result.held_out)}
        done.write_text(json.dumps(numbers, ensure_ascii=False))
    return adapter


def run(given: argparse.Namespace) -> None:
    pair, told = default_pair(), Told()
    with (
        skydraft.load(pair.draft, OPTIONS) as edge, skydraft.load(pair.target, OPTIONS) as target,
        served(target) as cloud,
    ):  # fmt: skip
        edge.adapters.default = "none"
        for name in [str(given.tasks)] if given.tasks else given.sets.split(","):
            home: Path = given.folder / (given.adapter.parent.name if given.tasks else name)
            home.mkdir(parents=True, exist_ok=True)
            adapter = given.adapter
            if not given.tasks:
                taught = read_tasks(f"{name}:dev", limit=given.learn)
                lessons = answers(taught, edge, cloud, home / "dev")
                rights = [lesson_score(task, each, edge) for task, each in zip(taught.prompts, lessons, strict=True)]
                told(name, f"dev half answered, {np.mean(rights):.2f} right")
                adapter = learned(name, edge, weights_of(cloud), home, given.rank)
                told(name, home.joinpath("training.json").read_text())
            tests, adapted = read_tasks(name, limit=given.test), edge.adapters.choose(str(adapter), ())
            for engine, which in ((adapted, f"edge{LEARNED}"), (edge, "edge"), (target, "cloud")):
                if not (home / f"{which}.jsonl").exists():
                    with served(engine) as far:
                        write_alone(tests, edge, far, home, which)
                told(home.name, which, shown(read(home / f"{which}.jsonl")))
            few = read_tasks(name, limit=given.limit)
            for mode in filter(None, given.modes.split(",")):
                for which, used in ((f"{mode}{LEARNED}", str(adapter)), (mode, "none")):
                    write_mode(mode, few, edge, target, used, home / f"{which}.jsonl")
                    told(home.name, which, shown(read(home / f"{which}.jsonl")))


def figures(lines: Sequence[Line]) -> dict[str, Figure | None]:
    """Right answers with Wilson's interval; calls and written tokens a token by bootstrap over the tasks."""
    columns = {key: np.array([line[key] for line in lines], float) for key in ("right", "tokens", "calls", "written")}
    draws = Resamples(len(lines))
    per_token = {key: draws.figure(columns[key], columns["tokens"]) for key in ("calls", "written")}
    return {"right": share(columns["right"]), **per_token}


def shown(lines: Sequence[Line]) -> str:
    known = ((name, cell(figure, 3)) for name, figure in figures(lines).items() if figure)
    return ", ".join([f"{len(lines)} tasks", *(f"{name} {value} ({interval})" for name, (value, interval) in known)])


def show(folder: Path, out: Path) -> None:
    """Write the figures of all sets that `folder` has, beside those of other sets that `out` has, and the plot."""
    path = out / "figures.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    found |= {
        home.name: {
            path.stem: {"tasks": len(read(path)), **{k: v and v.model_dump() for k, v in figures(read(path)).items()}}
            for path in sorted(home.glob("*.jsonl"))
        }
        for home in sorted(path.parent for path in folder.glob("*/cloud.jsonl"))
    }
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    plot(found, out / "learning.svg")


def plot(found: dict[str, Any], path: Path) -> None:
    pyplot = load_pyplot()
    across = min(len(found), 2 if len(found) == 4 else 3)
    down = -(-len(found) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(1.2 + 3.4 * across, 3.6 * down), sharey=True, squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.axis("off")
    for axis, (name, systems) in zip(axes.flat, found.items(), strict=False):
        points = {key: (value["written"]["value"], value["right"]["value"]) for key, value in systems.items()}
        axis.plot(*zip(points["edge"], points["cloud"], strict=True), color="0.7", linestyle=":", label=_AT_RANDOM)
        for key, point in points.items():
            if (mode := key.removesuffix(LEARNED)) not in _BESIDE:
                continue  # a mode with other options stands in the figures alone
            shape, color, label = ("o", "0.5", "before") if key == mode else ("^", "C0", "after")
            axis.plot(*point, shape, color=color, label=label)
            near = points.get(f"{mode}{LEARNED}", point)
            if key == mode and point != near and (np.abs(np.subtract(point, near)) < _SAME).all():
                continue  # one label is enough
            x, y = _BESIDE[mode]
            edge, auto = (points.get(f"{each}{key.removeprefix(mode)}", point) for each in ("edge", "auto"))
            if mode in ("edge", "auto") and auto[1] < edge[1]:
                y = -5 - y  # the lower one's label is below
            axis.annotate(mode, point, textcoords="offset points", xytext=(x, y),
                          ha="left" if x > 0 else "right", fontsize=8)  # fmt: skip
        axis.set(title=name, xlabel="written by the large model", xlim=(-0.2, 1.25))
    axes[0][0].set(ylim=(0, 1.05))
    for row in axes:
        row[0].set(ylabel="right answers")
    entries = {label: line for line, label in zip(*axes[0][0].get_legend_handles_labels(), strict=True)}
    axes.flat[-1].legend(entries.values(), entries, fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--tasks", type=Path, metavar="FILE", help="other tasks instead, with --adapter")
    parser.add_argument("--adapter", type=Path, metavar="FILE", help="what has learned them: its folder is their name")
    parser.add_argument("--learn", type=int, default=180, help="answers of the target, a sixth of them held out")
    parser.add_argument("--rank", type=int, default=TrainSettings().rank, help="of what is trained")
    parser.add_argument("--test", type=int, default=150, help="tasks that each model answers alone")
    parser.add_argument("--modes", default="quality,auto,answers", help="as compare takes them")
    parser.add_argument("--limit", type=int, default=60, help="tasks that are answered in each mode")
    parser.add_argument("--show", type=Path, metavar="OUT", help="run nothing, write figures and plot of DIR")
    given = parser.parse_args()
    if bool(given.tasks) != bool(given.adapter):
        parser.error("--tasks and --adapter belong together")
    if given.show:
        show(given.folder, given.show)
    else:
        run(given)
