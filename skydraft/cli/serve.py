"""`skydraft serve`: a target model behind gRPC, computed by an engine in this process or by vLLM."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from skydraft.cli.pair_options import ModelChoice, download_shown, served_model_section
from skydraft.cli.sections import Command, Section, configured, listening, option
from skydraft.cloud.limits import Limits
from skydraft.config import Execution
from skydraft.engines.options import EngineOptions
from skydraft.errors import OptionError
from skydraft.models import cache_dir
from skydraft.models.manifest import known_models
from skydraft.models.resolve import resolve
from skydraft.protocol.address import DEFAULT_PORT

if TYPE_CHECKING:
    from skydraft.cloud.judge import Judge
    from skydraft.cloud.seats import Served
    from skydraft.cloud.server import ServeOptions


EngineName = Literal["own", "vllm"]
_VLLM_TAKES = {"context_len", "dtype"}
_DEFAULT = Limits()


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine, its execution (None: as exact as possible), and arguments of vLLM."""

    engine: EngineName
    execution: Execution | None
    vllm_arg: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.vllm_arg and self.engine != "vllm":
            raise OptionError("--vllm-arg applies only to --engine vllm.", hint="Add --engine vllm, or leave it out.")

    @property
    def in_force(self) -> Execution:
        """The execution: exact, or throughput on vLLM, whose kernels are seldom batch-invariant."""
        return self.execution or ("throughput" if self.engine == "vllm" else "exact")


engine_section = Section("choice", "Server", EngineChoice, [
    option("--engine", None, "own: an engine of skydraft in this process. vllm: vLLM, for folders and hub ids "
           "(docs/vllm.md).", type=EngineName, default="own"),
    option("--vllm-arg", "NAME=VALUE", "An engine argument of vLLM; can be repeated.", multiple=True),
    option("--execution", None, "exact: each answer is bit for bit the same as without other requests. throughput: one "
           "forward for all waiting requests: faster, but near ties may differ (default: exact; with "
           "vllm: throughput).", type=Execution),
])  # fmt: skip


def _on_engine(models: ModelChoice, choice: EngineChoice, limits: Limits) -> Judge:
    from skydraft.cloud.worker import Worker

    options = dataclasses.replace(
        models.options, max_sequences=limits.max_sessions, shared_cache=choice.in_force == "throughput"
    )
    engine = dataclasses.replace(models, options=options).load(models.target_name)
    return Worker(engine, limits, execution=choice.in_force)


def _on_vllm(models: ModelChoice, choice: EngineChoice, limits: Limits) -> Judge:
    from skydraft.cloud.vllm.engine import VllmEngine
    from skydraft.cloud.vllm.judge import VllmJudge
    from skydraft.cloud.vllm.launch import VllmOptions, library

    library()  # fails before a download if vLLM is missing
    for field in dataclasses.fields(EngineOptions):
        if getattr(models.options, field.name) != field.default and field.name not in _VLLM_TAKES:
            flag = "--" + field.name.removeprefix("num_").replace("_", "-")
            raise OptionError(f"{flag} does not apply to --engine vllm.", hint="Use --vllm-arg for vLLM's own.")
    name, run = models.target_name, models.options
    is_gguf = OptionError(
        f"--engine vllm takes no GGUF file such as {name}.", hint="Give a checkpoint's folder or a hub id as --model."
    )
    if name in known_models():
        raise is_gguf
    with download_shown("Starting vLLM…") as progress:
        model = resolve(name, cache_dir(), offline=models.offline, source=models.source, progress=progress)
        if model.path is None or model.kind != "folder":
            raise is_gguf
        options = VllmOptions(model.spec, model.path, run.context_len, run.dtype, choice.in_force, choice.vllm_arg)
        judge = VllmJudge(VllmEngine(options), limits)
        judge.start()
        return judge


def _server(**given: Any) -> ServeOptions:
    from skydraft.cloud.server import ServeOptions  # gRPC takes a while to import

    return ServeOptions(**given)


_server_section = Section("server", "Server", _server, [
    *listening(DEFAULT_PORT),
    option("--token-file", "FILE", "Accept only clients with a token from FILE (lines: LABEL TOKEN).", type=Path),
    option("--insecure", None, "Allow unencrypted connections from other machines.", is_flag=True),
    option("--grace grace_s", "S", "Seconds that requests have to finish after Ctrl-C.", default=30.0),
    option("--metrics-port", "PORT", "Port of Prometheus metrics over HTTP (default: 0, off).", default=0),
    option("--otlp", "URL", "Send OpenTelemetry traces to the collector at URL (OTLP over HTTP, port 4318)."),
    option("--log-prompts", None, "Write the token ids of prompts into the log.", is_flag=True),
])  # fmt: skip
_log_section = Section("log_level", "Server", lambda log_level: log_level, [
    option("--log-level", None, "Lowest level in the log on stderr.",
           type=Literal["debug", "info", "warning", "error"], default="info"),
])  # fmt: skip
_limits_section = Section("limits", "Limits", Limits, [
    option("--max-sessions", "N", "Sessions that hold KV memory at a time.", default=_DEFAULT.max_sessions),
    option("--max-prompt", "N", "Tokens of a prompt.", default=_DEFAULT.max_prompt),
    option("--max-block", "N", "Drafted tokens of a block.", default=_DEFAULT.max_block),
    option("--max-queue", "N", "Requests that may wait.", default=_DEFAULT.max_queue),
    option("--session-ttl session_ttl_s", "S", "Seconds until an unused session is closed.",
           default=_DEFAULT.session_ttl_s),
    option("--sessions-per-token", "N", "Sessions of one token at a time; 0 is no limit.",
           default=_DEFAULT.sessions_per_token),
    option("--rows-per-s", "R", "Target rows a second for one token; 0 is no limit.", default=_DEFAULT.rows_per_s),
])  # fmt: skip


@configured("SKYDRAFT_SERVE")
@click.command(cls=Command)
@_server_section
@_log_section
@_limits_section
@engine_section
@served_model_section
def serve(server: ServeOptions, log_level: str, limits: Limits, choice: EngineChoice, models: ModelChoice) -> None:
    """Let other devices use a target model on this machine. Ctrl-C finishes running requests and stops."""
    from skydraft.cloud.listening import starting
    from skydraft.cloud.logs import log_to_stderr
    from skydraft.cloud.server import serve as run

    options = dataclasses.replace(server, limits=limits, execution=choice.in_force)
    open_judge = _on_vllm if choice.engine == "vllm" else _on_engine
    with starting(options):
        judge = open_judge(models, choice, limits)
    log_to_stderr(log_level)
    try:
        run(judge, options, lambda port: click.echo(_announcement(judge.served, options, port), err=True))
    finally:
        judge.close()
    click.echo("skydraft: stopped.", err=True)


def _announcement(served: Served, options: ServeOptions, port: int) -> str:
    lock = "TLS" if options.tls_cert else "plaintext"
    door = "a token is required" if options.token_file else "open to everybody who reaches it"
    engine = f" on {served.engine} ({served.dtype})" if served.engine else ""
    return (
        f"skydraft: {served.name}{engine} on {options.host}:{port} ({lock}, {door}); {served.execution}, up to "
        f"{served.max_rows} rows a forward; {options.limits.max_sessions} sessions of "
        f"{served.context_len} tokens. Ctrl-C stops."
    )
