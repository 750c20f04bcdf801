"""`skydraft doctor`: what is installed, what models are here, how fast they are, and what to do about the rest."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace

import click
from rich.console import Console

from skydraft.characters import one_line
from skydraft.cli.cloud_options import CloudChoice, server_section
from skydraft.cli.doctor_cloud import examine
from skydraft.cli.doctor_packages import examine_packages
from skydraft.cli.model_options import ModelChoice, load_engine, models_section
from skydraft.cli.render import console_for
from skydraft.cli.sections import Command, Section, option
from skydraft.cli.terminal import TERMINAL
from skydraft.engines.base import Engine
from skydraft.engines.options import RowProfile
from skydraft.engines.vocab import check_same
from skydraft.errors import OptionError, SkydraftError
from skydraft.evaluation.diagnosis import signals_ms, suggested_k
from skydraft.models import cache_dir, installed, verify


@dataclass(frozen=True, slots=True)
class CheckChoice:
    """What is measured. Raises OptionError for both at once."""

    no_measure: bool
    probe_again: bool

    def __post_init__(self) -> None:
        if self.no_measure and self.probe_again:
            raise OptionError("--probe-again measures, and --no-measure does not: choose one.")


_check_section = Section(
    "checks",
    "What to check",
    CheckChoice,
    [
        option(
            "--no-measure",
            None,
            "Do not load and time models; with --cloud, only ask whether it answers.",
            is_flag=True,
        ),
        option("--probe-again", None, "Measure forwards anew, instead of using what is remembered.", is_flag=True),
    ],
)


@click.command(cls=Command)
@_check_section
@server_section
@models_section
def doctor(checks: CheckChoice, cloud: CloudChoice, models: ModelChoice) -> int:
    """Check what is installed, measure both models, and say what to do about what is missing.

    With --cloud: check that the server can be used from here, and measure what the link to it is worth. The exit
    status is 1 when there is something to do.
    """
    console = console_for("auto")
    cloud.check(models)
    models = replace(models, options=replace(models.options, probe_again=checks.probe_again))
    if cloud.address is not None:
        problems = list(examine(console, cloud, models, measures=not checks.no_measure))
    else:
        problems = [*_system(console), *examine_packages(console), *_models(console)]
        problems += [] if checks.no_measure else _measure(console, models)
    for problem in problems:
        console.print(f"To do: {one_line(problem)}", style="yellow")
    if not problems:
        console.print("All is well.", style="green")
    return 1 if problems else 0


def _system(console: Console) -> Iterator[str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 if hasattr(os, "sysconf") else float("nan")
    cache = cache_dir()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 1e9
    console.print(f"python       {platform.python_version()} on {platform.system()} {platform.machine()}")
    console.print(f"processor    {os.cpu_count()} cores, {memory:.1f} GB of memory")
    console.print(f"cache        {cache} ({free:.1f} GB free)")
    if free < 4 and not all(row.present for row in installed(cache)):
        yield "less than 4 GB of disk are free; set SKYDRAFT_HOME to a folder with more room"


def _models(console: Console) -> Iterator[str]:
    for row in installed(cache_dir()):
        console.print(f"{row.name:<20} {row.bytes / 1e6:>6.0f} MB  {row.path if row.present else 'not here'}")
        if not row.present:
            yield f"get the model: skydraft models fetch {row.name}"
            continue
        try:
            with TERMINAL.state(f"Checking {row.name}…"):
                verify(row.path)
        except SkydraftError as error:
            yield error.line


def _measure(console: Console, models: ModelChoice) -> list[str]:
    """Load both models, show their row costs and what block length these suggest; returns what went wrong."""
    engines: dict[str, Engine] = {}
    for side, name in {"draft": models.edge_model, "target": models.target_name}.items():
        try:
            engines[side] = load_engine(name, models.options, offline=True)
        except SkydraftError as error:
            return [f"the {side} model does not load: {error.line}"]
    draft, target = engines["draft"], engines["target"]
    for side, engine in engines.items():
        console.print(f"\n{side}: {engine.name}, context {engine.context_len}")
        _show_profile(console, engine.profile)
    try:
        check_same(draft.vocab, target.vocab)
        console.print("\nvocabulary   the same on both sides")
    except SkydraftError as error:
        return [error.line]
    with TERMINAL.state("Measuring a gate…"):
        gate_ms = signals_ms(draft.vocab.size)
    console.print(f"signals      {gate_ms:.2f} ms a token for a gate on uncertainty")
    console.print("\nfastest k in one process, lossless, by acceptance per token (0: the target alone is faster)")
    for alpha in (0.5, 0.7, 0.9):
        best, gain = suggested_k(draft.profile, target.profile, alpha)
        console.print(f"  {alpha:.1f}: k = {best}, {gain:.2f} times the speed of the target alone")
    return []


def _show_profile(console: Console, profile: RowProfile) -> None:
    single = profile.forward_ms[0]
    console.print(
        f"  one row {single:.1f} ms ({1e3 / single:.0f} tokens/s alone), invariant_rows {profile.invariant_rows}"
    )
    rows = "  ".join(f"{n}: {ms / single:.2f}" for n, ms in enumerate(profile.forward_ms, 1))
    console.print(f"  forward of n rows, in units of one: {rows}")
    if profile.date:
        console.print(f"  measured {profile.date}, up to {profile.probed_len} tokens; again with: --probe-again")
