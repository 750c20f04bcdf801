"""A server in this process, on a free port of loopback, for tests of what lies between edge and cloud."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from skydraft.cloud.judge import Judge
from skydraft.cloud.limits import Limits
from skydraft.cloud.server import CloudServer, ServeOptions
from skydraft.cloud.worker import Worker
from skydraft.edge.link import Link, LinkOptions
from skydraft.edge.patience import Patience
from skydraft.engines.base import Engine
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import MAX_SESSION, Opening, SessionCall, VerifyCall
from skydraft.types import Prompt

METHODS = {pb.ACTION_VERIFY: "Verify", pb.ACTION_OPEN: "Open", pb.ACTION_CLOSE: "Close"}
PATIENCE_S = 30.0  # what must come at all comes within this, however busy the machine is


class Unhurried(Patience):
    """Takes no machine that is busy for a moment for a cloud that is gone: how soon that is, is for `test_patience`."""

    __slots__ = ()

    @property
    def silent_s(self) -> float:
        return 3 * super().silent_s

    @property
    def ping_s(self) -> float:
        return 3 * super().ping_s

    @property
    def quick_s(self) -> float:
        return 3 * super().quick_s


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Process:
    """`skydraft serve` as a process that can be killed and started again on the same port."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._options = options
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "skydraft.cli.main", "serve", "--model", "toy", "--port", str(self.port)]
        self._process = subprocess.Popen(
            [*command, "--log-level", "error", *self._options], stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        assert f"toy on 127.0.0.1:{self.port}" in line, line

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self, number: signal.Signals) -> int:
        self._process.send_signal(number)
        assert self._process.stderr is not None
        with self._process.stderr:
            self.last_words = self._process.stderr.read()
        return self._process.wait(PATIENCE_S)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None


class Serving:
    """A running CloudServer with its own thread and event loop."""

    def __init__(self, target: Engine | Judge, options: ServeOptions) -> None:
        judge = Worker(target, options.limits, execution=options.execution) if isinstance(target, Engine) else target
        self.server = CloudServer(judge, options)
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stopped = False
        try:
            self.port: int = self._run(self.server.start())
        except BaseException:
            self._end_loop()
            raise
        self.address = f"127.0.0.1:{self.port}"

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def stop(self, grace_s: float = 0.0) -> None:
        if not self._stopped:
            self._stopped = True
            self._run(self.server.stop(grace_s))
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def num_sessions(self) -> int:
        """Sessions that hold KV memory."""
        return self.server.info().num_sessions

    def metric(self, name: str) -> float:
        """A metric as it is scraped; its labels belong to the name. Wants a `metrics_port`."""
        url = f"http://127.0.0.1:{self._options.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as reply:
            lines = [line for line in reply.read().decode().splitlines() if not line.startswith("#")]
        return float(dict(line.rsplit(" ", 1) for line in lines)[f"skydraft_{name}"])

    @staticmethod
    def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        """Return when the condition holds; fail if it does not in time."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "this did not come true"
            time.sleep(0.01)

    def forget_sessions(self) -> None:
        """Let strangers take every seat, and leave: whoever had one finds its session gone."""
        link, info = Link(LinkOptions(self.address)), self.server.info()
        numbers = range(MAX_SESSION + 1, MAX_SESSION + 1 + info.max_sessions)  # no edge chooses these
        for number in numbers:
            call = SessionCall(number, 0, Opening(info.fingerprint, Prompt((1,))))
            link.call("Open", codec.encode_session_call(call), PATIENCE_S)
        for number in numbers:
            link.call("Close", codec.encode_close(number), PATIENCE_S)
        link.close()


@contextmanager
def serving(engine: Engine, *, port: int = 0, **options: Any) -> Iterator[Serving]:
    """Serve an engine; `options` are those of ServeOptions, and of Limits where their names are."""
    names = set(Limits.__dataclass_fields__)
    limits = Limits(**{name: options.pop(name) for name in names & options.keys()})
    running = Serving(engine, ServeOptions(port=port, limits=limits, **options))
    try:
        yield running
    finally:
        running.stop()


def asked(name: str, request: bytes) -> VerifyCall | SessionCall:
    """What a message says, be it a call of its own or one of a Session; 1 stands for a session that it leaves out."""
    if name in ("Open", "Generate") and not pb.VerifyRequest.FromString(request).action:
        return codec.decode_session_call(request)
    message = pb.VerifyRequest.FromString(request)
    call = codec.decode_streamed(request, message.session or 1)
    assert call is not None
    return call


class Relay(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types for it
    """A server between edge and cloud that passes all calls on and remembers each message.

    `requests` and `replies` are (method, bytes) in the order in which they came; a message of a Session has the name of
    the method that it stands for. While `is_down` nothing is passed on.
    """

    def __init__(self, address: str) -> None:
        self.requests: list[tuple[str, bytes]] = []
        self.replies: list[tuple[str, bytes]] = []
        self.is_down = False
        self.has_sessions = True
        self.num_refused = 0  # streams that a server without them was asked for
        self._channel = grpc.insecure_channel(address)
        self._server = grpc.server(ThreadPoolExecutor(16), [self], options=[("grpc.so_reuseport", 0)])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]

        def unary(request: bytes, context: Any) -> Any:
            with self._passing_on(name, request, context):
                reply = self._channel.unary_unary(details.method)(request, timeout=context.time_remaining())
                self.replies.append((name, reply))
                return reply

        def stream(request: bytes, context: Any) -> Any:
            with self._passing_on(name, request, context):
                call = self._channel.unary_stream(details.method)(request, timeout=context.time_remaining())
                context.add_callback(call.cancel)
                for message in call:
                    self.replies.append((name, message))
                    yield message

        def session(requests: Any, context: Any) -> Any:
            asked: deque[str] = deque()

            def passed_on() -> Iterator[bytes]:
                for request in requests:
                    asked.append(METHODS[pb.VerifyRequest.FromString(request).action])
                    self.requests.append((asked[-1], request))
                    if self.is_down:
                        call.cancel()
                        return
                    yield request

            call = self._channel.stream_stream(details.method)(passed_on(), metadata=context.invocation_metadata())
            context.add_callback(call.cancel)
            try:
                for message in call:
                    self.replies.append((asked.popleft(), message))
                    yield message
            except grpc.RpcError as error:
                if self.is_down:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "the relay is down")
                context.set_trailing_metadata(error.trailing_metadata())
                context.abort(error.code(), error.details())

        if name == "Session" and not self.has_sessions:
            self.num_refused += 1
            return None
        if name == "Session":
            return grpc.stream_stream_rpc_method_handler(session)
        if name == "Generate":
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)

    @contextmanager
    def _passing_on(self, name: str, request: bytes, context: Any) -> Iterator[None]:
        self.requests.append((name, request))
        if self.is_down:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the relay is down")
        try:
            yield
        except grpc.RpcError as error:
            context.set_trailing_metadata(error.trailing_metadata())
            context.abort(error.code(), error.details())

    def close(self) -> None:
        self._server.stop(0).wait()
        self._channel.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
