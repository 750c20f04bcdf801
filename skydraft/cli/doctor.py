"""`skydraft doctor`: installed packages, models here and their speed, and the steps to repair the rest.

With --cloud: whether this machine can use the server, and whether drafting pays over the link.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import click
from rich.console import Console

from skydraft.characters import one_line
from skydraft.cli.pair_options import CloudChoice, ModelChoice, load_engine, models_section, server_section
from skydraft.cli.sections import Command, Section, option
from skydraft.cli.terminal import TERMINAL, console_for
from skydraft.decoding.cost_model import CostModel
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.vocab import check_same
from skydraft.errors import CloudError, OptionError, RecordsError, SkydraftError
from skydraft.evaluation import policies
from skydraft.evaluation.diagnosis import (
    NUM_PINGS,
    PROMPTS,
    drafts_after,
    examine_link,
    ping_times,
    signals_ms,
    suggested_k,
)
from skydraft.gating.calibration import find_calibration
from skydraft.models import cache_dir, installed, verify
from skydraft.protocol.values import ServerInfo

# The purpose of `pip install 'skydraft[NAME]'`. The metadata of skydraft names the packages of each extra.
PURPOSES = {
    "llamacpp": "GGUF models", "transformers": "hub checkpoints",
    "grammar": "text that follows a grammar", "learn": "learning from corrections", "omni": "models that take speech",
    "audio": "reading recordings", "serve": "skydraft serve", "gateway": "skydraft gateway",
    "otel": "OpenTelemetry traces", "report": "reports of compare, and calibrate",
    "conformance": "tests with other people's clients", "dev": "working on skydraft",
}  # fmt: skip
_EXTRA = re.compile(r"([\w.-]+).*; extra == \W(\w+)\W")


def _packages(console: Console) -> Iterator[str]:
    """Print the installed packages of each extra; yields steps for the user."""
    console.print("\nextras")
    needed = [match.groups() for each in importlib.metadata.requires("skydraft") or () if (match := _EXTRA.match(each))]
    for extra, purpose in PURPOSES.items():
        packages = {package: _version(package) for package, name in needed if name == extra}
        missing = [package for package, version in packages.items() if version is None]
        if not missing:
            versions = ", ".join(f"{package} {version}" for package, version in packages.items())
            state = versions if len(packages) < 6 else f"all {len(packages)} packages"
            console.print(f"  {extra:<12} installed: {state}")
            continue
        lacks = ", ".join(missing) if len(missing) < 6 else f"{len(missing)} packages"
        command = f"pip install 'skydraft[{extra}]'"
        if extra == "llamacpp":  # pip compiles it, and the default pair needs it
            command = f"install a C++ compiler, then: {command}"
            yield f"{', '.join(missing)} is missing, which runs {purpose}: {command}"
        console.print(f"  {extra:<12} missing {lacks}; for {purpose}: {command}")
    console.print()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class CheckChoice:
    """The extent of measurements. Raises OptionError for options that do not fit each other."""

    no_measure: bool
    probe_again: bool
    price: str | None

    def __post_init__(self) -> None:
        if self.no_measure and self.probe_again:
            raise OptionError("--probe-again measures, and --no-measure does not: choose one.")
        if self.no_measure and self.price:
            raise OptionError("--price needs what --no-measure leaves out: choose one.")
        self.prices()

    def prices(self) -> policies.Prices | None:
        """What to price policies by."""
        return policies.parse_prices(self.price) if self.price is not None else None


def _examine_cloud(console: Console, choice: CloudChoice, models: ModelChoice, checks: CheckChoice) -> Iterator[str]:
    """Print findings about each server; yields steps for the user. Unless `checks` measure, no model is loaded."""
    edge = None
    met: dict[str, ServerInfo] = {}
    for one in choice.each():
        with closing(one.connect()) as cloud:
            try:
                info, rtt_ms = _ask(console, cloud)
            except CloudError as error:
                yield f"{cloud.name} cannot be used: {error.line}"
                continue
            met[cloud.name] = info
            if not checks.no_measure:
                edge = edge or models.load_edge()
                yield from _measure_link(console, cloud, edge, info, rtt_ms, checks)
    for name, info in met.items():
        first = next(iter(met))
        mine, theirs = _described(info), _described(met[first])
        for what in mine:
            if mine[what] != theirs[what]:
                yield f"The servers {name} and {first} differ in their {what}: {mine[what]} and {theirs[what]}."


def _described(info: ServerInfo) -> dict[str, str]:
    """The properties that servers must share, so that a text can continue at another server."""
    return {
        "vocabulary": f"{info.model} ({info.fingerprint[:8]})", "model": f"{info.model} ({info.weights[:8]})",
        "execution": info.execution, "context": str(info.context_len),
    }  # fmt: skip


def _ask(console: Console, cloud: Cloud) -> tuple[ServerInfo, float]:
    """Print and return a server's description and its round trip in milliseconds. Raises CloudError."""
    address = cloud.name
    with TERMINAL.state(f"Asking {address}…"):
        info = cloud.info()
        rtt_ms, late_ms = ping_times(cloud)
    encryption = "TLS" if cloud.uses_tls else "plaintext"
    console.print(f"cloud        {address}, skydraft {info.version}, {encryption}, token accepted or not needed")
    engine = f" on {info.engine} ({info.dtype})" if info.engine else ""
    console.print(
        f"             {info.model}{engine}, context {info.context_len}, {info.execution}, "
        f"{info.max_rows} rows a forward, {info.num_sessions} of {info.max_sessions} sessions in use"
    )
    console.print(f"round trip   p50 {rtt_ms:.2f} ms, p95 {late_ms:.2f} ms ({NUM_PINGS} health checks)")
    rows = "  ".join(f"{n}: {ms:.1f}" for n, ms in enumerate(info.forward_ms, 1))
    console.print(f"t_v(n), ms   {rows}   (as the server measured when it first loaded the model)")
    return info, rtt_ms


def _measure_link(
    console: Console, cloud: Cloud, edge: Engine, info: ServerInfo, rtt_ms: float, checks: CheckChoice
) -> Iterator[str]:
    try:
        with TERMINAL.state(f"Answering {len(PROMPTS)} prompts over the link…"):
            report = examine_link(edge, cloud, info, rtt_ms)
    except SkydraftError as error:
        yield f"{edge.name} cannot draft for {info.model}: {error.line}"
        return
    costs, alpha, k, even_ms = report.costs, report.alpha, report.best_k, report.break_even_ms
    console.print(
        f"acceptance   {alpha:.2f} per judged draft, {report.tokens_per_round:.2f} tokens a round at k={report.k}, "
        f"{report.bytes_per_token:.1f} bytes a token ({len(PROMPTS)} prompts, {report.num_tokens} tokens)"
    )
    console.print(f"on the link  {report.wire_ms:.2f} ms a round beside the two models' forwards")
    console.print(f"t_d          {costs.draft_ms:.1f} ms a drafted token on this machine")
    console.print(f"\nstreaming    {costs.tokens_per_s(alpha, 0):.1f} tokens/s (mode cloud)")
    console.print(f"speculation  {costs.tokens_per_s(alpha, k):.1f} tokens/s at best, with k = {k}")
    if report.gain > 1:
        pays = f"it pays up to a round trip of {even_ms:.0f} ms"
        console.print(f"verdict      speculation is {report.gain:.2f} times as fast here; {pays}")
    else:
        why = "a faster link would not help: drafting and checking cost more than they save."
        why = f"speculation would pay below a round trip of {even_ms:.1f} ms." if even_ms > 0 else why
        console.print(f"verdict      streaming is faster here ({1 / report.gain:.2f} times); {why}")
        console.print("             A gated mode saves written tokens, not calls: a stream is one call.")
    _show_turns(console, costs)
    _show_policies(console, (edge.fingerprint, info.weights or None), f"{edge.name} and {info.model}", costs, checks)


def _show_turns(console: Console, costs: CostModel) -> None:
    """Print when lossless with --k auto drafts."""
    after = drafts_after(costs)
    if after is None:
        does = "never drafts: the target writes alone"
    elif after:
        tokens = "a token" if after == 1 else f"{after} tokens in a row"
        does = f"drafts once the draft model would have written {tokens} as the target did"
    else:
        does = "drafts from the start"
    console.print(f"lossless     with --k auto it {does}")


def _show_policies(
    console: Console, pair: tuple[str, str | None], names: str, costs: CostModel, checks: CheckChoice
) -> None:
    """Print what each hand-back costs over the link, if the pair has a calibration."""
    try:
        calibration = find_calibration([cache_dir() / "calibrations"], *pair, names)
    except (OptionError, RecordsError) as error:
        console.print(f"hand-backs   not compared: {error.line}")
        return
    known = policies.policies(calibration, costs)
    if not known:
        console.print("hand-backs   not compared: make the calibration again with skydraft calibrate")
        return
    console.print("hand-backs   each hand-back in mode auto, figures per token of the text, estimated from the")
    console.print("             calibration. calls: times that the device asks and waits; written: tokens that the")
    console.print("             large model writes itself")
    for line in policies.table(known, checks.prices()):
        console.print(line)


_check_section = Section("checks", "What to check", CheckChoice, [
    option("--no-measure", None, "Do not load and time models; with --cloud, only ask whether it answers.",
           is_flag=True),
    option("--probe-again", None, "Measure forwards again instead of using stored times.", is_flag=True),
    option("--price", "CALL,ROW,WRITTEN", "Prices of a call, of a row (a token that the large model reads, checks "
           "or writes) and of a written token, in any unit: adds the price of 1,000 tokens to each hand-back."),
])  # fmt: skip


@click.command(cls=Command)
@_check_section
@server_section
@models_section
def doctor(checks: CheckChoice, cloud: CloudChoice, models: ModelChoice) -> int:
    """Check the installation, measure both models, and list the steps to repair it.

    With --cloud: check the access to the server, and measure whether drafting pays over the link. The exit status is 1
    if there is something to repair.
    """
    console = console_for("auto")
    cloud.check(models)
    models = replace(models, options=replace(models.options, probe_again=checks.probe_again))
    if cloud.address is not None:
        problems = list(_examine_cloud(console, cloud, models, checks))
    else:
        problems = [*_system(console), *_packages(console), *_models(console)]
        problems += [] if checks.no_measure else _measure(console, models, checks)
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


def _measure(console: Console, models: ModelChoice, checks: CheckChoice) -> list[str]:
    """Load both models, show their row costs and the block length that these suggest; returns steps for the user."""
    engines: list[Engine] = []
    for side, name in (("draft", models.edge_model), ("target", models.target_name)):
        try:
            engines.append(load_engine(name, models.options, offline=True))
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
    with TERMINAL.state("Measuring a gate…"):
        gate_ms = signals_ms(draft.vocab.size)
    console.print(f"signals      {gate_ms:.2f} ms a token for a gate on uncertainty")
    console.print("\nfastest k in one process, lossless, by acceptance per token (0: the target alone is faster)")
    for alpha in (0.5, 0.7, 0.9):
        best, gain = suggested_k(draft.profile, target.profile, alpha)
        console.print(f"  {alpha:.1f}: k = {best}, {gain:.2f} times the speed of the target alone")
    costs = CostModel(draft.profile.forward_ms[0], target.profile.forward_ms, target.invariant_rows)
    _show_turns(console, costs)
    _show_policies(console, (draft.fingerprint, target.fingerprint), f"{draft.name} and {target.name}", costs, checks)
    return []


def _show_profile(console: Console, side: str, engine: Engine) -> None:
    profile, single = engine.profile, engine.profile.forward_ms[0]
    console.print(f"\n{side}: {engine.name}, context {engine.context_len}")
    console.print(
        f"  one row {single:.1f} ms ({1e3 / single:.0f} tokens/s alone), invariant_rows {profile.invariant_rows}"
    )
    rows = "  ".join(f"{n}: {ms / single:.2f}" for n, ms in enumerate(profile.forward_ms, 1))
    console.print(f"  forward of n rows, in units of one: {rows}")
    if profile.date:
        console.print(f"  measured {profile.date}, up to {profile.probed_len} tokens; again with: --probe-again")
