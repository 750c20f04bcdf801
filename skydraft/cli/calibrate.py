"""`skydraft calibrate`: fit the calibrated gate to a pair of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from skydraft.cli.compare import prompts_section
from skydraft.cli.model_options import ModelChoice, models_section
from skydraft.cli.progress import counted
from skydraft.cli.sections import Command, Section, option
from skydraft.errors import OptionError
from skydraft.evaluation.fitting import LabelledText, alone_agreement, fit, label_texts, sklearn_linear
from skydraft.evaluation.workloads import Workload
from skydraft.gating.calibration import MAX_BLOCK, Calibration
from skydraft.models import cache_dir

_SHOWN = (0.85, 0.9, 0.95, 0.98)


_fitting_section = Section(
    "fitting",
    "Fitting",
    lambda max_new_tokens, out: (max_new_tokens, out),
    [
        option("-n --max-new-tokens", "N", "Tokens of a text, at most.", type=click.IntRange(min=1), default=64),
        option("--out", "FILE", "Where to write it (default: where it will be found).", type=Path),
    ],
)


@click.command(cls=Command)
@prompts_section()
@_fitting_section
@models_section
def calibrate(workload: Workload, fitting: tuple[int, Path | None], models: ModelChoice) -> None:
    """Fit the gate calibrated:AGREEMENT, and with it mode auto, to a pair of models.

    Both models answer the prompts alone, greedily, in this process; at each token the draft model's uncertainty is
    compared with what the target would have written. Use prompts like those that you will ask.
    """
    max_new_tokens, out = fitting
    sklearn_linear()  # a missing package is found now, not after minutes
    edge, cloud = models.load_pair()
    with counted(len(workload.prompts), "prompts") as done:
        texts = label_texts(edge, cloud, workload, max_new_tokens, done)
    found = fit(texts, edge, cloud, workload, max_new_tokens)
    out = out or cache_dir() / "calibrations" / f"{edge.name}--{cloud.name}.json".replace("/", "_")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(found.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{out} cannot be written: {error.strerror}.") from error
    _show(found, texts)
    click.echo(f"Written to {out}")


def _show(found: Calibration, texts: Sequence[LabelledText]) -> None:
    agreement, num_tokens = alone_agreement(texts)
    click.echo(f"{found.draft.name} alone agrees with {found.target.name} on {agreement:.3f} of {num_tokens} tokens.")
    click.echo(f"Its uncertainty predicts disagreement with an AUROC of {found.fitted.auroc:.3f} on these prompts.")
    click.echo(f"Expected with blocks of up to {MAX_BLOCK} that end at the gate's limit (replayed on these prompts):")
    curve = found.curve(MAX_BLOCK)
    for wanted in _SHOWN:
        points = [point for point in curve.points if point.agreement >= wanted]
        if points and curve.points[-1].agreement < wanted:
            click.echo(f"  calibrated:{wanted:<5} {points[-1].calls_per_token:.3f} calls a token")
