"""Drafts for texts that a vLLM writes. They go to the port of `skydraft-vllm` in the same server. The port replies with
no tokens: these come with the text's own request. A failure here only costs speed.
"""

import asyncio
import itertools
import json
import math
import struct
from collections.abc import Callable
from uuid import uuid4

import numpy as np

from skydraft.edge.channel import seen, shared_loop
from skydraft.edge.stock.dialect import count
from skydraft.edge.stock.ledger import Ledger
from skydraft.edge.tls import ServerOptions, trusting
from skydraft.engines.vocab import TokenIds, num_shared
from skydraft.protocol.address import parse_address
from skydraft.types import Draft, LinkCost

NAME = "skydraft"  # of a text, in the field `vllm_xargs` of its request
_VERSION = 1
# Timeout of the greeting; pause between two tries; after an unused time this long, a closed connection is not reported.
_GREETING_S, _PAUSE_S, _RECENT_S = 5.0, 10.0, 60.0
_TAIL = 8  # last tokens of a prompt, for the port to compare
_MANY = 64  # tokens until a warning
_MOST_TOLD = 256  # tokens of a message
_MOST_HELD = 1 << 16  # unsent bytes; beyond them drafts are dropped
_HEAD, _TEXT, _DRAFT, _END = struct.Struct("<cI"), struct.Struct("<I16sI"), struct.Struct("<II"), struct.Struct("<I")


class DraftPort:
    """The connection, shared by all texts, on the event loop. `notify` gets a line when it is first lost. `ledger`
    counts the bytes that belong to no text."""

    def __init__(self, options: ServerOptions, notify: Callable[[str], None], ledger: Ledger) -> None:
        self.numbers = itertools.count(1)
        self.most = 0  # drafts that one step takes; 0 without a connection
        self.address, self._options, self._notify, self._ledger = options.target, options, notify, ledger
        self._writer: asyncio.StreamWriter | None = None
        self._work: asyncio.Task[None] | None = None
        self._tried_at, self._used_at, self._is_told = -_PAUSE_S, 0.0, False
        self._num_grouped = 0

    @property
    def writer(self) -> asyncio.StreamWriter | None:
        """The open connection. Without one, start connecting in the background."""
        self._used_at = now = shared_loop().now()
        if (self._work is None or self._work.done()) and now - self._tried_at > _PAUSE_S:
            self._tried_at, self._work = now, asyncio.ensure_future(self._keep())
            self._work.add_done_callback(seen)
        return self._writer

    def grouped(self) -> None:
        """Count a token that came in a group without being a draft; warn once after many."""
        self._num_grouped += 1
        if self._num_grouped == _MANY:
            self._notify("vLLM sends its tokens in groups, so drafts come too late. Is --stream-interval above 1?")

    async def meet(self, timeout_s: float) -> None:
        """Wait until the port has accepted the connection or failed."""
        end = shared_loop().now() + timeout_s
        while self.writer is None and self._work and not self._work.done() and shared_loop().now() < end:
            await asyncio.sleep(0.02)

    async def _keep(self) -> None:
        """Connect, and wait for the end of the connection."""
        writer, reason = None, "it closed the connection"
        try:
            async with asyncio.timeout(_GREETING_S):
                host, port = parse_address(self._options.address)
                tls = trusting(self._options.tls_ca) if self._options.uses_tls else None
                reader, writer = await asyncio.open_connection(host, port, ssl=tls, limit=_MOST_HELD)
                writer.write(greeting := message(b"H", (self._options.token or "").encode()))
                self._ledger.note(LinkCost(bytes_up=len(greeting)))
                hello = json.loads(await reader.readline() or b"{}")
                if count(hello, "version") != _VERSION or not (most := count(hello, "drafts")):
                    raise ValueError("its version is another" if hello else "it closed the connection: check the token")
                self.most = most
            self._writer = writer
            await reader.read(1)  # nothing comes but the end
        except (OSError, ValueError, RecursionError) as error:
            is_other = isinstance(error, json.JSONDecodeError)
            reason = "something else answers" if is_other else str(error) or "it does not answer"
        finally:
            self._writer, self.most = None, 0
            if writer is not None:
                writer.transport.abort()  # `close` would wait until the port has read everything
        if not self._is_told and shared_loop().now() - self._used_at < _RECENT_S:
            self._is_told = True
            self._notify(f"The port for drafts at {self.address} failed ({reason}); vLLM writes alone.")

    async def close(self) -> None:
        self._tried_at = math.inf  # prevents a new connection by a text that ends later
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait((self._work,))


class DraftedText:
    """One request for a text after `prefix`, which begins with a prompt. The request has a secret name in a `field`, by
    which the port finds it."""

    def __init__(self, port: DraftPort, prefix: TokenIds, prompt_len: int, ledger: Ledger) -> None:
        self._name = uuid4()
        self.port, self._prefix, self._prompt_len, self._ledger = port, prefix, prompt_len, ledger
        self._known: asyncio.StreamWriter | None = None  # the connection that announced the text
        self._number = 0
        self._told = list[int]()  # the tokens after the prefix, as the port has them

    @property
    def field(self) -> dict[str, dict[str, str]]:
        return {"vllm_xargs": {NAME: self._name.hex}}

    def has_sent(self, text: TokenIds) -> bool:
        """Return whether the last token of `text` was sent as a draft."""
        place = len(text) - 1 - len(self._prefix)
        return self._told[place : place + 1] == [text[-1]]

    def draft(self, branch: Draft, text: TokenIds) -> None:
        """Send a branch's new drafts if a connection is open. `text` has the prompt and all written tokens."""
        writer = self.port.writer
        if writer is None or writer.is_closing() or writer.transport.get_write_buffer_size() > _MOST_HELD:
            return
        begin, text, sent = self._prompt_len + branch.base - len(self._prefix), text[len(self._prefix) :], b""
        drafts, begin = branch.token_ids[max(-begin, 0) :], max(begin, 0)
        if writer is not self._known:
            self._known, self._number = writer, next(self.port.numbers)
            self._told = []
            tail = self._prefix[-_TAIL:].astype("<i4").tobytes()
            sent = message(b"T", _TEXT.pack(self._number, self._name.bytes, len(self._prefix)) + tail)
        told, self._told = self._told, [*text[:begin].tolist(), *drafts]
        place = num_shared(np.array(self._told, np.int32), np.array(told, np.int32))
        for at in range(place, len(self._told), _MOST_TOLD):
            part = np.array(self._told[at : at + _MOST_TOLD], "<i4").tobytes()
            sent += message(b"D", _DRAFT.pack(self._number, at) + part)
        self._ledger.sent.blocks.append((place + len(self._prefix) - self._prompt_len, self._told[place:]))
        self._write(writer, sent)

    def end(self) -> None:
        if self._known is not None and self._known is self.port.writer:
            self._write(self._known, message(b"E", _END.pack(self._number)))

    def _write(self, writer: asyncio.StreamWriter, sent: bytes) -> None:
        self._ledger.note(LinkCost(bytes_up=len(sent)))
        writer.write(sent)


def message(kind: bytes, content: bytes) -> bytes:
    return _HEAD.pack(kind, len(content)) + content
