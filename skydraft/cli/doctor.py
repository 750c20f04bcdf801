"""`skydraft doctor`: installed packages, models here and their speed, and the steps to repair the rest."""

import importlib.metadata
import math
import os
import platform
import shlex
import shutil
import time
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any

import click
from packaging.requirements import Requirement
from rich.console import Console

from skydraft import api
from skydraft.characters import one_line
from skydraft.cli.doctor_cloud import CheckChoice, examine_cloud, show_turns
from skydraft.cli.pair_options import CloudChoice, ModelChoice, models_section, server_section
from skydraft.cli.sections import Command, Section, option
from skydraft.cli.terminal import TERMINAL, console_for
from skydraft.config import DecodingParams, free_bytes
from skydraft.decoding.cost_model import CostModel
from skydraft.engines.base import Engine
from skydraft.engines.vocab import check_same
from skydraft.errors import OptionError, SkydraftError
from skydraft.evaluation.diagnosis import PROMPTS
from skydraft.evaluation.tasks.sets import read_tasks
from skydraft.models import KNOWN, cache_dir, present
from skydraft.models.fetch import verify
from skydraft.models.found import OURS, StoredModel, models_here, pairs_of, places

# The purpose of `pip install 'skydraft[NAME]'`. The metadata of skydraft names the packages of each extra.
PURPOSES = {
    "prebuilt": "GGUF models", "llamacpp": "faster GGUF models", "transformers": "hub checkpoints",
    "grammar": "text that follows a grammar", "learn": "learning a task", "omni": "models that take speech",
    "service": "all that a gateway needs",
    "audio": "reading recordings", "serve": "skydraft serve", "gateway": "skydraft gateway",
    "report": "plots of compare", "tasks": "sets of tasks of compare",
}  # fmt: skip
_NUM_TASKS, _MOST_TEXTS = 8, 16  # tasks of each set; texts that the draft model keeps in memory
_NUM_READ = 128  # tokens of a prompt
_MEMORY_SHARE = 1.5  # of the weights: KV and buffers too


def _packages(console: Console) -> Iterator[str]:
    console.print("\nextras")
    requirements = [*map(Requirement, importlib.metadata.requires("skydraft") or ())]
    for extra, purpose in PURPOSES.items():
        needed = [each for each in requirements if each.marker and each.marker.evaluate({"extra": extra})]
        found = {each: version for each in needed if (version := _version(each.name))}
        for each, version in found.items() if extra != "tasks" else ():
            if not each.specifier.contains(version, prereleases=True):
                fits = f"pip install '{each.name}{each.specifier}'"
                yield f"{each.name} {version} does not fit skydraft[{extra}]: {fits}"
        missing = [each.name for each in needed if each not in found]
        if not missing:
            versions = ", ".join(f"{each.name} {version}" for each, version in found.items())
            console.print(f"  {extra:<12} installed: {versions}")
            continue
        command = f"pip install 'skydraft[{extra}]'"
        if extra == "llamacpp":  # pip compiles it
            command = f"install a C++ compiler, then: {command}"
        elif extra == "prebuilt" and _version("llama-cpp-python") is None:  # the default pair needs one of them
            yield f"llama.cpp is missing, which runs {purpose}: {command}"
        console.print(f"  {extra:<12} missing {', '.join(missing)}; for {purpose}: {command}")
    console.print()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _checks(tasks: str | None, **given: Any) -> CheckChoice:
    if given["no_measure"] and given["devices"]:
        raise OptionError("--devices measures, and --no-measure measures nothing: choose one.")
    if math.isnan(given["seconds"]):  # which is in any range
        raise OptionError("--seconds must be a number of seconds.", hint="For example: --seconds 20.")
    if tasks is None:
        return CheckChoice(**given)
    if not given["devices"]:
        raise OptionError("--tasks needs --devices.", hint="To answer tasks, use: skydraft compare --tasks.")
    found = read_tasks(tasks, limit=_NUM_TASKS).prompts
    if heard := next((each.id for each in found if each.audio), None):
        raise OptionError(f"--devices write text only, and {heard} has a recording.", hint="Leave it out.")
    return CheckChoice(**given, prompts=found, max_new_tokens=DecodingParams().max_new_tokens)


_check_section = Section("checks", "What to check", _checks, [
    option("--no-measure", None, "Do not load and time models; with --cloud, only ask whether it answers.",
           is_flag=True),
    option("--probe-again", None, "Measure forwards again instead of using stored times.", is_flag=True),
    option("--devices", "N", "With --cloud: be N devices at once, and measure what each of them gets.",
           type=click.IntRange(1, 256)),
    option("--seconds", "S", "With --devices: measure each mode for S seconds.", default=5.0,
           type=click.FloatRange(min=0, max=3600, min_open=True)),
    option("--tasks", "A,B,…", "With --devices: write whole answers to the first 8 tasks of each of these sets or "
           "files (as for compare, without recordings), not short ones to five prompts."),
])  # fmt: skip


@click.command(cls=Command)
@_check_section
@server_section
@models_section
def doctor(checks: CheckChoice, cloud: CloudChoice, models: ModelChoice) -> int:
    """Check the installation, measure both models, and list what to repair.

    With --cloud: check the access to the server, and measure whether drafting pays over the link. The exit status is 1
    if there is something to repair.
    """
    console = console_for("auto")
    cloud.check(models)
    if checks.devices and cloud.address is None:
        raise OptionError("--devices needs a server.", hint="Add --cloud HOST:PORT or --cloud URL.")
    # A place for each text: where two texts take turns in one, the draft model reads a whole text for each token.
    num_texts = min(len(checks.prompts), _MOST_TEXTS) if checks.devices else 1
    options = replace(models.options, probe_again=checks.probe_again, max_sequences=num_texts)
    models = replace(models, options=options)
    if cloud.address is not None:
        problems = list(examine_cloud(console, cloud, models, checks))
    else:
        problems = [*_system(console), *_packages(console), *_models(console, (models.edge_model, models.target_name))]
        _propose(console, models_here(cache_dir(), places()))
        problems += _named(models) if checks.no_measure else _measure(console, models)
    for problem in problems:
        console.print(f"To do: {one_line(problem)}", style="yellow")
    if not problems:
        console.print("Nothing to repair.", style="green")
    return 1 if problems else 0


def _system(console: Console) -> Iterator[str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 if hasattr(os, "sysconf") else float("nan")
    cache = cache_dir()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 1e9
    console.print(f"python       {platform.python_version()} on {platform.system()} {platform.machine()}")
    console.print(f"processor    {os.cpu_count()} cores, {memory:.1f} GB of memory")
    console.print(f"cache        {cache} ({free:.1f} GB free)")
    if free < 4 and not all(present(model, cache) for model in KNOWN.values()):
        yield "less than 4 GB of disk are free; set SKYDRAFT_HOME to a folder with more room"


def _models(console: Console, wanted: Container[str]) -> Iterator[str]:
    for model in KNOWN.values():
        path = present(model, cache_dir())
        console.print(f"{model.name:<20} {model.bytes / 1e6:>6.0f} MB  {path or 'not here'}")
        if not path:
            if model.name in wanted:
                yield f"get the model: skydraft models fetch {model.name}"
            continue
        try:
            with TERMINAL.state(f"Checking {model.name}…"):
                verify(model, path)
        except SkydraftError as error:
            yield error.line


def _named(models: ModelChoice) -> Iterator[str]:
    """What stands in the way of each model that is no known one, as far as that shows before it is loaded."""
    for side, name in (("draft", models.edge_model), ("target", models.target_name)):
        if name in KNOWN:
            continue
        try:
            api.fitting_context([name], 1, offline=True)  # it finds the file, and reads its header
        except SkydraftError as error:
            yield f"the {side} model does not load: {error.line}"


def _propose(console: Console, here: list[StoredModel]) -> None:
    """Name the best pair with a model of another program that the free memory holds."""
    pairs = [pair for pair in pairs_of(here) if (pair.draft.owner, pair.target.owner) != (OURS, OURS)]
    if num_usable := sum(each.owner != OURS and not each.card.unfit for each in here):
        console.print(f"\nother programs have {num_usable} usable models here; more: skydraft models list")
    free = free_bytes()
    for pair in pairs:
        need = _MEMORY_SHARE * (pair.draft.bytes + pair.target.bytes)
        if free is None or need <= free:
            room = "" if free is None else f" of {free / 1e9:.1f}"
            models = f"--edge-model {shlex.quote(pair.draft.spec)} --cloud-model {shlex.quote(pair.target.spec)}"
            console.print(f"  a pair that takes {need / 1e9:.1f}{room} GB: skydraft chat {models}")
            return
    if num_usable:
        why = "the memory is too small" if pairs else "no two share a tokenizer, one twice as large as the other"
        console.print(f"  they make no pair: {why}")


def _measure(console: Console, models: ModelChoice) -> list[str]:
    engines: list[Engine] = []
    for side, name in (("draft", models.edge_model), ("target", models.target_name)):
        try:
            engines.append(replace(models, offline=True).load(name))
        except SkydraftError as error:
            return [f"the {side} model does not load: {error.line}"]
    draft, target = engines
    _show_profile(console, "draft", draft)
    _show_profile(console, "target", target)
    try:
        check_same(draft.vocab, target.vocab)
        console.print("\nvocabulary   the same on both sides")
    except SkydraftError as error:
        return [error.line]
    costs = CostModel(draft.profile.forward_ms[0], target.profile.forward_ms, target.invariant_rows)
    show_turns(console, costs)
    return []


def _show_profile(console: Console, side: str, engine: Engine) -> None:
    profile, single = engine.profile, engine.profile.forward_ms[0]
    console.print(f"\n{side}: {engine.name}, context {engine.context_len}")
    console.print(f"  one row {single:.1f} ms ({1e3 / single:.0f} tokens/s alone)")
    equal = f"up to {profile.invariant_rows} rows at once give the same bits as one by one"
    console.print(f"  invariant_rows {profile.invariant_rows}: {equal}")
    rows = "  ".join(f"{n}: {ms / single:.2f}" for n, ms in enumerate(profile.forward_ms, 1))
    console.print(f"  forward of n rows, relative to one row: {rows}")
    if engine.has_kernels:
        console.print("  measured once and kept; again with: --probe-again")
    num_read = min(_NUM_READ, engine.context_len // 2)
    token_ids = (engine.vocab.encode(" ".join(PROMPTS)) * num_read)[:num_read]
    began = time.perf_counter()
    engine.open(token_ids).close()
    console.print(f"  reads a prompt at {num_read / (time.perf_counter() - began):.0f} tokens/s (measured now)")
