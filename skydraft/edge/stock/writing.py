"""The tokens that a server writes after a prefix, as they come."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from skydraft.edge.channel import Waiting
from skydraft.edge.stock.dialect import Dialect, Row
from skydraft.edge.stock.wire import Events
from skydraft.engines.vocab import TokenIds
from skydraft.errors import CloudFailure


class Writing:
    """One request for at most `num_tokens` tokens after `prefix`. Its rows are read in order."""

    def __init__(self, events: Events, dialect: Dialect, prefix: TokenIds, num_tokens: int) -> None:
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

    async def next_row(self, waiting: Waiting) -> Row | None:
        """The next row; None if the server ended the text. Raises a SkydraftError."""
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
