"""`skydraft doctor`: what is installed, the models, the server and the link to it, and one verdict."""

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import replace

import click
from packaging.requirements import Requirement
from rich.console import Console

from skydraft import api
from skydraft.characters import one_line
from skydraft.cli.options.pair import CloudChoice, ModelChoice, models_section, server_section
from skydraft.cli.options.sections import Command
from skydraft.cli.terminal import TERMINAL, console_for
from skydraft.config import DecodingParams, free_bytes
from skydraft.decoding.accounts.stats import Stats
from skydraft.decoding.plan import make_plan
from skydraft.edge.cloud import Cloud
from skydraft.edge.server import OURS
from skydraft.engines.base import Engine
from skydraft.engines.vocab import check_same
from skydraft.errors import SkydraftError
from skydraft.lab.evaluation.comparison import installed
from skydraft.models import KNOWN, cache_dir, present, resolve
from skydraft.models.fetch import verify
from skydraft.protocol.address import is_url, parse_addresses

# The purpose of `pip install 'skydraft[NAME]'`. The metadata of skydraft names the packages of each extra.
PURPOSES = {
    "prebuilt": "GGUF models", "llamacpp": "faster GGUF models, by a C++ compiler", "transformers": "hub checkpoints",
    "grammar": "text that follows a grammar", "learn": "learning a task", "omni": "models that take speech",
    "quantized": "checkpoints in 8 or 4 bits",
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
    models = replace(models, offline=True)
    if cloud.address is not None:
        problems = list(_servers(console, cloud, models))
    else:
        _system(console)
        problems = [*_packages(console), *_models(console), *_pair(console, models)]
    for problem in problems:
        console.print(f"To do: {one_line(problem)}", style="yellow")
    if not problems:
        target = cloud.address or models.target_name
        console.print(one_line(f"Ready: {models.edge_model} drafts, {target} checks."), style="green")
    return 1 if problems else 0


def _system(console: Console) -> None:
    cache, room = cache_dir(), free_bytes()
    memory = "" if room is None else f", {room / 1e9:.1f} GB of memory free"
    console.print(f"python       {platform.python_version()} on {platform.system()} {platform.machine()}")
    console.print(f"processor    {os.cpu_count()} cores{memory}")
    console.print(f"cache        {cache}")


def _packages(console: Console) -> Iterator[str]:
    console.print("\nextras")
    requirements = [*map(Requirement, importlib.metadata.requires("skydraft") or ())]
    for extra, purpose in PURPOSES.items():
        needed = [each for each in requirements if each.marker and each.marker.evaluate({"extra": extra})]
        found = {each: version for each in needed if (version := installed(each.name))}
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
        if extra == "prebuilt" and installed("llama-cpp-python") is None:  # the default pair needs one of them
            yield f"llama.cpp is missing, which runs {purpose}: {command}"
        console.print(f"  {extra:<12} missing {', '.join(missing)}; for {purpose}: {command}")
    console.print()


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
    for side, engine in (("draft model ", draft), ("target      ", target)):
        if engine.about_rows:
            console.print(f"{side} {engine.about_rows}")


def _loaded(models: ModelChoice, side: str) -> Generator[str, None, Engine | None]:
    """Open the model of this side, and return it; without one, yield the step to repair that."""
    edge, cloud = (models.edge_model, models.adapter, "edge"), (models.target_name, "none", "cloud")
    name, *how = edge if side == "draft" else cloud
    size, room = 0, free_bytes()
    with suppress(SkydraftError):  # the load says what is wrong
        path = resolve(name, cache_dir(), offline=True)
        size = path.stat().st_size if path and path.is_file() else 0
    if room is not None and size > room and not models.options.gpu_layers:
        needs = f"{size / 1e9:.1f} GB of memory, and {room / 1e9:.1f} GB are free"
        yield f"the {side} model needs {needs}: choose a smaller one, or close other programs"
        return None
    try:
        return models.load(name, *how)
    except SkydraftError as error:
        yield f"the {side} model does not load: {error.line}"
        return None


def _servers(console: Console, choice: CloudChoice, models: ModelChoice) -> Iterator[str]:
    draft, address = (yield from _loaded(models, "draft")), choice.address or ""
    for each in [address] if is_url(address) else parse_addresses(address):
        with closing(choice.but(each).connect(models.cloud_model)) as cloud:
            try:
                with TERMINAL.state(f"Asking {cloud.name}…"):
                    cloud.ping(_LOOK_S)  # at first: a server that does not answer is not waited for
                    console.print(f"server       {_described(cloud)}")
                with TERMINAL.state(f"Measuring the link to {cloud.name}…"):
                    yield from _measured(console, cloud, draft)
            except SkydraftError as error:
                yield f"{cloud.name} cannot be used: {error.line}"


def _described(cloud: Cloud) -> str:
    """What runs there. Raises a SkydraftError."""
    lock = "TLS" if cloud.uses_tls else "plaintext"
    if cloud.is_stock:
        facts = cloud.facts(None)
        assert facts is not None  # it was waited for
        port = cloud.servers.all[0].drafts
        drafts = f"\ndrafts       up to {port.most} a step, at {port.address}" if port and port.most else ""
        return f"{cloud.name}, {cloud.kind}, {lock}\nmodel        {one_line(facts.name)}{drafts}"
    info = cloud.info()
    return (
        f"{cloud.name}, skydraft {info.version}, {lock}, {info.num_sessions} of {info.max_sessions} sessions in use\n"
        f"model        {info.model} ({info.weights[:8]}), {info.execution}, {info.context_len} tokens of context"
    )


def _measured(console: Console, cloud: Cloud, draft: Engine | None) -> Iterator[str]:
    """Show what the link takes; yields what there is to repair. Raises a SkydraftError."""
    rtt_ms = statistics.median(cloud.ping(_LOOK_S) for _ in range(_NUM_PINGS))
    stats = [_written(draft, cloud) for _ in range(2)][-1] if draft else None  # the first may wait for a compiler
    link = f"a round trip takes {rtt_ms:.1f} ms"
    if stats and stats.itl_ms_p50 is not None:
        link += f"; a stream begins after {stats.ttft_ms:.0f} ms and gives a token every {stats.itl_ms_p50:.1f} ms"
    console.print(f"link         {link}")
    if stats and cloud.kind not in (OURS, "chat") and not stats.cached_tokens.cloud:
        yield "turn on the server's prefix cache, or let it report cached tokens: else each call reads the whole text"


def _written(draft: Engine, cloud: Cloud) -> Stats:
    """Let the server write a few tokens after a prompt of some hundred."""
    params = DecodingParams(max_new_tokens=_NUM_TOKENS)
    return api.generate(_PROMPT, edge=draft, cloud=cloud, plan=make_plan("cloud"), params=params).run().stats
