"""`skydraft learn run`: the target answers prompts; the draft model is trained on the answers and calibrated."""

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from pathlib import Path

import click

from skydraft.cli.learn import learn
from skydraft.cli.options.decoding import DecodingChoice, as_text, decoding_section
from skydraft.cli.options.pair import CloudChoice, ModelChoice, models_section, server_section
from skydraft.cli.options.sections import Command, loose, option
from skydraft.cli.progress import counted, showing
from skydraft.cli.terminal import TERMINAL
from skydraft.decoding.accounts.prices import parse_prices
from skydraft.decoding.builder import prompted
from skydraft.decoding.plan import make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.errors import OptionError, PromptError, RecordsError
from skydraft.files import ADAPTER, write_whole
from skydraft.lab.evaluation.comparison import request_of
from skydraft.lab.evaluation.modes import Mode
from skydraft.lab.evaluation.records import PromptEntry
from skydraft.lab.evaluation.workloads import read_lines, read_prompts
from skydraft.lab.learning import dataset, training
from skydraft.lab.learning.answering import Answering
from skydraft.lab.learning.calibrating import calibrate_lessons, gain_over, read_lessons, write_calibration
from skydraft.lab.learning.lessons import Store
from skydraft.lab.tasks.sets import SETS, read_tasks
from skydraft.models import adapters, cache_dir
from skydraft.models.cache import disk_errors_named, locked

_TYPICAL = 100  # assumed tokens of an answer, for the estimate


def _prompts(prompts: str, limit: int | None) -> Sequence[PromptEntry]:
    """Return the prompts of a file or a set of tasks, with checks if there are any."""
    path, are_tasks = Path(prompts), prompts.partition(":")[0] in SETS
    if not are_tasks and path.suffix in (".json", ".jsonl"):
        are_tasks = any('"check"' in line for _, line in read_lines(path, "prompt file")[1])
    found = (read_tasks(prompts, limit=limit) if are_tasks else read_prompts(path, limit=limit)).prompts
    if any(each.audio for each in found):
        raise OptionError(f"{prompts} has speech, but only text models can be trained.", hint="Leave it out.")
    if len(found) < dataset.MIN_GENERATIONS:
        message = f"{prompts} has {len(found)} prompts, but {dataset.MIN_GENERATIONS} are needed."
        raise RecordsError(message, hint="Add more prompts of the same kind; 150 are a good number.")
    return found


_task_options = loose("What to learn", [
    option("--prompts", "FILE", "Prompts like your app's: .jsonl, or one a line; 150 are a good number. Or tasks: a "
           "file, or a set such as arithmetic:dev."),
    option("--limit", "N", "Use only the first N prompts.", type=click.IntRange(min=1)),
    option("-s --system", "TEXT", "System prompt of your app.", callback=as_text),
    option("--from folder", "DIR", "Learn from the answers collected with --learn DIR instead.", type=Path),
])  # fmt: skip


_SETTINGS = training.TrainSettings()


@learn.command(cls=Command)
@click.argument("name")
@_task_options
@loose("Training", [option("-y --yes", None, "Start without asking.", is_flag=True)])
@decoding_section
@server_section
@models_section
def run(
    name: str, prompts: str | None, limit: int | None, system: str | None, folder: Path | None, yes: bool,
    decoding: DecodingChoice, cloud: CloudChoice, models: ModelChoice,
) -> int:  # fmt: skip
    """Let the draft model learn a task from the target's answers, as adapter NAME. No labels are needed.

    The target answers the prompts. The draft model is trained on most of the answers, and calibrated on the others. On
    these others the new adapter must agree with the target more than the draft model alone, and more than NAME so far;
    else it is not kept. Each answer and step is saved: after Ctrl-C the same command continues. The exit status is 0 if
    NAME is in use at the end, or nothing is new since the last run.
    """
    if (prompts is None) == (folder is None):
        raise OptionError("Give either --prompts FILE or --from DIR.", hint="See: skydraft learn run --help.")
    mode, entries = Mode("cloud", make_plan("cloud"), decoding.params()), _prompts(prompts, limit) if prompts else ()
    asks = [replace(request_of(each, mode, system=system), think=decoding.think) for each in entries]  # as an app asks
    home = adapters.home_of(name, models.edge_model, cache_dir())
    bare = replace(models, adapter="none")
    lock, busy = home.with_name(f".{name}.lock"), f"Another process is letting the draft model learn {name}."
    with disk_errors_named(cache_dir()), locked(lock, busy):
        return _Run(home, asks, folder, yes, cloud, bare).steps()


class _Run:
    """One run: answer, train, calibrate, apply. Each step leaves a file in `home`, so that the next run can continue.

    The target answers `asks`. Without them the lessons are in `folder`.
    """

    def __init__(
        self, home: Path, asks: list[GenerateRequest], folder: Path | None, yes: bool, cloud: CloudChoice,
        models: ModelChoice,
    ) -> None:  # fmt: skip
        self._home, self._asks, self._folder, self._yes = home, asks, folder, yes
        self._cloud, self._models, self._trial = cloud, models, home / "trial.gguf"

    def steps(self) -> int:
        """Run all steps, and return the exit status."""
        home = self._home
        task = self._answered()
        key, last = training.key_of(task, _SETTINGS), home / adapters.LAST_RUN
        before = last.read_text() if last.exists() else ""
        is_gone = before.endswith(adapters.IN_USE) and not (home / ADAPTER).exists()
        if before.startswith(key) and not is_gone:
            click.echo(f"Nothing is new since the last run, which {before.removeprefix(key)}.")
            return 0
        objection = self._trained(task, key) or self._calibrated(task) or self._applied(task)
        write_whole(last, f"{key}{f'kept nothing: {objection}' if objection else adapters.IN_USE}".encode(), 0o600)
        for path in home.glob("*trial*"):  # also parts that a killed run left
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        click.echo(f"Not kept: {objection}." if objection else _how_used(home.name, task))
        return 0 if (home / ADAPTER).exists() else 1

    def _answered(self) -> dataset.TrainingTask:
        """Let the target answer, and return the training's data."""
        store = Store(self._folder or self._home)
        before = Store(self._home) if self._folder else None
        with self._models.load_edge() as edge:
            dataset.trainable_file(edge)  # raises before the target is loaded
            self._leave_out_long(edge)
            with self._target() as target:
                weights = dataset.weights_of(target)
                answering = Answering(self._asks, edge, target, weights, store)
                if not _may_begin(answering, self._yes, self._cloud):
                    raise OptionError("Nothing was started.", hint="Give --yes to start without asking.")
                with counted(len(answering.todo), "answers") as done:
                    answering.run(lambda _: done())
            task = dataset.prepare(store, edge, weights, before=before)
        if task.left_out:
            TERMINAL.say(f"left out: {task.left_out}.")
        click.echo(f"{len(task.trained)} answers to learn from, {len(task.held_out)} held out.", err=True)
        return task

    def _target(self) -> AbstractContextManager[Engine | Cloud]:
        if self._cloud.address:
            return closing(self._cloud.but(require=True).connect(self._models.cloud_model))
        return self._models.load(self._models.target_name)

    def _leave_out_long(self, edge: Engine) -> None:
        """Drop prompts that are too long for training."""
        limit = min(dataset.MAX_LEN, edge.context_len)
        fit = [each for each in self._asks if len(prompted(each, edge).prompts.edge.token_ids) < limit]
        if num_long := len(self._asks) - len(fit):
            TERMINAL.say(f"left out: {num_long} prompts of {limit} tokens or more.")
        self._asks = fit

    def _trained(self, task: dataset.TrainingTask, key: str) -> str:
        """Train. Return why the new adapter should not be kept, or ""."""
        made = training.trained_before(self._trial, key)
        if not made:
            with showing() as progress:
                run_on = (self._models.options.on("edge").device, self._models.options.num_threads)
                made = training.train(task, _SETTINGS, run_on, progress.show)
            made.write(self._trial, key)
        click.echo(f"Agreement on held-out answers: {made.held_out}")
        return made.objection

    def _calibrated(self, task: dataset.TrainingTask) -> str:
        """Calibrate the gate to the new adapter, and return ""; or return why the adapter in use should stay."""
        used, name = self._home / ADAPTER, self._home.name
        with self._models.load_edge() as base, counted(len(task.held_out), "reading the held-out answers") as done:
            edge = base.adapters.choose(str(self._trial), ())
            edge.name = f"{base.name}+{name}"
            texts = read_lessons(edge, task.held_out, done)
            if used.exists() and used.read_bytes() != self._trial.read_bytes():
                with suppress(OptionError, RecordsError):  # the old one is damaged, or has another base
                    before = base.adapters.choose(str(used), ())
                    gained = gain_over(before, task.held_out, texts, base.adapters.trained_on(before))
                    if gained is None or gained.low <= 0:
                        return "it is not certainly better than the one in use, which stays in use"
            try:
                write_calibration(calibrate_lessons(task.held_out, texts, edge, name)[0], cache_dir())
            except PromptError as error:  # the answers are short
                TERMINAL.say(f"mode auto is not calibrated for {name}: {error.line}")
        return ""

    def _applied(self, task: dataset.TrainingTask) -> str:
        """Put the new adapter into use, and return ""; or return that its answers were deleted meanwhile."""
        stores = [store for each in (self._home, self._folder) if each and (store := Store(each)).files()]
        there = {dataset.answer_digest(lesson) for store in stores for lesson in store.lessons(Counter())}
        if not there.issuperset(map(dataset.answer_digest, (*task.trained, *task.held_out))):
            return "the answers that it learned from were deleted meanwhile"
        adapters.keep(self._trial.read_bytes(), self._home.name, self._models.edge_model, cache_dir())
        return ""


def _may_begin(answering: Answering, yes: bool, cloud: CloudChoice) -> bool:
    """Announce the work and ask whether to start. Without new answers or a terminal, do not ask."""
    if not answering.todo:
        return True
    num_tokens = sum(min(each.params.max_new_tokens, _TYPICAL) for each in answering.todo)
    line = f"The target will write {len(answering.todo)} answers, about {num_tokens} tokens"
    if price := cloud.given.get("price"):
        line += f", for about {parse_prices(price).total(0, answering.num_prompt_tokens, num_tokens):.2g}"
    click.echo(f"{line}. Training then takes some minutes.", err=True)
    return yes or not sys.stdin.isatty() or click.confirm("Start?", default=True, err=True)


def _how_used(name: str, task: dataset.TrainingTask) -> str:
    when = "for conversations that begin like these prompts" if task.card.beginning_len else "only when you name it"
    return (
        f"{name} is used from now on {when}. Use it with --adapter {name}; in the gateway as skydraft:{name}.\n"
        f"Measure it on other prompts: skydraft compare --prompts FILE --adapter {name}"
    )
