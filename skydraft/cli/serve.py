"""`skydraft serve`: a target model behind gRPC."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skydraft.cli.options import build_engine_options, load_engine, run_options
from skydraft.cloud.limits import Limits
from skydraft.models import default_pair
from skydraft.protocol.address import DEFAULT_PORT

if TYPE_CHECKING:
    from skydraft.cloud.server import ServeOptions

_DEFAULT = Limits()


@click.command()
@click.option("--model", default=default_pair().target, show_default=True, help="Target: name, .gguf, folder, hub id.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=DEFAULT_PORT, show_default=True, metavar="P", help="0 takes any free port.")
@click.option("--token-file", type=Path, metavar="F", help="Lines LABEL TOKEN; without it everybody may ask.")
@click.option("--tls-cert", type=Path, metavar="C", help="PEM certificate chain.")
@click.option("--tls-key", type=Path, metavar="K", help="Its key.")
@click.option("--insecure", is_flag=True, help="Speak plaintext beyond this machine.")
@click.option(
    "--execution",
    type=click.Choice(["exact", "throughput"]),
    default="exact",
    show_default=True,
    help="exact: forwards that are bit-identical to single rows. throughput: one forward for all that waits.",
)
@click.option("--max-sessions", default=_DEFAULT.max_sessions, show_default=True, metavar="N", help="With KV memory.")
@click.option("--max-prompt", default=_DEFAULT.max_prompt, show_default=True, metavar="N", help="Tokens of a prompt.")
@click.option("--max-block", default=_DEFAULT.max_block, show_default=True, metavar="N", help="Tokens of a draft.")
@click.option("--max-queue", default=_DEFAULT.max_queue, show_default=True, metavar="N", help="Requests that wait.")
@click.option(
    "--session-ttl",
    "session_ttl_s",
    default=_DEFAULT.session_ttl_s,
    show_default=True,
    metavar="S",
    help="Idle seconds.",
)
@click.option("--sessions-per-token", default=0, metavar="N", help="Sessions of one token; 0 is no limit.")
@click.option("--rows-per-s", default=0.0, metavar="R", help="Target rows a second of one token; 0 is no limit.")
@click.option("--metrics-port", default=0, metavar="P", help="Prometheus metrics over HTTP; 0 is off.")
@click.option(
    "--grace", "grace_s", default=30.0, show_default=True, metavar="S", help="Seconds for what is under way at the end."
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
@click.option("--log-prompts", is_flag=True, help="Write token ids of prompts into the log.")
@run_options
def serve(**given: Any) -> None:
    """Verify blocks for many edges: one target model, many sessions. Ctrl-C finishes what is under way."""
    from skydraft.cloud.logs import log_to_stderr
    from skydraft.cloud.server import ServeOptions
    from skydraft.cloud.server import serve as run

    limits = Limits(**_taken(given, Limits))
    options = ServeOptions(limits=limits, **_taken(given, ServeOptions))
    log_to_stderr(given.pop("log_level"))
    offline = given.pop("offline")
    engine_options = build_engine_options(
        given, max_sequences=limits.max_sessions, shared_cache=options.execution == "throughput"
    )
    engine = load_engine(given["model"], engine_options, offline=offline)

    def announce(port: int) -> None:
        rows = engine.invariant_rows if options.execution == "exact" else engine.max_output_rows
        lock = "TLS" if options.tls_cert else "plaintext"
        door = "tokens wanted" if options.token_file else "open to everybody who reaches it"
        click.echo(
            f"skydraft: {engine.name} on {options.host}:{port} ({lock}, {door}); {options.execution}, up to {rows} "
            f"rows a forward; {limits.max_sessions} sessions of {engine.context_len} tokens. Ctrl-C stops.",
            err=True,
        )

    run(engine, options, announce)
    engine.close()
    click.echo("skydraft: stopped.", err=True)


def _taken(given: dict[str, Any], section: type[Limits] | type[ServeOptions]) -> dict[str, Any]:
    """The options of one section, taken out of what was given: they have its names."""
    return {field.name: given.pop(field.name) for field in dataclasses.fields(section) if field.name in given}
