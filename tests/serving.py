"""Servers, and what may stand before them, on free ports of loopback."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import grpc
import trustme

from skydraft.access.limits import Limits
from skydraft.cloud.server import CloudServer, ServeOptions, loop_in_thread
from skydraft.cloud.worker import Worker
from skydraft.decoding.generation import Generation
from skydraft.edge.channel import Waiting, shared_loop
from skydraft.edge.verifier import waiting_for
from skydraft.engines.base import Engine
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.status import from_rpc
from skydraft.protocol.values import MAX_SESSION, SESSION, CloseCall, OpenCall, Opening, VerifyCall
from skydraft.types import Prompt

from .starting import Started

# What a stream says from its spoilt request on: (the sound replies, the context of the call).
OwnFault: TypeAlias = Callable[[Iterator[bytes], Any], Iterator[bytes]]
METHODS = {action: name.removeprefix("ACTION_").lower() for name, action in pb.Action.items()}
PATIENCE_S = 30.0  # what must come at all comes within this, however busy the machine is


def unhurried(timeout_s: float, **of: bool) -> Waiting:
    """Takes no machine that is busy for a moment for a cloud that is gone."""
    usual = waiting_for(timeout_s, **of)
    return Waiting(usual.timeout_s, 3 * usual.quick_s, 3 * usual.ping_s)


def ran_s() -> float:
    """Seconds during which this process ran: while a busy machine lets it stand still, no promise is broken."""
    return shared_loop().now()


def longest_round_s(generation: Generation) -> float:
    """Write a text to its end; returns the longest of its rounds, in seconds during which this process ran."""
    times = [ran_s(), *(ran_s() for _ in generation.rounds())]
    return max(after - before for before, after in pairwise(times))


def waiting(engine: Any, wait: Callable[[], object]) -> Any:
    sound = engine.forward

    def forward(feeds: Any, **options: Any) -> Any:
        wait()
        return sound(feeds, **options)

    engine.forward = forward
    return engine


class Leash:
    """Lets a target write one token more than were read, however slow the reader is: a stop comes in time."""

    def __init__(self, wait_s: float = 0.1) -> None:
        self._ahead, self._wait_s = threading.BoundedSemaphore(1), wait_s

    def put_on(self, engine: Any) -> Any:
        """The engine, whose forwards wait until enough was read, or for a moment: some are not for reading."""
        return waiting(engine, lambda: self._ahead.acquire(timeout=self._wait_s))

    def read(self, num_tokens: int = 1) -> None:
        with suppress(ValueError):  # all was read
            for _ in range(num_tokens):
                self._ahead.release()


def certified(folder: Path, host: str = "127.0.0.1") -> tuple[dict[str, Path], bytes]:
    """Files with which `host` can be served over TLS, as options of `serving`, and who signed them, in PEM form."""
    authority, files = trustme.CA(), {"tls_cert": folder / "cert.pem", "tls_key": folder / "key.pem"}
    issued = authority.issue_cert(host)
    files["tls_cert"].write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    files["tls_key"].write_bytes(issued.private_key_pem.bytes())
    return files, authority.cert_pem.bytes()


class RawSession:
    def __init__(self, channel: grpc.Channel, token: str = "") -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        metadata = [("authorization", f"Bearer {token}")] if token else []
        method: Any = channel.stream_stream(SESSION)
        self.call = method(iter(self._requests.get, None), metadata=metadata, timeout=2 * PATIENCE_S)

    def send(self, *messages: bytes | None) -> None:
        for message in messages:
            self._requests.put(message)

    def ask(self, message: bytes) -> bytes:
        self.send(message)
        return self.answer()

    def answer(self) -> bytes:
        try:
            reply: bytes = next(self.call)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        return reply

    def end(self) -> None:
        self.send(None)
        self.call.cancel()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Process:
    """`skydraft serve` as a process that can be killed and started again on the same port, soon."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._options = options
        self.start()

    def start(self) -> None:
        serve = ["serve", "--model", "toy", "--port", str(self.port), "--log-level", "error"]
        self._process = Started(*serve, *self._options, stderr=subprocess.PIPE)
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        assert f"toy on 127.0.0.1:{self.port}" in line, line

    def kill(self) -> int:
        return self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        self.signal(number)
        self._process.communicate()
        return self._process.wait(PATIENCE_S)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)


class Serving:
    def __init__(self, target: Engine | Worker, options: ServeOptions) -> None:
        worker = Worker(target, options.limits, execution=options.execution) if isinstance(target, Engine) else target
        self.server = CloudServer(worker, options)
        self._options = options
        self._grace_s = 0.0
        with ExitStack() as stack:
            _, run = stack.enter_context(loop_in_thread())
            self.port: int = run(self.server.start())
            stack.callback(lambda: run(self.server.stop(self._grace_s)))
            self._open = stack.pop_all()
        self.address = f"127.0.0.1:{self.port}"

    def stop(self, grace_s: float = 0.0) -> None:
        self._grace_s = grace_s
        self._open.close()  # once

    @property
    def num_sessions(self) -> int:
        return self.server.info().num_sessions

    def metrics(self, name: str) -> dict[str, float]:
        """By labels, as it is scraped. Wants a `metrics_port`."""
        url = f"http://127.0.0.1:{self._options.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as reply:
            lines = [line.rsplit(" ", 1) for line in reply.read().decode().splitlines()]
        start = f"skydraft_{name}"
        return {line[0].removeprefix(start): float(line[1]) for line in lines if line[0].startswith(start)}

    def metric(self, name: str) -> float:
        return self.metrics(name)[""]

    @staticmethod
    def wait_until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, "this did not come true"
            time.sleep(0.01)

    def forget_sessions(self) -> None:
        """Let strangers take every seat, and leave: whoever had one finds its session gone."""
        info = self.server.info()
        numbers = range(MAX_SESSION + 1, MAX_SESSION + 1 + info.max_sessions)  # no edge chooses these
        with grpc.insecure_channel(self.address) as channel:
            streams = [RawSession(channel) for _ in numbers]
            for number, stream in zip(numbers, streams, strict=True):
                stream.ask(codec.encode_open(OpenCall(number, 0, Opening(info.fingerprint, Prompt((1,))))))
            for stream in streams:
                stream.send(codec.encode_close(0))
                assert not list(stream.call)


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


def asked(request: bytes) -> OpenCall | VerifyCall | CloseCall:
    """What a message of a session says; 1 stands for a session that it leaves out."""
    return codec.decode_call(request, pb.SessionRequest.FromString(request).session or 1)


class Relay(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types for it
    """A server between edge and cloud that passes all calls on and remembers each message.

    `requests` and `replies` are (name, bytes) in the order in which they came; the name of a message of a session is
    what it asks for, or what it answers. While `is_down` nothing is passed on. `hold` keeps replies until `let_go`.
    `faults` are what the next verifications get, `silence` what all calls get.
    """

    def __init__(self, address: str, port: int = 0) -> None:
        self.requests: list[tuple[str, bytes]] = []
        self.replies: list[tuple[str, bytes]] = []
        self.is_down = False
        self.faults: Iterator[OwnFault | None] = iter(())
        self.silence: OwnFault | None = None
        self._passes = threading.Event()
        self._passes.set()
        self.hold, self.let_go = self._passes.clear, self._passes.set
        self._channel = grpc.insecure_channel(address)
        options = [("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1)]
        self._server = grpc.server(ThreadPoolExecutor(16), [self], options=options)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        self._server.start()

    def service(self, details: Any) -> Any:
        """Every call is a stream of bytes each way, one question and one answer too."""
        method = details.method.rpartition("/")[2]

        def relayed(requests: Any, context: Any) -> Any:
            asked_for, fault = method, None

            def passed_on() -> Iterator[bytes]:
                nonlocal asked_for, fault
                with suppress(grpc.RpcError):  # the edge hangs up
                    for request in requests:
                        is_session = method == "Session"
                        name = METHODS[pb.SessionRequest.FromString(request).action] if is_session else method
                        asked_for = asked_for if name == "stop" else name
                        fault = next(self.faults, None) if name == "verify" else fault
                        self.requests.append((name, request))
                        if self.is_down:
                            call.cancel()
                            return
                        yield request

            call = self._channel.stream_stream(details.method)(passed_on(), metadata=context.invocation_metadata())
            context.add_callback(call.cancel)
            try:
                for message in call:
                    if method == "Session":
                        self._passes.wait(PATIENCE_S)
                    if spoils := self.silence or fault:
                        yield from spoils(chain([message], call), context)
                        return
                    self.replies.append((asked_for, message))
                    yield message
            except grpc.RpcError as error:
                self._end(error, context)
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(relayed)

    def _end(self, error: Any, context: Any) -> NoReturn:
        if not self.is_down:
            context.set_trailing_metadata(error.trailing_metadata() or ())
            context.abort(error.code(), error.details())
        context.abort(grpc.StatusCode.UNAVAILABLE, "the relay is down")

    def close(self) -> None:
        self._server.stop(0).wait()
        self._channel.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
