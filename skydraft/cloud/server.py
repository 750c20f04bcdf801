"""`skydraft serve`: the gRPC server around a worker, from the first bind to the last answer."""

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
from skydraft.cloud.access import MOST_PENDING, Calls, Keyring
from skydraft.cloud.connections import ConnectionWatch
from skydraft.cloud.limits import Limits
from skydraft.cloud.listening import ONE_LISTENER, bind
from skydraft.cloud.questions import QUESTION_S, Questions
from skydraft.cloud.service import VerifierService
from skydraft.cloud.worker import Worker
from skydraft.config import Execution, check_execution
from skydraft.errors import EngineError, OptionError, importing
from skydraft.protocol.address import DEFAULT_PORT, is_loopback
from skydraft.protocol.codec import short_fingerprint
from skydraft.protocol.values import FEW_FRAMES, ServerInfo
from skydraft.tracing import Tracing, check_collector

log = logging.getLogger("skydraft.cloud")

_BYTES_PER_AUDIO_TOKEN = 4 * 128 * 2  # frames, mels, half precision
_INT32_MAX = 2**31 - 1  # of gRPC's settings
_MAX_CONNECTIONS, _FILES_LEFT = 8192, 128  # an idle one takes 17 KB


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
            raise OptionError(
                "--insecure turns encryption off, so --tls-cert does not apply.", hint="Remove one of them."
            )
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
    """Serves one worker on one port. Call `start`, then `stop`, on one event loop."""

    def __init__(self, worker: Worker, options: ServeOptions) -> None:
        self._worker = worker
        self._options = options
        self._keyring = Keyring(options.token_file)
        self._metrics = _metrics(worker.served.engine.name, options) if options.metrics_port else None
        worker.docket.metrics = self._metrics
        self._tracing = Tracing("skydraft-serve", options.otlp, log.warning) if options.otlp else None
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._stop_requested: Callable[[], None] = lambda: None
        self._has_died = False
        self._calls = Calls()
        self._questions = Questions(worker, self.info, self._keyring, self._calls)
        self._service = VerifierService(
            worker, self._keyring, options.limits, time.perf_counter, self._calls,
            log_prompts=options.log_prompts, tracing=self._tracing,
        )  # fmt: skip

    def info(self) -> ServerInfo:
        """The answer to GetInfo."""
        engine, limits = self._worker.served.engine, self._options.limits
        return ServerInfo(
            version=__version__,
            model=engine.name,
            fingerprint=short_fingerprint(engine.vocab.fingerprint),
            vocab_size=engine.vocab.size,
            context_len=engine.context_len,
            execution=self._worker.served.execution,
            max_rows=self._worker.max_rows,
            max_block=limits.max_block,
            max_sessions=limits.max_sessions,
            num_sessions=self._worker.docket.num_sessions,
            invariant_rows=engine.invariant_rows,
            forward_ms=engine.profile.forward_ms,
            weights=engine.fingerprint,
        )

    async def start(self) -> int:
        """Bind and begin to answer; returns the port."""
        engine, limits = self._worker.served.engine, self._options.limits
        engine.vocab.classes  # noqa: B018  computed now, not in the first session
        speech_bytes = limits.max_prompt * _BYTES_PER_AUDIO_TOKEN if engine.takes_audio else 0
        limit = min(limits.max_message_bytes + speech_bytes, _INT32_MAX)
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limit),
                ONE_LISTENER,
                *FEW_FRAMES,
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
                ("grpc.server_handshake_timeout_ms", int(QUESTION_S * 1e3)),  # also for what is not even HTTP/2
                ("grpc.max_connection_idle_ms", int(min(limits.session_ttl_s * 1e3, _INT32_MAX))),  # one without a call
                *MOST_PENDING,
                ("grpc.max_allowed_incoming_connections", most := _most_connections()),
            ]
        )
        self._server.add_generic_rpc_handlers((self._calls,))
        self._calls.known = self._service.ports
        if self._keyring.has_tokens:
            self._calls.spared = self._service.ports
        self._calls.port = port = bind(self._server, self._options)
        self._thread.start()
        await self._server.start()
        self._watching = asyncio.ensure_future(ConnectionWatch(port, most, self._service.ports).watch())
        return port

    def _work(self) -> None:
        try:
            self._worker.run()
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
        """Refuse new calls, wait `grace_s` for open sessions, and end the worker after its forward.

        Nothing else is waited for: anybody can begin a call that does not end. After this the engine may be closed.
        """
        self._watching.cancel()
        sessions = self._service.drain()
        stopping = asyncio.ensure_future(self._server.stop(grace_s))  # a second call of it would crash
        if sessions:
            await asyncio.wait(sessions, timeout=grace_s)
        self._questions.end()
        await stopping
        self._worker.post(self._worker.docket.stop)
        await asyncio.to_thread(self._thread.join)
        if self._metrics:
            await asyncio.to_thread(self._metrics.close)
        if self._tracing:
            await asyncio.to_thread(self._tracing.close)


def _most_connections() -> int:
    """How many connections may be open; some of the files that this process may have are left for other things."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return _MAX_CONNECTIONS
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if soft < 0 else max(16, min(_MAX_CONNECTIONS, soft - _FILES_LEFT))


def _metrics(model: str, options: ServeOptions) -> Any:
    with importing("--metrics-port needs", "serve"):
        from skydraft.cloud.metrics import Metrics
    metrics = Metrics(model)
    try:
        metrics.serve(options.metrics_port, options.host)
    except OSError as error:
        raise OptionError(
            f"Metrics cannot be served on port {options.metrics_port}: {error.strerror}.",
            hint="Choose another --metrics-port.",
        ) from error
    return metrics


def serve(worker: Worker, options: ServeOptions, on_ready: Callable[[int], None]) -> None:
    """Serve until SIGINT or SIGTERM; a second signal ends the process at once. `on_ready` gets the port."""
    asyncio.run(_serve(worker, options, on_ready))


async def _serve(worker: Worker, options: ServeOptions, on_ready: Callable[[int], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def request_stop(number: signal.Signals) -> None:
        stop.set()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)  # the next one ends the process

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, request_stop, number)
    server = CloudServer(worker, options)
    on_ready(await server.start())
    await server.run(stop)
