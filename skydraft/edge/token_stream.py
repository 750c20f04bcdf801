"""The target alone, as it writes: the messages of a Generate call."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import grpc

from skydraft.edge.link import PING_S, WATCH_S, Link
from skydraft.errors import CloudLost, CloudTimeout
from skydraft.protocol.status import from_rpc

_READ_AHEAD = 1024 * 1024  # bytes of a stream that nobody has asked for yet; beyond them the server has to wait


class TokenStream:
    """Messages of one Generate call, read by a thread so that silence can be told from death."""

    def __init__(self, link: Link, request: bytes, timeout_s: float) -> None:
        self._link = link
        self._call: Any = link.generate(request, timeout_s)
        self._arrived: deque[bytes | Exception] = deque()
        self._num_bytes = 0  # of what has arrived
        self._is_cancelled = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, name="stream", daemon=True).start()

    def _read(self) -> None:
        try:
            for message in self._call:
                self._put(message)
            self._put(CloudLost("The stream ended early."))
        except grpc.RpcError as error:
            self._put(from_rpc(error))

    def _put(self, item: bytes | Exception) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_bytes < _READ_AHEAD or self._is_cancelled)
            self._arrived.append(item)
            self._num_bytes += _size(item)
            self._changed.notify_all()

    def messages(self, timeout_s: float, ping_s: float = PING_S) -> Iterator[bytes]:
        """One message after the other. Raises CloudError when the stream fails, when nobody is at the other end, and
        when the next message takes longer than `timeout_s`."""
        while True:
            item = self._next(time.monotonic() + timeout_s, ping_s)
            if isinstance(item, Exception):
                raise item
            self._link.count(down=len(item))
            yield item

    def _next(self, until: float, ping_s: float) -> bytes | Exception:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._arrived, WATCH_S):
                    item = self._arrived.popleft()
                    self._num_bytes -= _size(item)
                    self._changed.notify_all()
                    return item
            if time.monotonic() > until:
                raise CloudTimeout("the stream is silent.")
            self._link.ping(ping_s)

    def cancel(self) -> None:
        """Read no more."""
        if sys.is_finalizing():
            return  # threads of gRPC have ended where they were, with locks of the call perhaps
        self._call.cancel()
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()


def _size(item: bytes | Exception) -> int:
    return len(item) if isinstance(item, bytes) else 0
