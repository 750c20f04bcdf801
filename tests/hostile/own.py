"""`skydraft serve` behind a relay that spoils what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice, repeat
from typing import Any, TypeAlias

import grpc

from skydraft.access.limits import Limits
from skydraft.cloud.server import ServeOptions
from skydraft.engines.base import Engine
from skydraft.errors import SkydraftError
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.status import to_status
from skydraft.protocol.values import SERVICE
from tests.serving import Serving, free_port

# What a stream says from its spoilt request on: (the sound replies, the context of the call).
OwnFault: TypeAlias = Callable[[Iterator[bytes], Any], Iterator[bytes]]


def refuses(error: SkydraftError) -> OwnFault:
    """Ends the call with this error."""

    def fault(replies: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.abort_with_status(to_status(error))
        yield b""

    return fault


def says(message: bytes) -> OwnFault:
    """These bytes in place of each reply."""
    return lambda replies, context: (message for _ in replies)


def floods(message: bytes) -> OwnFault:
    """These bytes again and again, until the edge hangs up."""

    def fault(replies: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield from (message for _ in repeat(None) if context.is_active())

    return fault


def cut(num_replies: int) -> OwnFault:
    """Ends the stream after so many more replies, as if all were said."""
    return lambda replies, context: islice(replies, num_replies)


def stalls(num_replies: int) -> OwnFault:
    """Says nothing after so many more replies, with the stream open."""

    def fault(replies: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield from islice(replies, num_replies)
        over = threading.Event()
        if context.add_callback(over.set):
            over.wait()

    return fault


def alters(change: Callable[[pb.SessionReply], Any]) -> OwnFault:
    """Changes each reply that has tokens."""

    def fault(replies: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for message in replies:
            reply = pb.SessionReply.FromString(message)
            if reply.written_ids or reply.HasField("token_id") or reply.num_accepted:
                change(reply)
            yield reply.SerializeToString()

    return fault


def unending(reply: pb.SessionReply) -> None:
    """Goes on after its end."""
    reply.finish = pb.FINISH_NONE
    if not (reply.written_ids or reply.HasField("token_id")):
        reply.token_id = 3


def token(token_id: int) -> OwnFault:
    """Another id in place of each that it wrote."""

    def change(reply: pb.SessionReply) -> None:
        reply.written_ids[:] = [token_id] * len(reply.written_ids)
        if not reply.written_ids:
            reply.token_id = token_id

    return alters(change)


class OwnServer(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types for it
    """A server on a port of its own. `faults` are what its next verifications get; `is_silent`: it says nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.faults: Iterator[OwnFault | None] = iter(())
        self.silence: OwnFault | None = None  # what all calls get
        self.port = free_port()
        self.url = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Listen, on the port of before."""
        self._serving = Serving(self._engine, ServeOptions(port=0, limits=Limits(max_sessions=16)))
        self._channel = grpc.insecure_channel(self._serving.address)
        options = [("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1)]
        self._server = grpc.server(ThreadPoolExecutor(16), [self], options=options)
        self._server.add_insecure_port(self.url)
        self._server.start()

    def kill(self) -> None:
        """Close all connections, whatever they carry, and listen no more. All sessions are lost."""
        self._server.stop(0).wait()
        self._channel.close()
        self._serving.stop()

    def become(self, engine: Engine) -> None:
        """Run another model after the next start."""
        self._engine = engine

    def service(self, details: Any) -> Any:
        """The handler of a call."""
        if details.method.endswith("/Session"):
            return grpc.stream_stream_rpc_method_handler(self._session)

        def unary(request: bytes, context: Any) -> Any:
            if self.silence is not None:
                list(self.silence(iter(()), context))
            try:
                return self._channel.unary_unary(details.method)(request, timeout=context.time_remaining())
            except grpc.RpcError as error:
                self._end(error, context)

        return grpc.unary_unary_rpc_method_handler(unary)

    def _session(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        spoilt: list[OwnFault] = []

        def passed_on() -> Iterator[bytes]:
            for request in _until_gone(requests):
                if pb.SessionRequest.FromString(request).action == pb.ACTION_VERIFY:
                    fault = next(self.faults, None)
                    spoilt[:] = [fault] if fault is not None else []
                yield request

        call = self._channel.stream_stream(f"/{SERVICE}/Session")(passed_on())
        context.add_callback(call.cancel)
        try:
            for message in call:
                if self.silence is not None or spoilt:
                    fault = self.silence or spoilt[0]
                    yield from fault(chain([message], call), context)
                    return
                yield message
        except grpc.RpcError as error:
            self._end(error, context)
        finally:
            call.cancel()

    @staticmethod
    def _end(error: Any, context: Any) -> None:
        with suppress(ValueError):
            context.set_trailing_metadata(error.trailing_metadata() or ())
        context.abort(error.code(), error.details())


def _until_gone(requests: Iterator[bytes]) -> Iterator[bytes]:
    """What the edge asks until it hangs up, which gRPC tells by an error."""
    with suppress(grpc.RpcError):
        yield from requests
