"""What servers do, over our wire and over HTTP."""

from typing import Any

from skydraft.errors import (
    CloudBusy,
    CloudDraining,
    CloudFailure,
    CloudLost,
    NotAuthorized,
    RateLimited,
    SessionNotFound,
)
from tests.hostile import own
from tests.stock import faults
from tests.stock.faults import Fault

# What a server does from some request on: over our wire, and over HTTP. None where the wire has no such thing.
STORMS: dict[str, tuple[Any, Any]] = {
    "limited, come back now": (own.refuses(RateLimited, retry_after_s=0.0), faults.refuses(429, Retry_After="0")),
    "limited for long": (own.refuses(RateLimited, retry_after_s=60.0), faults.refuses(429, Retry_After="60")),
    "away": (own.refuses(CloudLost), faults.refuses(503)),
    "going down": (own.refuses(CloudDraining), None),
    "failing": (own.refuses(CloudFailure), faults.refuses(500)),
    "another key": (own.refuses(NotAuthorized), faults.refuses(401)),
    "no such path": (None, faults.refuses(404)),
    "bytes of something else": (own.says(b"\xff<html>"), faults.says(b"<html><body>It works!</body></html>")),
    "an empty answer": (own.says(b""), faults.says(b"", "application/json")),
    "null": (None, faults.says(b"data: null\n\n", "text/event-stream")),
    "refused": (None, faults.refuses(400)),
    "an error in the stream": (None, faults.says(b'data: {"error": {"message": "x"}}\n\n', "text/event-stream")),
    "a list": (None, faults.says(b"data: [[[]]]\n\n", "text/event-stream")),
    "hung up on": (None, faults.hangs_up()),
    "deep": (None, faults.says(b"data: " + b"[" * 100_000 + b"\n\n", "text/event-stream")),
    "a redirect": (None, faults.redirects("http://127.0.0.1:1/")),
    "ids beyond the vocabulary": (own.token(10**6), Fault(token=lambda token_id: 10**6)),
    "ids beyond all numbers": (own.token(2**31 - 1), Fault(token=lambda token_id: 10**30)),
    "negative ids": (None, Fault(token=lambda token_id: -1)),
    "ids as words": (None, Fault(token=str)),
    "ids as fractions": (None, Fault(token=lambda token_id: token_id + 0.5)),
    "ids as truth": (None, Fault(token=lambda token_id: True)),
    "no ids": (own.says(b"\x08\x01"), Fault(token=lambda token_id: None)),
    "after another prefix": (own.alters(lambda reply: setattr(reply, "base", reply.base + 1)), None),
    "more accepted than drafted": (own.alters(lambda reply: setattr(reply, "num_accepted", 90)), None),
    "never an end": (own.alters(own.unending), None),
    "endless nonsense": (own.floods(b"\x08\x01"), faults.floods(b"data: " + b" " * 4000 + b"{}\n\n")),
    "gigabytes in one message": (own.says(b"\0" * (64 << 20)), faults.floods(b"data: " + b"7" * 65536)),
    "a gzip bomb": (None, faults.gzip_bomb(1 << 28)),
    "a gzip bomb as a stream": (None, faults.gzip_bomb(1 << 28, "text/event-stream")),
    "cut before the answer": (own.cut(0), faults.cut(0)),
    "cut within the first token": (None, faults.cut(0, 20)),
}
# What begins well, and so is part of the text until it is noticed.
LATER: dict[str, tuple[Any, Any]] = {
    "cut after three answers": (own.cut(3), faults.cut(3)),
    "cut within a token": (None, faults.cut(3, 20)),
    "headers and silence": (None, faults.stalls(0)),
    "silent after three answers": (own.stalls(3), faults.stalls(3)),
    "more tokens than were asked for": (own.alters(lambda reply: setattr(reply, "num_accepted", 60)), faults.ENDLESS),
    "silent about this text": (own.stalls(0), faults.silent()),
}
ONCE = {"full": (own.refuses(CloudBusy), None), "forgetful": (own.refuses(SessionNotFound), None)} | STORMS | LATER
