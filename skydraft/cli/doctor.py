"""`skydraft doctor`: check that the models load and fit together, or that a server answers."""

import os
import platform
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import replace

import click
from rich.console import Console

from skydraft.characters import one_line
from skydraft.cli.options.pair import CloudChoice, ModelChoice, models_section, server_section
from skydraft.cli.options.sections import Command
from skydraft.cli.terminal import TERMINAL, console_for
from skydraft.config import free_bytes
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.vocab import check_same
from skydraft.errors import SkydraftError
from skydraft.models import KNOWN, cache_dir, present, resolve
from skydraft.protocol.address import is_url, parse_addresses

_LOOK_S = 3.0  # timeout of a ping


@click.command(cls=Command)
@server_section
@models_section
def doctor(cloud: CloudChoice, models: ModelChoice) -> int:
    """Check whether both models load and fit together.

    With --cloud: check the server instead of a target on this machine. Nothing is downloaded. The exit status is 1 if
    something needs repair.
    """
    console = console_for("auto")
    models = replace(models, offline=True)
    problems = list(_pair(console, models) if cloud.address is None else _servers(console, cloud, models))
    for problem in problems:
        console.print(f"To do: {one_line(problem)}", style="yellow")
    if not problems:
        target = cloud.address or models.target_name
        does = "streams" if is_url(target) and "drafts" not in cloud.given else f"checks drafts of {models.edge_model}"
        console.print(one_line(f"Ready: {target} {does}."), style="green")
    return 1 if problems else 0


def _system(console: Console) -> None:
    cache, room = cache_dir(), free_bytes()
    memory = "" if room is None else f", {room / 1e9:.1f} GB of memory free"
    console.print(f"python       {platform.python_version()} on {platform.system()} {platform.machine()}")
    console.print(f"processor    {os.cpu_count()} cores{memory}")
    for model in KNOWN.values():
        console.print(f"{model.name:<20} {model.bytes / 1e6:>6.0f} MB  {present(model, cache) or 'not here'}")


def _pair(console: Console, models: ModelChoice) -> Iterator[str]:
    _system(console)
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
    """Open and return the model of this side. If that fails, yield a line to repair it, and return None."""
    name, *how = (models.edge_model, models.adapter, "edge") if side == "draft" else (models.target_name,)
    if side == "draft" and name == "none":
        return None
    size, room = 0, free_bytes()
    with suppress(SkydraftError):  # loading reports the error
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
                    cloud.ping(_LOOK_S)  # first, to fail soon if the server does not answer
                    console.print(f"server       {_described(cloud)}")
                    console.print(f"link         a round trip takes {cloud.ping(_LOOK_S):.1f} ms")
                    draft = models.load_edge(cloud) if models.edge_model == "none" else draft
                    gone = cloud.meet(draft.vocab) if draft else None
                if gone:
                    yield f"{cloud.name} cannot be used: {gone.line}"
                if (port := cloud.servers.all[0].drafts) and not port.most:
                    yield f"no drafts are taken at {port.address}: check the port's address and its token file"
            except SkydraftError as error:
                yield f"{cloud.name} cannot be used: {error.line}"


def _described(cloud: Cloud) -> str:
    """Describe the server and its model. Raises a SkydraftError."""
    lock = "TLS" if cloud.uses_tls else "plaintext"
    if cloud.is_stock:
        facts = cloud.facts(None)
        assert facts is not None  # `facts(None)` waits for an answer
        port = cloud.servers.all[0].drafts
        drafts = f"\ndrafts       up to {port.most} a step, at {port.address}" if port and port.most else ""
        return f"{cloud.name}, {cloud.kind}, {lock}\nmodel        {one_line(facts.name)}{drafts}"
    info = cloud.info()
    return (
        f"{cloud.name}, skydraft {info.version}, {lock}, {info.num_sessions} of {info.max_sessions} sessions in use\n"
        f"model        {info.model} ({info.weights[:8]}), {info.execution}, {info.context_len} tokens of context"
    )
