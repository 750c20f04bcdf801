"""The port to which devices send drafts. Its only answer is the greeting; it reveals nothing about any text.

A message is a letter, the content's length (4 bytes), and the content. All numbers are little-endian.

    H  the device's token; the answer is one line of JSON: {"version", "drafts", "names"}
    T  a text: number (4), name (16), length of its prompt (4), and the prompt's last tokens (4 each)
    D  number (4), place (4), tokens (4 each): the text's tokens from this place after the prompt
    E  number (4): the end of a text
"""

import hmac
import json
import math
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from skydraft_vllm.settings import Settings
from skydraft_vllm.texts import TAIL, Text, Texts

VERSION = 1
_MAX_CONNECTIONS, _MAX_OF_ONE, _MAX_TEXTS = 64, 32, 32  # connections; of one address; texts of a connection
_MAX_DRAFTS, _MAX_HELLO = 256, 512  # tokens, bytes
_GREETING_S, _IDLE_S = 5.0, 900.0
_ACCEPTING, _READING = 0.005, 0.01  # shares of a CPU core: while a thread here runs, vLLM's own thread waits
_SAVED_S = 5.0  # a thread can save its unused share for this long
_HELD = 1 << 16  # bytes of a connection's receive buffer
_HEAD, _TEXT, _DRAFT, _END = struct.Struct("<cI"), struct.Struct("<I16sI"), struct.Struct("<II"), struct.Struct("<I")
LONGEST = 4 * _MAX_DRAFTS + _TEXT.size  # bytes of a message


class Port:
    """Listen in one thread, and read each connection in its own. Raises OSError if it cannot listen."""

    def __init__(self, settings: Settings, texts: Texts) -> None:
        self._settings, self._texts = settings, texts
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        self._listener = socket.create_server((settings.host, settings.port), family=family)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _HELD)  # connections inherit it
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._lock, self._owners = threading.Lock(), Counter[str]()  # connections by address
        self._owed_s = 0.0  # CPU time of ended connections beyond their share
        self._open = set[socket.socket]()
        self._begin(self._listen)

    def close(self) -> None:
        """Stop listening and end all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._listener.close()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _begin(self, work: Callable[..., None], *given: object) -> None:
        threading.Thread(target=work, args=given, daemon=True, name="skydraft drafts").start()

    def _listen(self) -> None:
        pace = _Pace()
        while True:
            with self._lock:
                owed_s, self._owed_s = self._owed_s, 0.0
            pace.keep(_ACCEPTING, owed_s)
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(1.0)  # too many open files
                continue
            try:
                if self._counts(host, 1):
                    self._begin(self._serve, connection, host)
                    continue
            except RuntimeError:  # too many threads
                self._counts(host, -1)
            connection.close()

    def _counts(self, owner: str, num: int) -> bool:
        """Count a new (1) or ended (-1) connection of this owner. Return False for one too many."""
        with self._lock:
            if num > 0 and (self._owners[owner] >= _MAX_OF_ONE or self._owners.total() >= _MAX_CONNECTIONS):
                return False
            self._owners += Counter({owner: num})  # drops owners without a connection
            return True

    def _serve(self, connection: socket.socket, host: str) -> None:
        device, pace = Device(self._texts), _Pace()
        try:
            connection.settimeout(_GREETING_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._settings.tls:
                connection = self._settings.tls.wrap_socket(connection, server_side=True)
            self._open.add(connection)
            messages = _Messages(connection, _GREETING_S)
            if not self._greets(messages):
                return
            hello = {"version": VERSION, "drafts": self._texts.most, "names": True}
            connection.sendall(json.dumps(hello).encode() + b"\n")
            messages.last = math.inf
            while True:
                device.take(*messages.next(LONGEST))
                pace.keep(self._share)
        except (OSError, ValueError, struct.error):
            pass  # the device disconnected, or speaks another protocol
        finally:
            device.end()
            self._open.discard(connection)
            with suppress(OSError):
                connection.close()
            with self._lock:
                self._owed_s += pace.owed(self._share)
            self._counts(host, -1)

    @property
    def _share(self) -> float:
        """Each connection's share of a CPU core."""
        return _READING / max(len(self._open), 1)

    def _greets(self, messages: "_Messages") -> bool:
        kind, content = messages.next(_MAX_HELLO)
        tokens = self._settings.tokens
        is_known = tokens is None or sum(hmac.compare_digest(content, token.encode()) for token in tokens) > 0
        return kind == b"H" and is_known


class _Pace:
    """Limit a thread to a share of a CPU core."""

    def __init__(self) -> None:
        self._began, self._used_s, self._free_at = time.monotonic(), 0.0, 0.0

    def keep(self, share: float, more_s: float = 0.0) -> None:
        """Sleep until the share covers the CPU time since the last call, plus `more_s`."""
        before, self._used_s, now = self._used_s, time.thread_time(), time.monotonic()
        self._free_at = max(self._free_at, now - _SAVED_S) + (self._used_s - before + more_s) / share
        time.sleep(max(self._free_at - now, 0.0))

    def owed(self, share: float) -> float:
        """Return the CPU seconds that the thread has used beyond its share."""
        return max(time.thread_time() - (time.monotonic() - self._began) * share, 0.0)


class _Messages:
    """The messages of a connection. The first must come within `wait_s`."""

    def __init__(self, connection: socket.socket, wait_s: float) -> None:
        self._connection = connection
        self.last = time.monotonic() + wait_s  # deadline of the next message

    def next(self, longest: int) -> tuple[bytes, bytes]:
        """Return (kind, content). Raises OSError at the end, ValueError if the content is too long."""
        kind, length = _HEAD.unpack(self._exactly(_HEAD.size))
        if length > longest:
            raise ValueError(f"a message of {length} bytes")
        return kind, self._exactly(length)

    def _exactly(self, num: int) -> bytes:
        data = bytearray()
        while len(data) < num:
            self._connection.settimeout(max(min(self.last - time.monotonic(), _IDLE_S), 1e-3))
            if not (part := self._connection.recv(num - len(data))):
                raise ConnectionResetError
            data += part
        return bytes(data)


class Device:
    """The texts of one connection. An invalid message raises ValueError or struct.error."""

    def __init__(self, texts: Texts) -> None:
        self._texts, self._mine = texts, dict[int, Text]()  # by number

    def take(self, kind: bytes, content: bytes) -> None:
        if kind == b"T":
            number, name, prompt_len = _TEXT.unpack_from(content)
            ids = self._ids(content[_TEXT.size :])
            if not 0 < len(ids) <= prompt_len < self._texts.max_len or number in self._mine:
                raise ValueError("no such text")
            if len(self._mine) == _MAX_TEXTS:
                self._end(next(iter(self._mine)))
            self._mine[number] = text = Text(name.hex(), prompt_len, ids[-TAIL:].tolist())
            self._texts.add(text)
        elif kind == b"D":
            number, place = _DRAFT.unpack_from(content)
            ids = self._ids(content[_DRAFT.size :])
            if number in self._mine and len(ids) <= _MAX_DRAFTS:
                self._texts.go_on(self._mine[number], place, ids.tolist())
        elif kind == b"E":
            self._end(*_END.unpack(content))
        else:
            raise ValueError("no such message")

    def _ids(self, content: bytes) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        ids = np.frombuffer(content, "<i4")
        if len(ids) and (ids.min() < 0 or ids.max() >= self._texts.vocab_size):
            raise ValueError("an id that the vocabulary does not have")
        return ids.astype(np.int32)

    def _end(self, number: int) -> None:
        if text := self._mine.pop(number, None):
            self._texts.end(text)

    def end(self) -> None:
        for number in list(self._mine):
            self._end(number)
