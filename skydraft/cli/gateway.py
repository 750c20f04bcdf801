"""`skydraft gateway`: OpenAI's interface and the chat page."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skydraft.access.keys import Keyring
from skydraft.cli.options import DecodingChoice, KeepChoice, as_text, decoding_section, keep_section
from skydraft.cli.pair_options import CloudChoice, ModelChoice, models_section, server_section
from skydraft.cli.sections import Command, Section, configured, listening, option
from skydraft.cloud.logs import log_to_stderr
from skydraft.engines.base import Engine
from skydraft.engines.vocab import check_same
from skydraft.errors import MissingDependency, OptionError
from skydraft.prompts.pair import ShareAudio
from skydraft.protocol.address import is_loopback

if TYPE_CHECKING:
    from skydraft.edge.cloud import Cloud
    from skydraft.gateway.app import Gateway, GatewayOptions
    from skydraft.gateway.pair import Pair
    from skydraft.gateway.server import ListenOptions

PORT = 8137


def _door(api_key_file: Path | None, insecure_host: bool, **listen: Any) -> tuple[ListenOptions, Keyring | None]:
    """The address and certificate of the gateway, and its keys."""
    try:
        from skydraft.gateway.server import ListenOptions
    except ImportError as error:
        raise MissingDependency(
            f"The gateway needs {error.name}, which is not installed.", hint="Run: pip install 'skydraft[gateway]'."
        ) from error
    # Check the options first, so that a wrong host is reported first.
    options = ListenOptions(has_keys=api_key_file is not None, insecure=insecure_host, **listen)
    return options, Keyring(api_key_file) if api_key_file else None


_door_section = Section("door", "Gateway", _door, [
    *listening(PORT),
    option("--api-key-file", "FILE", "Accept only clients with a key from FILE (lines: LABEL KEY).", type=Path),
    option("--insecure-host", None, "Allow unencrypted connections from other machines.", is_flag=True),
])  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The load that the gateway accepts, and its log."""

    parallel: int
    keep: int
    max_queue: int
    allow_origins: tuple[str, ...]
    log_prompts: bool
    system: str | None
    share_audio: ShareAudio | None
    edge_only: bool

    def __post_init__(self) -> None:
        for name, least in (("parallel", 1), ("keep", 0), ("max_queue", 0)):
            if getattr(self, name) < least:
                raise OptionError(f"--{name.replace('_', '-')} must be {least} or more.")

    def options(self, timeout_s: float | None) -> GatewayOptions:
        """The gateway's own options; `timeout_s` is the time to wait for a cloud, if any."""
        from skydraft.gateway.app import GatewayOptions

        hold_s = max(45.0, 15 + (timeout_s or 0))  # so that a lost cloud gives an HTTP error
        return GatewayOptions(
            max_running=self.parallel, max_waiting=self.max_queue, origins=self.allow_origins,
            logs_prompts=self.log_prompts, hold_s=hold_s,
        )  # fmt: skip


_work_section = Section("work", "Gateway", Work, [
    option("-s --system", "TEXT", "System prompt for clients that send none.", callback=as_text),
    option("--parallel", "N", "Answers written at a time.", default=4),
    option("--keep", "N", "Further conversations kept in memory for a quick next turn.", default=2),
    option("--max-queue", "N", "Requests that may wait; more get status 503.", default=64),
    option("--allow-origins", "URL", "Let pages of this origin use it; can be repeated.", multiple=True),
    option("--share-audio", None, "Part of speech that a target on a server gets; none means only the words "
           "(default: none; in this process: features).", type=ShareAudio),
    option("--edge-only", None, "Use the draft model alone; no target is loaded.", is_flag=True),
    option("--log-prompts", None, "Write prompts into the log.", is_flag=True),
])  # fmt: skip


@configured("SKYDRAFT_GATEWAY")
@click.command(cls=Command)
@_door_section
@_work_section
@decoding_section
@server_section
@models_section
@keep_section
def gateway(
    door: tuple[ListenOptions, Keyring | None], work: Work, decoding: DecodingChoice, cloud: CloudChoice,
    models: ModelChoice, keep: KeepChoice,
) -> None:  # fmt: skip
    """Serve OpenAI's interface and a chat page, for any app on this machine.

    Point an app at http://localhost:8137/v1. Models are called skydraft and skydraft-MODE. Decoding options given here
    are defaults for clients; without -n a chat may fill the context, without --seed seeds are random. Ctrl-C stops the
    gateway.
    """
    from skydraft.gateway.app import Gateway
    from skydraft.gateway.requests import Defaults
    from skydraft.gateway.server import listen, serve

    at, keys = door
    cloud.check(models)
    if work.edge_only and (cloud.address or models.cloud_model):
        raise OptionError("--edge-only uses no target, but one was given.", hint="Remove one of them.")
    if models.local_only and not is_loopback(at.host):
        raise OptionError(f"--local-only lets nothing leave this machine; --host {at.host} answers others.")
    if work.edge_only and keep.learns:
        raise OptionError(
            "--learn does not apply to --edge-only: nothing is checked, so nothing is learned.",
            hint="Remove one of them.",
        )
    log_to_stderr("info" if work.log_prompts else "warning")
    with ExitStack() as stack:
        sockets = stack.enter_context(listen(at))

        def load() -> Gateway:
            pair = _open(work, cloud, models, keep, stack)
            # No part of a recording leaves this machine without --share-audio.
            share = work.share_audio or ("none" if cloud.address else "features")
            defaults = Defaults(decoding.params(), work.system, frozenset(decoding.values), share)
            access = (keys.label, keys.has_several) if keys else ()
            made = Gateway(pair, defaults, work.options(cloud.timeout_s), *access)
            made.names.look()
            return made

        def ready(made: Gateway, port: int) -> None:
            lock = "a key is required" if keys else "no key is required"
            click.echo(_announcement(made, lock, cloud, f"{at.url}:{port}"), err=True)

        serve(load, at, sockets, ready)
    click.echo("skydraft: stopped.", err=True)


def _open(work: Work, cloud: CloudChoice, models: ModelChoice, keep: KeepChoice, stack: ExitStack) -> Pair:
    from skydraft.gateway.pair import Pair

    options = dataclasses.replace(models.options, max_sequences=work.parallel + work.keep)
    models = dataclasses.replace(models, options=options)
    edge = stack.enter_context(models.load_edge())
    target: Engine | Cloud | None = None
    if cloud.address is not None:
        target = stack.enter_context(closing(cloud.connect(models.cloud_model)))
    elif not work.edge_only:
        target = stack.enter_context(models.load(models.target_name))
        check_same(edge.vocab, target.vocab)
    return Pair(edge, target, keep.observers)


def _announcement(gateway: Gateway, lock: str, cloud: CloudChoice, url: str) -> str:
    pair = gateway.pair
    verifies = cloud.address or pair.cloud_name
    models = f"{pair.edge.name} drafts, {verifies} checks" if verifies else f"{pair.edge.name} alone"
    return (
        f"skydraft: {models} ({lock}).\n"
        f"  chat page        {url}/\n"
        f"  OpenAI's clients {url}/v1   models: {', '.join(gateway.names.all)}\n"
        "Ctrl-C stops."
    )
