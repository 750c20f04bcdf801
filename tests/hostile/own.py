"""`skydraft serve` behind a relay that spoils what it says."""

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat
from typing import Any

from skydraft.access.limits import Limits
from skydraft.cloud.server import ServeOptions
from skydraft.engines.base import Engine
from skydraft.errors import SkydraftError
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.status import to_status
from tests.serving import OwnFault, Relay, Serving, free_port


def refuses(kind: type[SkydraftError], **more: Any) -> OwnFault:
    def fault(replies: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.abort_with_status(to_status(kind("Not now, says the server.", **more)))
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
            if reply.HasField("token_id") or reply.num_accepted:
                change(reply)
            yield reply.SerializeToString()

    return fault


def unending(reply: pb.SessionReply) -> None:
    reply.finish = pb.FINISH_NONE
    if not reply.HasField("token_id"):
        reply.token_id = 3


def token(token_id: int) -> OwnFault:
    """Another id in place of each that it wrote."""

    def change(reply: pb.SessionReply) -> None:
        reply.token_id = token_id

    return alters(change)


class OwnLine:
    """`skydraft serve` over gRPC, on a port of its own, behind a relay."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.port = free_port()
        self.url = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self._serving = Serving(self._engine, ServeOptions(port=0, limits=Limits(max_sessions=16)))
        self.relay = Relay(self._serving.address, self.port)

    def kill(self) -> None:
        self.relay.close()
        self._serving.stop()

    def become(self, engine: Engine) -> None:
        self._engine = engine

    def storm(self, coming: Iterable[OwnFault | None]) -> None:
        self.relay.faults = iter(coming)

    def silence(self) -> None:
        self.relay.silence = stalls(0)

    def calm(self) -> None:
        self.relay.faults, self.relay.silence = iter(()), None
