"""`skydraft serve`: the gRPC server around a worker, from the first bind to the last answer."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import wait
from contextlib import closing, contextmanager
from typing import Any, TypeAlias

from skydraft import __version__
from skydraft.cloud import log
from skydraft.cloud.calls import questions
from skydraft.cloud.listening import Listener
from skydraft.cloud.options import ServeOptions
from skydraft.cloud.service import VerifierService
from skydraft.cloud.worker import Worker
from skydraft.errors import EngineError, OptionError, importing, telling
from skydraft.protocol.codec import short_fingerprint
from skydraft.protocol.values import SESSION, ServerInfo

Run: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]
_LOOK_S = 0.5


class CloudServer:
    """Serves one worker on one port. Call `start`, then `stop`, on one event loop. `listener` may listen already."""

    def __init__(self, worker: Worker, options: ServeOptions, listener: Listener | None = None) -> None:
        self._worker, self._options = worker, options
        self._listener = listener or Listener(options, takes_audio=worker.served.engine.takes_audio)
        calls, keyring = self._listener.calls, self._listener.keyring
        self._metrics = _metrics(worker, calls.num_ended, options) if options.metrics_port else None
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._service = VerifierService(worker, keyring, options)
        calls.methods |= questions(self.info, worker.served.engine.vocabulary_file, keyring)
        calls.methods[SESSION] = self._service.session

    def info(self) -> ServerInfo:
        engine, limits = self._worker.served.engine, self._options.limits
        return ServerInfo(
            version=__version__, model=engine.name, weights=engine.fingerprint,
            fingerprint=short_fingerprint(engine.vocab.fingerprint), vocab_size=engine.vocab.size,
            context_len=engine.context_len, execution=self._worker.served.execution,
            max_sessions=limits.max_sessions, num_sessions=self._worker.docket.num_sessions,
        )  # fmt: skip

    async def start(self) -> int:
        """Begin to answer; binds the port if the listener has not; returns it."""
        self._worker.served.engine.vocab.classes  # noqa: B018  computed before the first session
        port = self._listener.port or await self._listener.start()
        self._thread.start()
        return port

    def _work(self) -> None:
        try:
            self._worker.run()
        except BaseException:
            log.critical("the worker died", exc_info=True)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set or the worker dies; then finish the open requests."""
        died = asyncio.create_task(asyncio.to_thread(self._thread.join))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((died, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        has_died = died.done()
        await self.stop(0.0 if has_died else self._options.grace_s)
        await died  # otherwise the loop may end before this task
        if has_died:
            raise EngineError("The worker thread failed; the log says why.", hint="Start the server again.")

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give open sessions `grace_s`, and end the worker. Then the engine may be closed."""
        sessions = self._service.drain()
        stopping = asyncio.ensure_future(self._listener.stop(grace_s))
        if sessions:
            await asyncio.wait(sessions, timeout=grace_s)
        await stopping
        self._worker.post(self._worker.docket.stop)
        await asyncio.to_thread(self._thread.join)
        if self._metrics:
            await asyncio.to_thread(self._metrics.close)


@contextmanager
def loop_in_thread() -> Iterator[tuple[asyncio.AbstractEventLoop, Run]]:
    """Yield an event loop in its own thread, and a function that runs work there and waits for the result."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="serving", daemon=True)

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        done = asyncio.run_coroutine_threadsafe(work, loop)
        # Waits with a timeout, since a signal just before an endless wait would be handled only after it.
        while not wait([done], timeout=_LOOK_S).done:
            pass
        return done.result()

    thread.start()
    try:
        yield loop, run
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _metrics(worker: Worker, num_ended: Mapping[tuple[str, str], int], options: ServeOptions) -> Any:
    with importing("--metrics-port needs", "serve"):
        from skydraft.cloud.metrics import Metrics
    metrics = Metrics(worker.served.engine.name, worker.docket, num_ended)
    what = f"Metrics cannot be served on port {options.metrics_port}"
    with telling(OptionError, what, "Choose another --metrics-port."):
        metrics.serve(options.metrics_port, options.host)
    return metrics


def serve(
    load: Callable[[], Worker], options: ServeOptions, on_ready: Callable[[Worker, int], None], *,
    on_stop: Callable[[], None] = lambda: None, may_take_audio: bool = True,
) -> None:  # fmt: skip
    """Listen, load a model, and serve it until SIGINT or SIGTERM; a second signal ends the process at once.

    `on_ready` gets the worker and the port; the first signal calls `on_stop`. Clients that connect during loading stay
    connected. Raises OptionError for a port in use, before the model is loaded. Without `may_take_audio` messages are
    limited to texts from the start.
    """
    listener, stop = Listener(options, takes_audio=may_take_audio), asyncio.Event()
    # The first process of a container ignores signals without a handler.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with loop_in_thread() as (loop, run):  # loading takes the main thread, where Ctrl-C ends it

        def request_stop(*_: object) -> None:
            loop.call_soon_threadsafe(on_stop)  # not here, since the signal may have interrupted a write
            loop.call_soon_threadsafe(stop.set)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)  # the next signal ends the process

        try:
            run(listener.start())
            worker = load()
            with closing(worker.served.engine):
                server = CloudServer(worker, options, listener)
                port = run(server.start())
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, request_stop)
                on_ready(worker, port)
                run(server.run(stop))
        finally:
            run(listener.stop(0.0))
