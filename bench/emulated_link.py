"""A bad link on one machine: delay, jitter, bandwidth, cuts and stalls, seeded. All of it is emulation.

A TCP stream cannot lose a packet in the middle. So loss appears as programs see it: as a cut connection, or as one
that stalls.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from dataclasses import dataclass

from skydraft.lab.evaluation.delayed_link import DelayedLink


@dataclass(frozen=True, slots=True)
class LinkShape:
    """The behaviour of a link, each way. Delays in milliseconds, bandwidth in kilobits per second (0: no limit).

    Each chunk gets a random extra delay up to `jitter_ms`; the order is kept. `cut_rate` is the share of chunks that
    do not arrive, since the connection is cut.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    bandwidth_kbps: float = 0.0
    cut_rate: float = 0.0
    seed: int = 0


class EmulatedLink(DelayedLink):
    """`bytes_up` and `bytes_down` count the bytes on the socket, headers and encryption included."""

    def __init__(self, target: tuple[str, int], shape: LinkShape = LinkShape()) -> None:
        self._random, self._shape = random.Random(shape.seed), shape
        self._free_at = {True: 0.0, False: 0.0}  # when the sender has sent all bytes so far
        self.bytes_up = self.bytes_down = self.num_connections = self.num_cut = 0
        super().__init__(target)

    def __enter__(self) -> EmulatedLink:
        return self

    def stall(self, seconds: float) -> None:
        """Hold all bytes back for a while; connections stay open."""
        self.held_until = time.monotonic() + seconds

    def cut(self) -> None:
        """Cut all connections; new ones are accepted."""
        asyncio.run_coroutine_threadsafe(self._cut(), self.loop).result()

    async def _cut(self) -> None:
        tasks = [*self.connections]
        self.num_cut += len(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def reshape(self, shape: LinkShape) -> None:
        """Change the shape from the next chunk on; chunks on their way keep the old shape."""
        self._shape = shape

    def retarget(self, target: tuple[str, int]) -> None:
        """Send new connections to another address, such as a server that restarted on another port."""
        self.target = target

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection. The edge sees its end as a cut, not as an end."""
        at_once = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.num_connections += 1
        await super().carry(reader, writer)

    def goes_on_at(self, data: bytes, *, is_up: bool) -> float:
        """When what came now goes on. Raises ConnectionError for a cut."""
        self.bytes_up += len(data) * is_up
        self.bytes_down += len(data) * (not is_up)
        shape = self._shape
        if self._random.random() < shape.cut_rate:
            self.num_cut += 1
            raise ConnectionError
        sending_s = len(data) * 8 / (shape.bandwidth_kbps * 1e3) if shape.bandwidth_kbps else 0.0
        self._free_at[is_up] = max(self._free_at[is_up], time.monotonic()) + sending_s
        return self._free_at[is_up] + (shape.delay_ms + self._random.random() * shape.jitter_ms) / 1e3
