import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from skydraft.access.limits import Limits
from skydraft.cli.options.pair import ModelChoice, served_model_section
from skydraft.cli.options.sections import PORTS, Command, configured, listening, loose, option, section
from skydraft.cloud.options import ServeOptions
from skydraft.config import Execution
from skydraft.models.manifest import KNOWN
from skydraft.protocol.address import DEFAULT_PORT

if TYPE_CHECKING:
    from skydraft.cloud.worker import Worker


_DEFAULT = Limits()


_server_section = section("server", "Server", ServeOptions, [
    *listening(DEFAULT_PORT),
    option("--token-file", "FILE", "Accept only clients with a token from FILE (lines: LABEL TOKEN).", type=Path),
    option("--insecure", None, "Allow unencrypted connections from other machines.", is_flag=True),
    option("--grace grace_s", "S", "Seconds that requests have to finish after Ctrl-C.", default=30.0),
    option("--metrics-port", "PORT", "Port of Prometheus metrics over HTTP (default: 0, off).", type=PORTS, default=0),
    option("--execution", None, "exact: other requests never change an answer. throughput: one forward for all, which "
           "may change near ties (default: exact for GGUF, throughput for checkpoints).", type=Execution),
])  # fmt: skip
_LOG_LEVEL = option("--log-level", None, "Lowest level in the log on stderr.",
                    type=Literal["debug", "info", "warning", "error"], default="info")  # fmt: skip
_limits_section = section("limits", "Limits", Limits, [
    option("--max-sessions", "N", "Sessions that hold KV memory at a time.", default=_DEFAULT.max_sessions),
    option("--max-prompt", "N", "Longest prompt, in tokens.", default=_DEFAULT.max_prompt),
    option("--max-queue", "N", "Requests that may wait.", default=_DEFAULT.max_queue),
    option("--session-ttl session_ttl_s", "S", "Seconds until an unused session is closed.",
           default=_DEFAULT.session_ttl_s),
    option("--rows-per-s", "R", "Target rows a second for each client; 0: no limit.", default=_DEFAULT.rows_per_s),
])  # fmt: skip


@configured("SKYDRAFT_SERVE")
@click.command(cls=Command)
@_server_section
@loose("Server", [_LOG_LEVEL])
@_limits_section
@served_model_section
def serve(server: ServeOptions, log_level: str, limits: Limits, models: ModelChoice) -> None:
    """Let other devices use a target model on this machine. Ctrl-C finishes running requests and stops.

    Each option can also be an environment variable: SKYDRAFT_SERVE_MAX_QUEUE for --max-queue.
    """
    from skydraft.cloud.logs import log_to_stderr
    from skydraft.cloud.server import serve as run
    from skydraft.cloud.worker import Worker

    options = dataclasses.replace(server, limits=limits)
    run_options = dataclasses.replace(models.options, max_sequences=limits.max_sessions)
    log_to_stderr(log_level)

    def load() -> Worker:
        engine = dataclasses.replace(models, options=run_options).load(models.target_name)
        return Worker(engine, limits, execution=options.execution)

    def ready(worker: Worker, port: int) -> None:
        click.echo(_announcement(worker, options, port), err=True)

    is_text = models.target_name in KNOWN or models.target_name.endswith(".gguf")
    grace = f"up to {options.grace_s:g} s"
    waits = f"skydraft: stopping; requests that have begun get {grace}. Ctrl-C again ends them at once."
    with suppress(KeyboardInterrupt):  # while it loads
        run(load, options, ready, on_stop=lambda: click.echo(waits, err=True), may_take_audio=not is_text)
    click.echo("skydraft: stopped.", err=True)


def _announcement(worker: "Worker", options: ServeOptions, port: int) -> str:
    lock = "TLS" if options.tls_cert else "plaintext"
    door = "a token is required" if options.token_file else "no token is required"
    engine, execution = worker.served.engine, worker.served.execution
    return (
        f"skydraft: {engine.name} on {options.host}:{port} ({lock}, {door}); {execution}, up to "
        f"{worker.max_rows} rows in one forward; {options.limits.max_sessions} sessions of "
        f"{engine.context_len} tokens. Ctrl-C stops.{f' {engine.about_rows}.' if engine.about_rows else ''}"
    )
