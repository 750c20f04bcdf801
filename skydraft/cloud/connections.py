"""Idle connections make way before gRPC refuses new ones at its limit.

gRPC tells nothing of its connections, but on Linux the sockets of this process are in /proc. Elsewhere nothing is done.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

log = logging.getLogger("skydraft.cloud")
_FILES = "/proc/self/fd"
_FULL, _ROOM = 7 / 8, 3 / 4  # of all connections: from when on idle ones are closed, and until when
_LOOK_S, _LOOK_SOON_S = 1.0, 0.2


class ConnectionWatch:
    """The connections of a server to its `port`, at most `most`. `in_use` gives the ports of clients with a session."""

    def __init__(self, port: int, most: int, in_use: Callable[[], set[int]]) -> None:
        self._port, self._most, self._in_use = port, most, in_use
        self._seen: dict[Any, None] = {}  # addresses of clients, in the order in which they were first seen

    async def watch(self) -> None:
        """Close the oldest idle connections whenever there are too many, until this is cancelled."""
        has_closed = False
        while os.path.isdir(_FILES):
            await asyncio.sleep(_LOOK_SOON_S if has_closed else _LOOK_S)
            num_closed = await asyncio.to_thread(self._make_room, self._in_use())
            if num_closed and not has_closed:
                log.warning("there are too many idle connections: %d of %d were closed", num_closed, self._most)
            has_closed = num_closed > 0

    def _make_room(self, in_use: set[int]) -> int:
        """Close what is too much; returns how many connections that were."""
        numbers = [int(name) for name in os.listdir(_FILES)]
        if len(numbers) < self._most * _FULL:
            self._seen.clear()
            return 0
        opened = {client: number for number in numbers if (client := self._client(number)) is not None}
        self._seen = {client: None for client in (*self._seen, *opened) if client in opened}
        num_more = int(len(opened) - self._most * _ROOM) if len(opened) >= self._most * _FULL else 0
        idle = [client for client in self._seen if client[1] not in in_use][: max(num_more, 0)]
        for client in idle:
            self._client(opened[client], ends=client)
        return len(idle)

    def _client(self, number: int, ends: Any = None) -> Any:
        """The address of the client of an open file, None if it is no connection to this port. `ends` closes that."""
        try:
            found = socket.socket(fileno=number)
        except OSError:
            return None  # no socket, or closed meanwhile
        try:
            client = found.getpeername() if found.getsockname()[1:2] == (self._port,) else None
            if ends is not None and client == ends:
                found.shutdown(socket.SHUT_RDWR)  # gRPC then closes it
        except OSError:
            return None
        finally:
            found.detach()
        return client
