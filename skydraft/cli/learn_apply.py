"""`skydraft learn apply`, `revert` and `calibrate`: what was learned is used, or not any more."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from skydraft.cli.learn import folder_argument, learn
from skydraft.cli.model_options import ModelChoice, models_section
from skydraft.cli.progress import counted
from skydraft.cli.sections import Command, Section, option
from skydraft.engines.base import Engine
from skydraft.errors import OptionError, RecordsError, SkydraftError
from skydraft.evaluation.fitting import LabelledText, fit_lessons
from skydraft.gating.calibration import Calibration, PairSide, read_calibration
from skydraft.models import cache_dir

if TYPE_CHECKING:
    from skydraft.learning.lesson import Lesson

_SHOWN = (0.85, 0.9, 0.95, 0.98)
_apply_section = Section(
    "folder",
    "Calibration",
    lambda learn: learn,
    [option("--learn", "DIR", "Fit the calibrated gate again, to what was collected in DIR.", type=Path)],
)


@learn.command(cls=Command)
@click.argument("adapter", type=Path)
@_apply_section
@models_section
def apply(adapter: Path, folder: Path | None, models: ModelChoice) -> None:
    """Use the draft model with ADAPTER from now on: it is merged in, and the merged model is kept beside the others.

    A calibration of the model as it was does not fit the new one; with --learn DIR it is made again at once.
    """
    from skydraft.learning.apply import apply as apply_adapter

    merged = apply_adapter(adapter, models.edge_model, models.load_bare_edge(), cache_dir())
    click.echo(f"{models.edge_model} is used with {adapter} from now on: {merged}")
    click.echo(f"Undo it with: skydraft learn revert --edge-model {models.edge_model}")
    if folder is None:
        click.echo("Mode auto needs a calibration again: skydraft learn calibrate DIR, or skydraft calibrate.")
        return
    try:
        _calibrate(folder, models)
    except SkydraftError as error:
        click.echo(f"The gate is not calibrated: {error.line}")


@learn.command(cls=Command)
@models_section
def revert(models: ModelChoice) -> None:
    """Use the draft model as it was before `learn apply`. The adapter's file stays."""
    from skydraft.learning.apply import revert as revert_adapter

    entry = revert_adapter(models.edge_model, cache_dir())
    click.echo(f"{models.edge_model} is used as it was. The adapter is still there: {entry.adapter}")


@learn.command(cls=Command)
@folder_argument
@models_section
def calibrate(folder: Path, models: ModelChoice) -> None:
    """Fit the gate calibrated:AGREEMENT, and with it mode auto, to what was collected in DIR.

    The draft model, with what is applied to it, reads the answers again; the target is not needed. Which limit keeps
    which agreement is told by the answers that the adapter was not trained on: on those that it was, it does too well.
    """
    _calibrate(folder, models)


def _calibrate(folder: Path, models: ModelChoice) -> None:
    from skydraft.learning.dataset import Usable, choose, prompt_digest
    from skydraft.learning.review import Reviewer
    from skydraft.learning.store import Store

    learned_from = _learned_from(models)
    with models.load_edge() as edge:
        usable = Usable(edge.vocab.fingerprint, edge.vocab.size)
        chosen = choose(Store(folder), usable)
        if chosen.skipped:
            click.echo(f"Left out: {chosen.left_out}.", err=True)
        reviewer = Reviewer(edge)
        with counted(len(chosen.lessons), "answers") as done:
            reviewed = []
            for lesson in chosen.lessons:
                reviewed.append(reviewer.review(lesson))
                done()
        target = PairSide(name=chosen.target[:12], fingerprint=chosen.target)
        unseen = [lesson for lesson in reviewed if prompt_digest(lesson) not in learned_from]
        if not unseen:
            raise RecordsError(
                f"The adapter was trained on every answer in {folder}, so none can tell how well it does on others.",
                hint=f"Collect some more with --learn {folder}.",
            )
        if learned_from:
            total = len(reviewed)
            click.echo(f"The limits come from {len(unseen)} of {total} answers: the adapter was trained on the others.")
        _written(_fitted(reviewed, unseen, edge, target, folder), edge)


def _learned_from(models: ModelChoice) -> set[str]:
    """Digests of the prompts that the draft model was trained on; none where it was not. Raises OptionError."""
    from skydraft.learning.adapter import read_adapter

    learned = models.learned
    if learned is None:
        return set()
    found = read_adapter(learned).card.trained_on if isinstance(learned, Path) else learned.trained_on
    if not found:
        raise OptionError(
            "The adapter does not say what it was trained on, so no limits can be found for it.",
            hint="Train it again with: skydraft learn train.",
        )
    return set(found)


def _fitted(lessons: list[Lesson], unseen: list[Lesson], edge: Engine, target: PairSide, folder: Path) -> Calibration:
    draft = PairSide(name=edge.name, fingerprint=edge.fingerprint)
    longest = max(len(lesson.token_ids) for lesson in lessons)
    marks = Counter(mark for lesson in unseen for mark in lesson.marks)
    num_judged = marks["a"] + marks["c"] + marks["w"]
    agreement = marks["a"] / max(num_judged, 1)
    click.echo(f"There {edge.name} agrees with the target on {agreement:.3f} of {num_judged} tokens.")
    return fit_lessons(_labelled(lessons), _labelled(unseen), draft, target, folder.name, longest)


def _labelled(lessons: list[Lesson]) -> list[LabelledText]:
    texts = []
    for lesson in lessons:
        judged = [index for index, mark in enumerate(lesson.marks) if mark in "acw" and lesson.signals_at(index)]
        signals = tuple(found for index in judged if (found := lesson.signals_at(index)))
        if judged:
            texts.append(LabelledText("target", signals, tuple(lesson.marks[index] != "a" for index in judged)))
    return texts


def _earlier(folder: Path, found: Calibration) -> Path | None:
    """The file with a calibration of the same pair, which this one replaces."""
    for path in sorted(folder.glob("*.json")):
        with suppress(RecordsError):
            if read_calibration(path).fits(found.draft.fingerprint, found.target.fingerprint):
                return path
    return None


def _written(found: Calibration, edge: Engine) -> None:
    folder = cache_dir() / "calibrations"
    out = _earlier(folder, found) or folder / f"{edge.name}--{found.target.name}.json".replace("/", "_")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(found.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{out} cannot be written: {error.strerror}.") from error
    curve = found.curve(12)
    for wanted in _SHOWN:
        points = [point for point in curve.points if point.agreement >= wanted]
        if points and curve.points[-1].agreement < wanted:
            click.echo(f"  calibrated:{wanted:<5} {points[-1].calls_per_token:.3f} calls a token (replayed)")
    click.echo(f"Written to {out}")
