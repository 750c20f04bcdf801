"""`skydraft learn run`: the target answers prompts, the draft model learns from that, is judged, and used."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from skydraft.access.limits import Limits
from skydraft.cli.learn import learn
from skydraft.cli.learned import Judge, show_table
from skydraft.cli.options import DecodingChoice, as_text, decoding_section
from skydraft.cli.pair_options import CloudChoice, ModelChoice, models_section, server_section
from skydraft.cli.progress import showing
from skydraft.cli.sections import Command, Section, option
from skydraft.cli.terminal import TERMINAL
from skydraft.decoding.plan import make_plan
from skydraft.decoding.prices import parse_prices
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.errors import OptionError, RecordsError
from skydraft.evaluation.comparison import asked_of, params_of
from skydraft.evaluation.modes import Mode
from skydraft.evaluation.records import PromptEntry
from skydraft.evaluation.tasks.sets import SETS, read_tasks
from skydraft.evaluation.workloads import Workload, read_lines, read_prompts
from skydraft.learning import training
from skydraft.learning.answering import NUM_SIDE_BY_SIDE, Answering, longest_of
from skydraft.learning.calibrating import calibrate_lessons, write_calibration
from skydraft.learning.dataset import (
    MIN_GENERATIONS,
    Chosen,
    TrainingTask,
    guard_requests,
    prepare,
    trainable_file,
    weights_of,
)
from skydraft.learning.lessons import Lesson, Store
from skydraft.models import adapters, cache_dir

if TYPE_CHECKING:
    from skydraft.edge.cloud import Cloud

_PATIENT_S = 600.0  # this machine may be slow, but it does not go away
_TYPICAL = 100  # tokens of an answer, before the first one is known


def _asked(prompts: str | None, limit: int | None, system: str | None, folder: Path | None) -> Asked:
    if (prompts is None) == (folder is None):
        raise OptionError("Give either --prompts FILE or --from DIR.", hint="See: skydraft learn run --help.")
    return Asked(_workload(prompts, limit, system) if prompts else None, system, folder)


def _workload(prompts: str, limit: int | None, system: str | None) -> Workload:
    """The prompts of a file, with checks where it has some, or of a set of tasks."""
    path = Path(prompts)
    if prompts.partition(":")[0] in SETS or (
        path.suffix in (".json", ".jsonl") and '"check"' in read_lines(path, "prompt file")[1][0][1]
    ):
        found = read_tasks(prompts, limit=limit)
    else:
        found = read_prompts(path, limit=limit)
    if len(found.prompts) < MIN_GENERATIONS:
        raise RecordsError(
            f"{prompts} has {len(found.prompts)} prompts, and {MIN_GENERATIONS} are needed; 150 are a good number.",
            hint="Add more prompts of the same kind.",
        )
    return dataclasses.replace(found, sha256=hashlib.sha256(f"{found.sha256} {system}".encode()).hexdigest())


def _has_checks(path: Path) -> bool:
    """Whether the first line of a file is a task."""
    _, lines = read_lines(path, "prompt file")
    return path.suffix in (".json", ".jsonl") and any('"check"' in line for _, line in lines[:1])


@dataclass(frozen=True, slots=True)
class Asked:
    """What to learn: prompts that the target is to answer, or a folder of lessons."""

    workload: Workload | None
    system: str | None
    folder: Path | None

    @property
    def prompts(self) -> Sequence[PromptEntry]:
        return self.workload.prompts if self.workload else ()


_asked_section = Section("asked", "What to learn", _asked, [
    option("--prompts", "FILE", "Prompts like those of your app: .jsonl, or one a line; 150 are a good number. With "
           "checks (see docs/tasks.md) right answers are counted. Or a set of tasks, for example arithmetic:dev."),
    option("--limit", "N", "Use the first N prompts only.", type=click.IntRange(min=1)),
    option("-s --system", "TEXT", "System prompt of your app.", callback=as_text),
    option("--from folder", "DIR", "Learn from what was collected with --learn DIR instead.", type=Path),
])  # fmt: skip


@dataclass(frozen=True, slots=True)
class How:
    """How to train, and whether to ask before it begins."""

    settings: training.TrainSettings
    everything: bool
    yes: bool

    def deadline(self) -> float:
        return time.monotonic() + 60 * self.settings.minutes if self.settings.minutes else float("inf")


_how_section = Section("how", "Training", lambda everything, yes, **given: How(
    training.TrainSettings(**given), everything, yes
), [
    option("--minutes", "N", "Stop after about N minutes; the same command continues (default: 0, no limit).",
           default=0.0),
    option("-y --yes", None, "Begin without a question.", is_flag=True),
    option("--everything", None, "Use it for all texts, not only those that begin as these do. Then it is kept only if "
           "general prompts do not suffer.", is_flag=True),
    option("--layers num_layers", "N", "Upper layers that learn (default: 12; below 80 answers 4).", type=int),
    option("--epochs", "N", "Most passes over the answers.", default=3),
    option("--rank", "N", "Rank of the changes.", default=16),
    option("--rate", "X", "Learning rate at the beginning.", default=1.5e-4),
])  # fmt: skip


@learn.command(cls=Command)
@click.argument("name")
@_asked_section
@_how_section
@decoding_section
@server_section
@models_section
def run(
    name: str, asked: Asked, how: How, decoding: DecodingChoice, cloud: CloudChoice, models: ModelChoice
) -> int:  # fmt: skip
    """Let the draft model learn a task from the target's own answers, and use what it learned as NAME.

    The target answers the prompts, many side by side; the draft model is trained on most of the answers, judged on the
    others, and calibrated. It is kept only if it agrees with the target on more of them. No labels are needed. Each
    step is kept: after Ctrl-C, or at the end of --minutes, the same command continues.
    """
    cloud.check(models)
    home, deadline = adapters.home_of(name, models.edge_model, cache_dir()), how.deadline()
    bare = dataclasses.replace(models, adapter="none")
    try:
        task, kept = _answers(asked, decoding, cloud, bare, Store(asked.folder or home), how, deadline)
        home.mkdir(parents=True, exist_ok=True)
        result = _trained(task, how, bare, home, deadline)
    except TimeoutError as error:
        click.echo(f"{how.settings.minutes:g} minutes are over: {error}. The same command continues.")
        return 1
    click.echo(f"Agreement on held-out answers: {result.held_out}")
    if result.guard:
        click.echo(f"Agreement on general prompts:  {result.guard}")
    if objection := result.objection(how.everything):
        click.echo(f"Not kept: {objection}.")
        return 1
    trial = home / "trial.gguf"
    result.write(trial)
    judge = Judge(asked.workload, kept, decoding, asked.system, home)
    _calibrated(trial, task, bare, name)
    if judge.prompts:
        show_table(*judge.figures(trial, cloud, bare))
    adapters.keep(trial.read_bytes(), name, models.edge_model, cache_dir(), asked.folder)
    trial.unlink()
    (home / "training").unlink(missing_ok=True)
    click.echo(_how_used(name, task, how))
    return 0


def _requests(asked: Asked, decoding: DecodingChoice) -> list[GenerateRequest]:
    mode = Mode("cloud", make_plan("cloud"), decoding.params())
    return [
        GenerateRequest(
            asked_of(each, asked.system),
            params=params_of(mode, each),
            think=decoding.think,
            tools=each.task.tools if each.task else (),
        )
        for each in asked.prompts
    ]


def _answers(
    asked: Asked, decoding: DecodingChoice, cloud: CloudChoice, models: ModelChoice, store: Store, how: How,
    deadline: float,
) -> tuple[TrainingTask, list[PromptEntry]]:  # fmt: skip
    """The training's data, once the target has answered; and the prompts that are held out."""
    with models.load_edge() as edge:
        trainable_file(edge)  # before the target is loaded
        requests, guards = _requests(asked, decoding), guard_requests()
        with _target(cloud, models, longest_of([*requests, *guards], edge)) as far:
            weights = weights_of(far)
            answering = Answering(requests, edge, far, weights, store)
            guarding = Answering(guards, edge, far, weights, Store(cache_dir() / "guard"))
            if not _may_begin(answering, guarding, edge, how, cloud):
                raise OptionError("Nothing was begun.", hint="Give --yes to begin without a question.")
            lessons = _answered(answering, "answers", deadline)
            guard = [each for each in _answered(guarding, "general answers", deadline) if each]
        task = prepare(store, edge, weights, guard, deadline, for_all=how.everything)
    if task.left_out:
        TERMINAL.say(f"left out: {task.left_out}.")
    click.echo(f"{len(task.trained)} answers to learn from, {len(task.held_out)} held out.", err=True)
    held_out = {lesson.prompt_ids for lesson in task.held_out}
    answered = zip(asked.prompts, lessons, strict=True)
    return task, [prompt for prompt, lesson in answered if lesson and lesson.prompt_ids in held_out]


@contextmanager
def _target(cloud: CloudChoice, models: ModelChoice, longest: int) -> Iterator[Cloud]:
    """The server, or the target of this process behind a server of its own, which computes many texts at once.

    Each has room for `longest` tokens.
    """
    if cloud.address:
        with closing(cloud.but(require=True).connect(models.cloud_model)) as far:
            yield far
        return
    from skydraft.cloud.options import ServeOptions
    from skydraft.cloud.server import running
    from skydraft.cloud.worker import Worker

    limits = Limits(max_sessions=NUM_SIDE_BY_SIDE)
    options = ServeOptions(port=0, execution="throughput", limits=limits)
    context_len = min(longest, models.options.context_len)
    run_options = dataclasses.replace(
        models.options, context_len=context_len, max_sequences=NUM_SIDE_BY_SIDE, shared_cache=True
    )
    engine = dataclasses.replace(models, options=run_options).load(models.target_name)
    with (
        engine,
        running(Worker(engine, limits, execution="throughput"), options) as port,
        closing(CloudChoice(f"127.0.0.1:{port}", {"require": True, "timeout_s": _PATIENT_S}).connect()) as far,
    ):
        yield far


def _may_begin(answering: Answering, guarding: Answering, edge: Engine, how: How, cloud: CloudChoice) -> bool:
    """Say what is to come, and ask. Nobody is asked where there is nothing to write, or no terminal."""
    num_todo = len(answering.todo)
    if not num_todo:
        return True
    num_tokens = sum(min(each.params.max_new_tokens, _TYPICAL) for each in (*answering.todo, *guarding.todo))
    line = f"The target is to write {num_todo} answers, some {num_tokens} tokens"
    if price := cloud.given.get("price"):
        line += f", for about {parse_prices(price).total(0, answering.num_prompt_tokens, num_tokens):.2g}"
    click.echo(f"{line}. Training then takes some minutes.", err=True)
    return how.yes or not sys.stdin.isatty() or click.confirm("Begin?", default=True, err=True)


def _answered(answering: Answering, what: str, deadline: float) -> list[Lesson | None]:
    num_todo = len(answering.todo)
    with showing(what) as progress:
        progress.show(what, 0, num_todo)

        def on_done(lesson: Lesson) -> None:
            progress.show(what, num_todo - len(answering.todo), num_todo)
            if time.monotonic() > deadline:
                raise TimeoutError("what was answered is kept")

        return answering.run(on_done)


def _trained(task: TrainingTask, how: How, models: ModelChoice, home: Path, deadline: float) -> training.Trained:
    with showing("training") as progress:
        run_on = (models.options.device, models.options.num_threads)
        return training.train(task, how.settings, run_on, home / "training", progress.show, deadline)


def _calibrated(adapter: Path, task: TrainingTask, models: ModelChoice, name: str) -> None:
    """Fit the gate to the draft model with the adapter, on the answers that were held out."""
    chosen = Chosen(tuple(task.held_out), task.card.target, Counter())
    with models.load_edge() as base:
        edge = base.adapters.choose(str(adapter), ())
        edge.name = f"{base.name}+{name}"
        calibration, _ = calibrate_lessons(chosen, edge, frozenset(), name, lambda: None)
    write_calibration(calibration, cache_dir())


def _how_used(name: str, task: TrainingTask, how: How) -> str:
    if how.everything:
        return f"{name} is used for all texts from now on. Undo it with: skydraft learn revert {name}"
    by_name = f"Use it with --adapter {name}; in the gateway as skydraft:{name}."
    if not task.card.beginning_len:
        return f"{by_name} The prompts begin alike in nothing, so it is used only where it is named."
    return f"{name} is used from now on where a conversation begins as these prompts do. {by_name}"
