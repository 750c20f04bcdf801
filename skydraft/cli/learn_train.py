"""`skydraft learn train`: an adapter from what was collected."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from skydraft.cli.cloud_options import CloudChoice, server_section
from skydraft.cli.learn import folder_argument, learn
from skydraft.cli.model_options import ModelChoice, models_section
from skydraft.cli.progress import counted
from skydraft.cli.sections import Command, Section, option
from skydraft.cli.terminal import TERMINAL
from skydraft.engines.base import Engine
from skydraft.errors import OptionError
from skydraft.models import cache_dir

if TYPE_CHECKING:
    from skydraft.learning.adapter import AdapterCard
    from skydraft.learning.training import OnProgress, Trained, TrainingData, TrainSettings

_SCALE = 2.0  # of low-rank changes, alpha / rank in the words of peft


@dataclasses.dataclass(frozen=True, slots=True)
class TrainChoice:
    """Where the adapter goes, and how it is trained."""

    out: Path
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.out.parent.is_dir():
            raise OptionError(f"There is no folder {self.out.parent}.", hint="Make it, or choose another --out.")

    @property
    def state(self) -> Path:
        """What a training that was stopped goes on from."""
        return self.out.with_name(self.out.name + ".state")


_train_section = Section(
    "train",
    "Training",
    lambda out, layers, **settings: TrainChoice(out, settings | {"num_layers": layers}),
    [
        option("--out", "FILE", "Where the adapter is written.", type=Path, required=True),
        option("--minutes", "N", "Stop after N minutes; the same command goes on (default: 0, no limit).", default=0.0),
        option(
            "--layers", "N", "Upper layers that learn (default: 4; 12 from 150 answers on, which is slower).", type=int
        ),
        option("--epochs", "N", "How often each answer is learned from, at most.", default=4),
        option("--rank", "N", "Rank of the changes.", default=16),
        option("--rate", "X", "Learning rate at the beginning.", default=1.5e-4),
        option("--seed", "N", "Seed of the order and of the first changes.", default=0),
    ],
)


@learn.command(cls=Command)
@folder_argument
@_train_section
@server_section
@models_section
def train(folder: Path, train: TrainChoice, cloud: CloudChoice, models: ModelChoice) -> int:
    """Train the draft model on what was collected in DIR, and write an adapter.

    Some answers are held out, and general prompts that come along guard what the model knew before; the target answers
    these once. The adapter is kept only if the draft model agrees with the target on more of the held-out tokens, for
    certain, and not on fewer of the general ones; else the exit status is 1. Ctrl-C stops; the same command goes on.
    """
    from skydraft.learning.training import TrainSettings, train_file, usual_layers

    cloud.check(models)
    num_layers = train.settings["num_layers"]
    settings = TrainSettings(**train.settings | {"num_layers": usual_layers(0) if num_layers is None else num_layers})
    path, card, data, vocab_size = _gather(folder, cloud, models)
    if num_layers is None:
        settings = dataclasses.replace(settings, num_layers=usual_layers(len(data.trained)))
    run_on = (models.options.device, models.options.num_threads)
    with _shown() as progress:
        found = train_file(path, run_on, data, settings, card, vocab_size, train.state, progress)
    return _conclude(found, train, settings)


def _gather(folder: Path, cloud: CloudChoice, models: ModelChoice) -> tuple[Path, AdapterCard, TrainingData, int]:
    """(file of the draft model, what an adapter of it begins with, lessons, tokens of the vocabulary)."""
    from skydraft.learning.adapter import AdapterCard
    from skydraft.learning.dataset import Usable, choose, split
    from skydraft.learning.guard import guard_lessons, guard_prompts
    from skydraft.learning.store import Store
    from skydraft.learning.training import TrainingData, trainable_file

    choose(Store(folder), Usable())  # too few are found before a model is loaded
    with contextlib.ExitStack() as stack:
        edge = stack.enter_context(models.load_bare_edge())
        path = trainable_file(edge)
        remote = cloud.connect()
        target = (
            stack.enter_context(contextlib.closing(remote)) if remote else stack.enter_context(models.load_target())
        )
        weights = target.fingerprint if isinstance(target, Engine) else target.weights(quick=False)[1]
        chosen = choose(Store(folder), Usable(edge.vocab.fingerprint, edge.vocab.size, weights))
        if chosen.skipped:
            TERMINAL.say(f"left out: {chosen.left_out}.")
        guard: list[Any] = []
        if edge.takes_audio:
            TERMINAL.say(f"{edge.name} takes speech, and the guard has none: it is not guarded.")
        else:
            with counted(len(guard_prompts()), "general prompts") as done:
                guard = guard_lessons(cache_dir() / "guard", edge, target, done)
        card = AdapterCard(
            base=edge.fingerprint, base_name=edge.name, vocab=edge.vocab.fingerprint, target=weights, scale=_SCALE,
            num_trained=0, held_out=(0.0, 0.0), guard=(0.0, 0.0),
        )  # fmt: skip
        trained, held_out = split(chosen.lessons)
        click.echo(
            f"{len(trained)} answers to learn from, {len(held_out)} held out, {len(guard)} general ones.", err=True
        )
        return path, card, TrainingData(trained, held_out, guard), edge.vocab.size


@contextlib.contextmanager
def _shown() -> Iterator[OnProgress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("loading", total=None)

        def progress(what: str, done: int, total: int, note: str) -> None:
            bar.update(task, description=f"{what} {note}".strip(), completed=done, total=total or None)

        yield progress


def _conclude(found: Trained, train: TrainChoice, settings: TrainSettings) -> int:
    """Say what came of it; write the adapter if it is to be kept. Returns the exit status."""
    from skydraft.learning.adapter import write_adapter

    click.echo(f"α on held-out answers: {found.held_out}")
    if found.guard:
        click.echo(f"α on general prompts:  {found.guard}")
    if not found.is_whole:
        click.echo(f"The {settings.minutes:g} minutes are over; the same command goes on from here.")
    if found.objection:
        click.echo(f"Not kept: {found.objection}. Collect more answers, or try other --layers and --rate.")
        return 1
    write_adapter(train.out, found.adapter)
    if found.is_whole:
        train.state.unlink(missing_ok=True)
    click.echo(f"Written to {train.out}. Use it with: skydraft learn apply {train.out}")
    return 0
