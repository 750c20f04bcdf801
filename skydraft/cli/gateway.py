from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skydraft.access.keys import Keyring
from skydraft.cli.options.decoding import DecodingChoice, KeepChoice, as_text, decoding_section, keep_section
from skydraft.cli.options.pair import CloudChoice, ModelChoice, server_section, serving_models_section
from skydraft.cli.options.sections import Command, configured, listening, loose, option
from skydraft.cli.terminal import TERMINAL
from skydraft.cloud.logs import log_to_stderr
from skydraft.decoding.plan import make_plan
from skydraft.engines.base import Engine
from skydraft.errors import OptionError, importing
from skydraft.prompts.pair import ShareAudio
from skydraft.protocol.address import as_origin, is_loopback

if TYPE_CHECKING:
    from skydraft.gateway.app import Gateway
    from skydraft.gateway.pair import Pair

PORT = 8137
_COUNT = click.IntRange(min=0)


_gateway_options = loose("Gateway", [
    *listening(PORT),
    option("--api-key-file", "FILE", "Accept only clients with a key from FILE (lines: LABEL KEY).", type=Path),
    option("--insecure-host insecure", None, "Allow unencrypted connections from other machines.", is_flag=True),
    option("-s --system", "TEXT", "System prompt for clients that send none.", callback=as_text),
    option("--parallel", "N", "Answers written at a time.", type=click.IntRange(min=1), default=4),
    option("--keep num_kept", "N", "Further conversations kept in memory for a quick next turn.",
           type=_COUNT, default=2),
    option("--max-queue", "N", "Requests that may wait; more get status 503.", type=_COUNT, default=64),
    option("--allow-origins", "URL", "Let pages of this origin use the gateway; can be repeated.", multiple=True,
           callback=lambda context, param, urls: tuple(map(as_origin, urls))),
    option("--share-audio", None, "Part of recordings that a target on a server gets; with none, only "
           "skydraft-edge answers about them (default: none; in this process: features).", type=ShareAudio),
    option("--edge-only", None, "Use only the draft model; load no target.", is_flag=True),
    option("--log-prompts", None, "Write prompts into the log.", is_flag=True),
])  # fmt: skip


@configured("SKYDRAFT_GATEWAY")
@click.command(cls=Command)
@_gateway_options
@decoding_section
@server_section
@serving_models_section
@keep_section
def gateway(
    decoding: DecodingChoice, cloud: CloudChoice, models: ModelChoice, keep: KeepChoice, api_key_file: Path | None,
    system: str | None, parallel: int, num_kept: int, max_queue: int, allow_origins: tuple[str, ...],
    share_audio: ShareAudio | None, edge_only: bool, log_prompts: bool, **address: Any,
) -> None:  # fmt: skip
    """Serve OpenAI's interface and a chat page to the apps on this machine.

    Point an app at http://localhost:8137/v1. The models are skydraft and skydraft-MODE. Decoding options given here are
    defaults for clients. Without -n a chat may fill the context; without --seed seeds are random. Each option can also
    be an environment variable: SKYDRAFT_GATEWAY_MAX_QUEUE for --max-queue. Ctrl-C stops the gateway.
    """
    with importing("The gateway needs", "gateway"):
        from skydraft.gateway.app import Gateway, GatewayOptions
        from skydraft.gateway.requests import Defaults
        from skydraft.gateway.server import ListenOptions, listen, serve

    at = ListenOptions(**address, has_keys=api_key_file is not None)
    keys = Keyring(api_key_file) if api_key_file else None
    if edge_only and (cloud.address or models.cloud_model or keep.audit_share > 0):
        raise OptionError("--edge-only uses no target, but another option needs one.", hint="Remove one of them.")
    if models.local_only and not is_loopback(at.host):
        raise OptionError(f"--local-only lets nothing leave this machine, but --host {at.host} answers others.")
    keep.check(verifies=not edge_only)
    log_to_stderr("info" if log_prompts else "warning")
    with suppress(KeyboardInterrupt), ExitStack() as stack:  # while it loads
        sockets = stack.enter_context(listen(at))

        def load() -> Gateway:
            pair = _open(parallel + num_kept, edge_only, cloud, models, keep, stack)
            # No part of a recording leaves this machine without --share-audio.
            share = share_audio or ("none" if cloud.address else "features")
            defaults = Defaults(decoding.params(), system, frozenset(decoding.values), share, decoding.think)
            access = (keys.label, keys.has_several) if keys else ()
            hold_s = max(45.0, 15 + cloud.given.get("timeout_s", 0))  # a lost cloud then becomes an HTTP error
            options = GatewayOptions(parallel, max_queue, hold_s, origins=allow_origins, logs_prompts=log_prompts)
            made = Gateway(pair, defaults, options, *access)
            made.names.look()
            return made

        def ready(made: Gateway, port: int) -> None:
            lock = "a key is required" if keys else "no key is required"
            click.echo(_announcement(made, lock, cloud, f"{at.url}:{port}"), err=True)

        serve(load, at, sockets, ready)
    click.echo("skydraft: stopped.", err=True)


def _open(
    num_sequences: int, edge_only: bool, cloud: CloudChoice, models: ModelChoice, keep: KeepChoice, stack: ExitStack
) -> Pair:
    from skydraft.gateway.pair import Pair

    here = [] if models.edge_model == "none" else [models.edge_model]
    here += [] if cloud.address or edge_only else [models.target_name]
    options = models.fitted(here, num_sequences).options
    if not options.gpu_layers:  # on a GPU, more contexts need more of its memory
        options = replace(options, total_len=options.total_len or num_sequences * options.context_len)
    plan = make_plan("edge") if edge_only else None
    cloud = cloud.but(fallback="start") if cloud.address else cloud  # the gateway may start before its cloud
    models = replace(models, options=replace(options, max_sequences=num_sequences))
    edge, target = stack.enter_context(cloud.sides(models, plan, audits=keep.audit_share > 0))
    for engine in (edge, target):
        if isinstance(engine, Engine):
            stack.enter_context(engine)
    assert edge is not None  # as both plans draft
    if not isinstance(target, Engine | None) and (gone := target.meet(edge.vocab)):
        why = gone.message.rstrip(".")
        goes_on = "until it is, texts are written without it, except in mode cloud"
        TERMINAL.say(f"The cloud at {target.name} was not reached ({why}); {goes_on}.")
    watching = stack.enter_context(keep.watching(edge, target))
    return Pair(edge, target, watching.observers, watching.auditor)


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
