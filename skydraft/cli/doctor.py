"""`skydraft doctor`: what is installed, what models are here, how fast they are, and what to do about the rest."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from typing import Any

import click
import numpy as np
from rich.console import Console

from skydraft import api
from skydraft.cli.connection import cloud_options, take_cloud
from skydraft.cli.doctor_cloud import examine
from skydraft.cli.options import build_engine_options, engine_options, target_name
from skydraft.cli.render import console_for
from skydraft.decoding.adaptive import MAX_AUTO_K, AutoK
from skydraft.engines.base import Engine, RowProfile
from skydraft.engines.probe import probe
from skydraft.engines.vocab import check_same
from skydraft.errors import OptionError, SkydraftError
from skydraft.models import cache_dir, installed, verify

_OPTIONAL = {
    "llama-cpp-python": ("llama_cpp", "GGUF models", "install a C++ compiler, then: pip install 'skydraft[llamacpp]'"),
    "transformers": ("transformers", "hub checkpoints", "pip install 'skydraft[transformers]'"),
    "torch": ("torch", "hub checkpoints", "pip install 'skydraft[transformers]'"),
}


@click.command()
@cloud_options
@engine_options
@click.option("--no-measure", is_flag=True, help="Do not load and time the models.")
def doctor(no_measure: bool, **given: Any) -> int:
    """Tell what is installed and found, measure both models, and say what to do where something is missing.

    With --cloud: can that server be used from here, what does the link cost, and is speculation worth it.
    """
    console = console_for("auto")
    cloud = take_cloud(given)
    if cloud and (no_measure or given["cloud_model"]):
        option = "--no-measure" if no_measure else "--cloud-model"
        raise OptionError(f"{option} has no place with --cloud, which measures the model on a server.")
    if cloud:
        with contextlib.closing(cloud):
            problems = list(examine(console, cloud, given))
    else:
        problems = [*_system(console), *_packages(console), *_models(console)]
    if not (no_measure or cloud):
        problems += _measure(console, given)
    for problem in problems:
        console.print(f"To do: {problem}", style="yellow")
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


def _packages(console: Console) -> Iterator[str]:
    for package, (module, purpose, remedy) in _OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            console.print(f"{package:<17} not installed; for {purpose}: {remedy}")
            if package == "llama-cpp-python":
                yield f"{package} is missing, which runs {purpose}: {remedy}"
        else:
            console.print(f"{package:<17} {importlib.metadata.version(package)}")


def _models(console: Console) -> Iterator[str]:
    for row in installed(cache_dir()):
        console.print(f"{row.name:<20} {row.bytes / 1e6:>6.0f} MB  {row.path if row.present else 'not here'}")
        if not row.present:
            yield f"get the model: skydraft models fetch {row.name}"
            continue
        try:
            verify(row.path)
        except SkydraftError as error:
            yield str(error)


def _measure(console: Console, given: dict[str, Any]) -> list[str]:
    """Load both models, show their row costs and what block length these suggest; returns what went wrong."""
    names = {"draft": given["edge_model"], "target": target_name(given)}
    given.pop("offline")
    options = build_engine_options(given)
    engines: dict[str, Engine] = {}
    for side, name in names.items():
        try:
            engines[side] = api.load(name, options, offline=True)
        except SkydraftError as error:
            return [f"the {side} model does not load: {error}"]
    profiles = {side: probe(engine) for side, engine in engines.items()}
    for side, profile in profiles.items():
        console.print(f"\n{side}: {engines[side].name}, context {engines[side].context_len}")
        _show_profile(console, profile)
    try:
        check_same(engines["draft"].vocab, engines["target"].vocab)
        console.print("\nvocabulary   the same on both sides")
    except SkydraftError as error:
        return [str(error)]
    console.print(f"signals      {_signals_ms(engines['draft'].vocab.size):.2f} ms a token for a gate on uncertainty")
    _suggest(console, profiles["draft"], profiles["target"])
    return []


def _show_profile(console: Console, profile: RowProfile) -> None:
    single = profile.forward_ms[0]
    console.print(
        f"  one row {single:.1f} ms ({1e3 / single:.0f} tokens/s alone), invariant_rows {profile.invariant_rows}"
    )
    rows = "  ".join(f"{n}: {ms / single:.2f}" for n, ms in enumerate(profile.forward_ms, 1))
    console.print(f"  forward of n rows, in units of one: {rows}")


def _signals_ms(vocab_size: int) -> float:
    import time

    from skydraft.decoding.signals import measure

    row = np.random.default_rng(0).normal(size=vocab_size).astype(np.float32)
    measure(row)
    began = time.perf_counter()
    for _ in range(10):
        measure(row)
    return (time.perf_counter() - began) * 100


def _suggest(console: Console, draft: RowProfile, target: RowProfile) -> None:
    """The best block length by the speed formula for several acceptance rates; 0 means drafting does not pay here."""
    console.print("\nfastest k in one process, lossless, by acceptance per token (0: the target alone is faster)")
    for alpha in (0.5, 0.7, 0.9):
        policy = AutoK(draft, target, target.invariant_rows, alpha=alpha)
        best = max(range(MAX_AUTO_K + 1), key=policy.tokens_per_ms)
        gain = policy.tokens_per_ms(best) / policy.tokens_per_ms(0)
        console.print(f"  {alpha:.1f}: k = {best}, {gain:.2f} times the speed of the target alone")
