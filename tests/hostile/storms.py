"""What servers do, over our wire and over HTTP. The faults of our wire, which a relay makes of what `skydraft serve`
says, are here; those of HTTP are in `tests/stock/faults.py`."""

import threading
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from typing import Any

from skydraft.errors import (
    CloudBusy,
    CloudDraining,
    CloudFailure,
    CloudLost,
    NotAuthorized,
    RateLimited,
    SessionNotFound,
    SkydraftError,
)
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.status import to_status
from tests.serving import OwnFault
from tests.stock import faults
from tests.stock.faults import Fault


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


# What a server does from some request on: over our wire, and over HTTP. None where the wire has no such thing.
STORMS: dict[str, tuple[Any, Any]] = {
    "limited, come back now": (refuses(RateLimited, retry_after_s=0.0), faults.refuses(429, Retry_After="0")),
    "limited for long": (refuses(RateLimited, retry_after_s=60.0), faults.refuses(429, Retry_After="60")),
    "away": (refuses(CloudLost), faults.refuses(503)),
    "going down": (refuses(CloudDraining), None),
    "failing": (refuses(CloudFailure), faults.refuses(500)),
    "another key": (refuses(NotAuthorized), faults.refuses(401)),
    "no such path": (None, faults.refuses(404)),
    "bytes of something else": (says(b"\xff<html>"), faults.says(b"<html><body>It works!</body></html>")),
    "an empty answer": (says(b""), faults.says(b"", "application/json")),
    "null": (None, faults.says(b"data: null\n\n", "text/event-stream")),
    "refused": (None, faults.refuses(400)),
    "an error in the stream": (None, faults.says(b'data: {"error": {"message": "x"}}\n\n', "text/event-stream")),
    "a list": (None, faults.says(b"data: [[[]]]\n\n", "text/event-stream")),
    "hung up on": (None, faults.hangs_up()),
    "deep": (None, faults.says(b"data: " + b"[" * 100_000 + b"\n\n", "text/event-stream")),
    "a redirect": (None, faults.redirects("http://127.0.0.1:1/")),
    "ids beyond the vocabulary": (token(10**6), Fault(token=lambda token_id: 10**6)),
    "ids beyond all numbers": (token(2**31 - 1), Fault(token=lambda token_id: 10**30)),
    "negative ids": (None, Fault(token=lambda token_id: -1)),
    "ids as words": (None, Fault(token=str)),
    "ids as fractions": (None, Fault(token=lambda token_id: token_id + 0.5)),
    "ids as truth": (None, Fault(token=lambda token_id: True)),
    "no ids": (says(b"\x08\x01"), Fault(token=lambda token_id: None)),
    "after another prefix": (alters(lambda reply: setattr(reply, "base", reply.base + 1)), None),
    "more accepted than drafted": (alters(lambda reply: setattr(reply, "num_accepted", 90)), None),
    "never an end": (alters(unending), None),
    "endless nonsense": (floods(b"\x08\x01"), faults.floods(b"data: " + b" " * 4000 + b"{}\n\n")),
    "gigabytes in one message": (says(b"\0" * (64 << 20)), faults.floods(b"data: " + b"7" * 65536)),
    "a gzip bomb": (None, faults.gzip_bomb(1 << 28)),
    "a gzip bomb as a stream": (None, faults.gzip_bomb(1 << 28, "text/event-stream")),
    "cut before the answer": (cut(0), faults.cut(0)),
    "cut within the first token": (None, faults.cut(0, 20)),
}
# What begins well, and so is part of the text until it is noticed.
LATER: dict[str, tuple[Any, Any]] = {
    "cut after three answers": (cut(3), faults.cut(3)),
    "cut within a token": (None, faults.cut(3, 20)),
    "headers and silence": (None, faults.stalls(0)),
    "silent after three answers": (stalls(3), faults.stalls(3)),
    "more tokens than were asked for": (alters(lambda reply: setattr(reply, "num_accepted", 60)), faults.ENDLESS),
    "silent about this text": (stalls(0), faults.silent()),
}
ONCE = {"full": (refuses(CloudBusy), None), "forgetful": (refuses(SessionNotFound), None)} | STORMS | LATER
