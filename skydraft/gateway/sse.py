"""Server-sent events: bytes of events, and a stream of them that says so while there is nothing to say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # where some clients cut lines


def event(data: Any) -> bytes:
    """One event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)
    return b"data: " + text.encode() + b"\n\n"


async def next_or_ping(events: asyncio.Queue[Any], ping_s: float) -> AsyncIterator[Any]:
    """What comes next, once; before it None for each `ping_s` seconds of silence."""
    while True:
        try:
            yield await asyncio.wait_for(events.get(), ping_s)
            return
        except TimeoutError:
            yield None
