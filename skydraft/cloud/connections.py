"""Idle connections make way before gRPC refuses new ones at its limit, and those of who floods are closed.

gRPC tells nothing of its connections, but on Linux the sockets of this process are in /proc. Elsewhere nothing is done.
"""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

log = logging.getLogger("skydraft.cloud")
_FILES = "/proc/self/fd"
_FULL, _ROOM = 7 / 8, 3 / 4  # of all connections: from when on idle ones are closed, and until when
_LOOK_S, _LOOK_SOON_S = 1.0, 0.2
_SO_ATTACH_FILTER = 26
_LOAD, _LOAD_BYTE, _AND, _EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x06
_IP = -0x100000  # where the IP header begins


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
        numbers = _open_files()
        if len(numbers) < self._most * _FULL:
            self._seen.clear()
            return 0
        opened = {client: number for number in numbers if (client := _client(number, self._port)) is not None}
        self._seen = {client: None for client in (*self._seen, *opened) if client in opened}
        num_more = int(len(opened) - self._most * _ROOM) if len(opened) >= self._most * _FULL else 0
        idle = [client for client in self._seen if client[1] not in in_use][: max(num_more, 0)]
        for client in idle:
            _client(opened[client], self._port, ends=client)
        return len(idle)


def _open_files() -> list[int]:
    """The numbers of the open files of this process; none where the system does not say."""
    return [int(name) for name in os.listdir(_FILES)] if os.path.isdir(_FILES) else []


def _client(number: int, port: int, ends: Any = None) -> Any:
    """The address of the client of an open file, None if it is no connection to this port. `ends` closes that."""
    try:
        found = socket.socket(fileno=number)
    except OSError:
        return None  # no socket, or closed meanwhile
    try:
        client = found.getpeername() if found.getsockname()[1:2] == (port,) else None
        if ends is not None and client == ends:
            found.shutdown(socket.SHUT_RDWR)  # gRPC then closes it
    except OSError:
        return None
    finally:
        found.detach()
    return client


def shut_out(port: int, out: Collection[str], closed: str = "", spared: Collection[int] = ()) -> None:
    """Let no address of `out` connect to `port`, and close the connections of `closed` but those of ports in `spared`.

    The kernel drops the packets of who would connect: to accept and close a connection with calls costs no less.
    """
    for number in _open_files():
        client = _client(number, port)
        if client is None:
            _drop(number, port, out)
        elif plain_host(client[0]) == closed and client[1] not in spared:
            _client(number, port, ends=client)


def plain_host(host: str) -> str:
    """An IP address without its zone, and of an IPv4 address in IPv6 that one."""
    return host.partition("%")[0].removeprefix("::ffff:")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def _drop(number: int, port: int, out: Collection[str]) -> None:
    """Have a listening socket of `port` drop all packets from these addresses; other files are left alone."""
    code = b"".join(struct.pack("HBBi", *step) for step in _steps(out))
    with suppress(OSError):
        listening = socket.socket(fileno=number)
        try:
            listens = listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and listening.getsockname()[1:2] == (port,):
                buffer = ctypes.create_string_buffer(code, len(code))
                program = bytes(_Program(len(code) // 8, ctypes.addressof(buffer)))
                listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        finally:
            listening.detach()


def _steps(out: Collection[str]) -> Iterator[tuple[int, int, int, int]]:
    """A program of the kernel's packet filter, as (what, steps to skip if so, if not, number)."""
    for address in map(ipaddress.ip_address, out):
        words = struct.unpack(f">{len(address.packed) // 4}i", address.packed)
        num_left = 2 * len(words) + 1  # steps for this address
        yield _LOAD_BYTE, 0, 0, _IP
        yield _AND, 0, 0, 0xF0
        yield _EQUAL, 0, num_left, address.version << 4
        for word, at in zip(words, count(_IP + (12 if address.version == 4 else 8), 4), strict=False):
            num_left -= 2
            yield _LOAD, 0, 0, at
            yield _EQUAL, 0, num_left, word
        yield _RETURN, 0, 0, 0
    yield _RETURN, 0, 0, -1
