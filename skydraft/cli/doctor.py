"""`skydraft doctor`: what is installed, the models, the server and the link to it, and one verdict."""

import importlib.metadata
import os
import platform
import shutil
import statistics
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import replace

import click
from packaging.requirements import Requirement
from rich.console import Console

from skydraft import api
from skydraft.characters import one_line
from skydraft.cli.pair_options import CloudChoice, ModelChoice, models_section, server_section
from skydraft.cli.sections import Command
from skydraft.cli.terminal import TERMINAL, console_for
from skydraft.config import DecodingParams, free_bytes
from skydraft.decoding.plan import make_plan
from skydraft.decoding.stats import Stats
from skydraft.edge.cloud import Cloud
from skydraft.edge.server import OURS
from skydraft.engines.base import Engine
from skydraft.engines.vocab import check_same
from skydraft.errors import CloudError, CloudLost, SkydraftError
from skydraft.models import KNOWN, cache_dir, present, resolve
from skydraft.models.fetch import verify
from skydraft.protocol.address import is_url, parse_addresses

# The purpose of `pip install 'skydraft[NAME]'`. The metadata of skydraft names the packages of each extra.
PURPOSES = {
    "prebuilt": "GGUF models", "llamacpp": "faster GGUF models", "transformers": "hub checkpoints",
    "grammar": "text that follows a grammar", "learn": "learning a task", "omni": "models that take speech",
    "service": "all that a gateway needs",
    "audio": "reading recordings", "serve": "skydraft serve", "gateway": "skydraft gateway",
    "report": "plots of compare", "tasks": "sets of tasks of compare",
}  # fmt: skip
_LOOK_S = 3.0  # for the first sign of life, and for each ping
_NUM_PINGS = 10
# Long enough for the prefix cache of a server without skydraft, which keeps whole blocks.
_PROMPT = "请用一句话描述春天的公园。" * 20
_NUM_TOKENS = 16


@click.command(cls=Command)
@server_section
@models_section
def doctor(cloud: CloudChoice, models: ModelChoice) -> int:
    """Check what is installed and whether both models load and fit together.

    With --cloud: check the server in place of a target on this machine. It writes 16 tokens, twice, to measure the
    link. Nothing is downloaded. The exit status is 1 if there is something to repair.
    """
    console = console_for("auto")
    cloud.check(models)
    models = replace(models, offline=True)
    if cloud.address is not None:
        problems = list(_servers(console, cloud, models))
    else:
        problems = [*_system(console), *_packages(console), *_models(console), *_pair(console, models)]
    for problem in problems:
        console.print(f"To do: {one_line(problem)}", style="yellow")
    if not problems:
        target = cloud.address or models.target_name
        console.print(one_line(f"Ready: {models.edge_model} drafts, {target} checks."), style="green")
    return 1 if problems else 0


def _system(console: Console) -> Iterator[str]:
    cache, room = cache_dir(), free_bytes()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 1e9
    memory = "" if room is None else f", {room / 1e9:.1f} GB of memory free"
    console.print(f"python       {platform.python_version()} on {platform.system()} {platform.machine()}")
    console.print(f"processor    {os.cpu_count()} cores{memory}")
    console.print(f"cache        {cache} ({free:.1f} GB free)")
    if free < 4 and not all(present(model, cache) for model in KNOWN.values()):
        yield "less than 4 GB of disk are free; set SKYDRAFT_HOME to a folder with more room"


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


def _models(console: Console) -> Iterator[str]:
    for model in KNOWN.values():
        path = present(model, cache_dir())
        console.print(f"{model.name:<20} {model.bytes / 1e6:>6.0f} MB  {path or 'not here'}")
        try:
            if path:
                with TERMINAL.state(f"Checking {model.name}…"):
                    verify(model, path)
        except SkydraftError as error:
            yield error.line


def _pair(console: Console, models: ModelChoice) -> Iterator[str]:
    draft = yield from _loaded(models, "draft")
    target = yield from _loaded(models, "target")
    if draft is None or target is None:
        return
    try:
        check_same(draft.vocab, target.vocab)
    except SkydraftError as error:
        yield error.line
        return
    console.print("vocabulary   the same on both sides")
    _show_calibration(console, draft, target)


def _loaded(models: ModelChoice, side: str) -> Generator[str, None, Engine | None]:
    """Open the model of this side, and return it; without one, yield the step to repair that."""
    name, adapter = (models.edge_model, models.adapter) if side == "draft" else (models.target_name, "none")
    size, room = 0, free_bytes()
    with suppress(SkydraftError):  # the load says what is wrong
        path = resolve(name, cache_dir(), offline=True).path
        size = path.stat().st_size if path and path.is_file() else 0
    if room is not None and size > room and not models.options.gpu_layers:
        needs = f"{size / 1e9:.1f} GB of memory, and {room / 1e9:.1f} GB are free"
        yield f"the {side} model needs {needs}: choose a smaller one, or close other programs"
        return None
    try:
        return models.load(name, adapter)
    except SkydraftError as error:
        yield f"the {side} model does not load: {error.line}"
        return None


def _show_calibration(console: Console, draft: Engine, target: Engine | Cloud) -> None:
    has_one = api.is_calibrated(draft, target)
    state = "calibrated for this pair" if has_one else "needs a calibration of this pair: skydraft calibrate"
    console.print(f"mode auto    {state}")


def _servers(console: Console, choice: CloudChoice, models: ModelChoice) -> Iterator[str]:
    draft, address = (yield from _loaded(models, "draft")), choice.address or ""
    met: dict[str, dict[str, str]] = {}
    for each in [address] if is_url(address) else parse_addresses(address):
        with closing(choice.but(each).connect(models.cloud_model)) as cloud:
            try:
                met[cloud.name] = yield from _examine(console, cloud, draft)
            except SkydraftError as error:
                yield f"{cloud.name} cannot be used: {error.line}"
    for name, shared in met.items():
        first = next(iter(met))
        for what, mine in shared.items():
            if mine != (theirs := met[first][what]):
                yield f"The servers {name} and {first} differ in their {what}: {mine} and {theirs}."


def _examine(console: Console, cloud: Cloud, draft: Engine | None) -> Generator[str, None, dict[str, str]]:
    """Show one server and its link; returns the properties that servers of a list share. Raises a SkydraftError."""
    with TERMINAL.state(f"Asking {cloud.name}…"):
        _check_port(cloud)
        program, shared = _described(cloud)
    console.print(f"server       {cloud.name}, {program}, {'TLS' if cloud.uses_tls else 'plaintext'}")
    for what, value in shared.items():
        console.print(f"{what:<13}{value}")
    with TERMINAL.state(f"Measuring the link to {cloud.name}…"):
        rtt_ms = statistics.median(cloud.ping(_LOOK_S) for _ in range(_NUM_PINGS))
        stats = [_written(draft, cloud) for _ in range(2)][-1] if draft else None  # the first may wait for a compiler
    if draft is not None and cloud.kind != "chat":
        _show_calibration(console, draft, cloud)
    link = f"a round trip takes {rtt_ms:.1f} ms"
    if stats and stats.itl_ms_p50 is not None:
        link += f"; a stream begins after {stats.ttft_ms:.0f} ms and gives a token every {stats.itl_ms_p50:.1f} ms"
    console.print(f"link         {link}")
    if stats and cloud.kind not in (OURS, "chat") and not stats.cached_tokens.cloud:
        yield "turn on the server's prefix cache, or let it report cached tokens: else each call reads the whole text"
    return shared


def _check_port(cloud: Cloud) -> None:
    """Raise CloudLost if nothing listens there: a server that is only slow or starting is worth waiting for."""
    try:
        cloud.ping(_LOOK_S)
    except CloudLost as error:
        if "refused" in error.message:
            raise CloudLost("The connection was refused.", hint="Check the port; is the server running?") from error
    except CloudError:
        pass  # it answers


def _described(cloud: Cloud) -> tuple[str, dict[str, str]]:
    """What runs there, and the properties that servers must share, so that a text can continue at another one."""
    if cloud.is_stock:
        facts = cloud.facts(None)
        assert facts is not None
        return cloud.kind, {"model": one_line(facts.name)}
    info = cloud.info()
    return f"skydraft {info.version}, {info.num_sessions} of {info.max_sessions} sessions in use", {
        "model": f"{info.model} ({info.weights[:8]})",
        "vocabulary": info.fingerprint[:8],
        "execution": info.execution,
        "context": str(info.context_len),
    }


def _written(draft: Engine, cloud: Cloud) -> Stats:
    """Let the server write a few tokens after a prompt of some hundred."""
    params = DecodingParams(max_new_tokens=_NUM_TOKENS)
    return api.generate(_PROMPT, edge=draft, cloud=cloud, plan=make_plan("cloud"), params=params).run().stats
