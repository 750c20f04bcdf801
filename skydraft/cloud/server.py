"""`skydraft serve`: the gRPC server around a judge, from the first bind to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from skydraft import __version__
from skydraft.cloud.access import Keyring
from skydraft.cloud.certificate import check_certificate
from skydraft.cloud.judge import Judge
from skydraft.cloud.limits import Limits
from skydraft.cloud.service import VerifierService
from skydraft.config import Execution, check_execution
from skydraft.errors import EngineError, MissingDependency, OptionError
from skydraft.protocol.address import DEFAULT_PORT, is_loopback
from skydraft.protocol.codec import short_fingerprint
from skydraft.protocol.values import FEW_FRAMES, SERVICE, ServerInfo
from skydraft.tracing import Tracing, check_collector

log = logging.getLogger("skydraft.cloud")

_BYTES_PER_AUDIO_TOKEN = 4 * 128 * 2  # frames, mels, half precision


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of a server. `port` 0 takes a free port; `metrics_port` 0 serves no metrics.

    Plaintext beyond this machine needs `insecure`. At the end, open requests have `grace_s` seconds to finish.
    `otlp` is the URL of an OpenTelemetry collector that gets traces.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None
    insecure: bool = False
    execution: Execution = "exact"
    metrics_port: int = 0
    grace_s: float = 30.0
    log_prompts: bool = False
    otlp: str | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_execution(self.execution)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError("--tls-cert and --tls-key belong together.", hint="Give both, or none.")
        if self.tls_cert is not None and self.insecure:
            raise OptionError("--insecure turns encryption off, so --tls-cert does not apply.")
        if not 0 <= self.grace_s < float("inf"):
            raise OptionError(f"--grace must be a number of seconds, 0 or more, not {self.grace_s:g}.")
        if not 0 <= self.port < 65536 or not 0 <= self.metrics_port < 65536:
            raise OptionError("A port must be a number from 0 to 65535.")
        if self.otlp is not None:
            check_collector(self.otlp)
        if self.tls_cert is None and not self.insecure and not is_loopback(self.host):
            raise OptionError(
                f"Listening on {self.host} without TLS would send tokens and texts unencrypted over the network.",
                hint="Give --tls-cert and --tls-key, or --insecure if something else encrypts the link.",
            )


class CloudServer:
    """Serves one judge on one port. Call `start`, then `stop`, on one event loop."""

    def __init__(self, judge: Judge, options: ServeOptions) -> None:
        self._judge = judge
        self._options = options
        self._keyring = Keyring(options.token_file)
        self._metrics = _metrics(judge.served.name, options) if options.metrics_port else None
        judge.docket.metrics = self._metrics
        self._tracing = Tracing("skydraft-serve", options.otlp, log.warning) if options.otlp else None
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._stop_requested: Callable[[], None] = lambda: None
        self._has_died = self._is_stopping = False
        self._service = VerifierService(
            judge, self.info, self._keyring, options.limits, time.perf_counter,
            log_prompts=options.log_prompts, tracing=self._tracing,
        )  # fmt: skip

    def info(self) -> ServerInfo:
        """The answer to GetInfo."""
        served, limits = self._judge.served, self._options.limits
        return ServerInfo(
            version=__version__,
            model=served.name,
            fingerprint=short_fingerprint(served.vocab.fingerprint),
            vocab_size=served.vocab.size,
            context_len=served.context_len,
            execution=served.execution,
            max_rows=served.max_rows,
            max_block=limits.max_block,
            max_sessions=limits.max_sessions,
            num_sessions=self._judge.docket.num_sessions,
            invariant_rows=served.invariant_rows,
            forward_ms=served.forward_ms,
            weights=served.weights,
            engine=served.engine,
            dtype=served.dtype,
        )

    async def start(self) -> int:
        """Bind and begin to answer; returns the port."""
        health, reflection = _services()
        self._judge.served.vocab.classes  # noqa: B018  computed now, not in the first session
        limits = self._options.limits
        speech_bytes = limits.max_prompt * _BYTES_PER_AUDIO_TOKEN if self._judge.served.takes_audio else 0
        limit = limits.max_message_bytes + speech_bytes
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.so_reuseport", 0),  # two servers on one port would split the calls of a session
                *FEW_FRAMES,
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ]
        )
        self._server.add_generic_rpc_handlers((self._service.handlers(),))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc = _health_registration()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        port = self._bind()
        self._follow_health(asyncio.get_running_loop())
        self._thread.start()
        await self._server.start()
        await self._set_health(serving=True)
        return port

    def _bind(self) -> int:
        options = self._options
        host = f"[{options.host}]" if ":" in options.host and "[" not in options.host else options.host
        address = f"{host}:{options.port}"
        try:
            credentials = self._credentials()
            port = (
                self._server.add_secure_port(address, credentials)
                if credentials
                else self._server.add_insecure_port(address)
            )
        except RuntimeError as error:
            raise OptionError(
                f"Cannot listen on {address}: the port is in use, the address is not this machine's, or the "
                "certificate and the key do not belong together.",
                hint="Choose another --port, or 0 for any free one.",
            ) from error
        return port

    def _credentials(self) -> grpc.ServerCredentials | None:
        cert, key = self._options.tls_cert, self._options.tls_key
        if cert is None or key is None:
            return None
        check_certificate(cert, key)
        return grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])

    def _follow_health(self, loop: asyncio.AbstractEventLoop) -> None:
        async def tell(is_well: bool) -> None:
            if not self._is_stopping:
                await self._set_health(serving=is_well)

        def hear(is_well: bool) -> None:
            asyncio.run_coroutine_threadsafe(tell(is_well), loop)

        self._judge.on_health = hear

    async def _set_health(self, *, serving: bool) -> None:
        from grpc_health.v1 import health_pb2

        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    def _work(self) -> None:
        try:
            self._judge.run()
        except BaseException:
            log.critical("the worker died", exc_info=True)
            self._has_died = True
            self._stop_requested()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set or the worker dies; then finish the open requests."""
        loop = asyncio.get_running_loop()

        def request_stop() -> None:
            loop.call_soon_threadsafe(stop.set)

        self._stop_requested = request_stop
        await stop.wait()
        await self.stop(0.0 if self._has_died else self._options.grace_s)
        if self._has_died:
            raise EngineError("The worker thread failed; the log says why.", hint="Start the server again.")

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, refuse new calls, wait `grace_s` for open ones, and end the worker after its forward.

        The engine may be closed only after this.
        """
        self._is_stopping = True
        await self._set_health(serving=False)
        self._service.drain()
        await self._server.stop(grace_s)
        self._judge.post(self._judge.docket.stop)
        await asyncio.to_thread(self._thread.join)
        if self._metrics:
            await asyncio.to_thread(self._metrics.close)
        if self._tracing:
            await asyncio.to_thread(self._tracing.close)


def _services() -> tuple[Any, Any]:
    try:
        from grpc_health.v1 import health
        from grpc_reflection.v1alpha import reflection
    except ImportError as error:
        raise _missing() from error
    return health, reflection


def _health_registration() -> Any:
    from grpc_health.v1 import health_pb2_grpc

    return health_pb2_grpc


def _metrics(model: str, options: ServeOptions) -> Any:
    try:
        from skydraft.cloud.metrics import Metrics
    except ImportError as error:
        raise _missing() from error
    metrics = Metrics(model)
    try:
        metrics.serve(options.metrics_port, options.host)
    except OSError as error:
        raise OptionError(f"Metrics cannot be served on port {options.metrics_port}: {error.strerror}.") from error
    return metrics


def _missing() -> MissingDependency:
    return MissingDependency(
        "Serving needs grpcio-health-checking, grpcio-reflection and prometheus_client.",
        hint="Run: pip install 'skydraft[serve]'.",
    )


def serve(judge: Judge, options: ServeOptions, on_ready: Callable[[int], None]) -> None:
    """Serve until SIGINT or SIGTERM; a second signal ends the process at once. `on_ready` gets the port."""
    asyncio.run(_serve(judge, options, on_ready))


async def _serve(judge: Judge, options: ServeOptions, on_ready: Callable[[int], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def request_stop(number: signal.Signals) -> None:
        stop.set()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)  # the next one ends the process

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, request_stop, number)
    server = CloudServer(judge, options)
    on_ready(await server.start())
    await server.run(stop)
