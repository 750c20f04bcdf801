"""The tokens that a server writes after a prefix, as they come: as ids, or as text that is cut into tokens here."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

from skydraft.edge.channel import Waiting
from skydraft.edge.stock.dialect import Row
from skydraft.edge.stock.wire import Events
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.errors import CloudFailure


class Writing:
    """One request for at most `num_tokens` tokens after `prefix`. Its rows are read in order."""

    def __init__(self, events: Events, dialect: Any, prefix: TokenIds, num_tokens: int) -> None:
        self.num_sent, self.num_written, self.num_cached = len(prefix), 0, 0
        self.model = ""  # as the server names it
        self._events = events
        self._dialect = dialect
        self._prefix = prefix
        self._left = num_tokens
        self._rows: deque[Row] = deque()
        self._own: list[int] = []  # tokens of the rows that were read
        self._is_over = False

    def continues(self, text: TokenIds) -> bool:
        """Whether the next row is the choice after `text`."""
        start = len(self._prefix)
        return len(text) == start + len(self._own) and np.array_equal(text[start:], self._own)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of the request, and of the answer so far."""
        return self._events.bytes_up, self._events.bytes_down

    async def arrived(self, waiting: Waiting) -> bool:
        """Whether a row can be read without waiting for the server."""
        while not self._rows and not self._is_over and self._events.has_more:
            self._take(await self._events.next(waiting))
        return bool(self._rows)

    async def next_row(self, waiting: Waiting, drafted: int | None = None) -> Row | None:
        """The next row, where the draft has the token `drafted`; None if no more comes. Raises a SkydraftError."""
        while not self._rows and not self._is_over:
            self._take(await self._events.next(waiting))
        if not self._rows:
            return None
        row = self._rows.popleft()
        self._own.append(row.token_id)
        return row

    def _take(self, event: Any) -> None:
        if event is None:
            self._is_over = True
            return
        read = self._dialect.written(event)
        rows = read.rows
        if read.num_written:
            rows = rows[max(len(rows) - (read.num_written - self.num_written), 0) :]
        self.num_written += len(rows)
        if self.num_written > self._left:
            raise CloudFailure(f"The server wrote more than the {self._left} tokens that it was asked for.")
        self.num_cached, self.model = read.num_cached or self.num_cached, read.model or self.model
        self._rows += rows

    def close(self) -> None:
        """Break it off: the server stops."""
        self._events.close()


class TextWriting(Writing):
    """The same of a server that gives text. Its tokens may be cut otherwise than ours: what agrees is text.

    `pending` are bytes of a character that the text so far has begun; the request leaves them out, so they come again.
    `end_id` is the token for the end of the text.
    """

    def __init__(
        self, events: Events, dialect: Any, prefix: TokenIds, vocab: Vocab, *, text: str, pending: bytes, end_id: int
    ) -> None:
        super().__init__(events, dialect, prefix, 0)
        self._vocab = vocab
        self._again = (text.encode() if dialect.echoes else b"") + pending
        self._end_id = end_id
        self._held = b""  # text that is not cut into tokens yet
        self._has_ended = False

    async def arrived(self, waiting: Waiting) -> bool:
        """Whether a row can be read without waiting for the server."""
        while not self._held and not self._is_over and self._events.has_more:
            self._take(await self._events.next(waiting))
        return bool(self._held) or self._has_ended

    async def next_row(self, waiting: Waiting, drafted: int | None = None) -> Row | None:
        """The token with which the text goes on: the drafted one, if the text begins with it."""
        piece = b"" if drafted is None else self._vocab.pieces[drafted]
        while not self._is_over and (len(self._held) < max(len(piece), 1) and piece.startswith(self._held)):
            self._take(await self._events.next(waiting))
        if self._held:
            token_id = drafted if piece and drafted is not None and self._held.startswith(piece) else self._cut()
            self._held = self._held[len(self._vocab.pieces[token_id]) :]
        elif self._has_ended:
            token_id = self._end_id if drafted not in self._vocab.end_ids or drafted is None else drafted
        else:
            return None
        self._own.append(token_id)
        return Row(token_id)

    def _take(self, event: Any) -> None:
        if event is None:
            self._is_over = True
            return
        said = self._dialect.said(event)
        self.num_cached, self.model = said.num_cached or self.num_cached, said.model or self.model
        self.num_written += bool(said.text)  # a server sends an event for each token, or for a few
        self._held += said.text.encode()
        if self._again and (len(self._held) >= len(self._again) or not self._again.startswith(self._held)):
            self._held, self._again = self._held.removeprefix(self._again), b""
        if said.finish:
            self._has_ended, self._is_over = said.finish == "stop", True

    def _cut(self) -> int:
        """The first token of the held text."""
        text = self._held.decode(errors="replace")
        for beginning in (text, text[:1]):
            for token_id in self._vocab.encode(beginning)[:1]:
                if (piece := self._vocab.pieces[token_id]) and self._held.startswith(piece):
                    return token_id
        with suppress(ValueError):  # a character that was begun by other tokens
            return self._vocab.pieces.index(self._held[:1])
        raise CloudFailure("The server wrote text that the draft model's tokens cannot write.")
