"""The tokens that a server writes after a prefix, as they come: as ids, or as text that is cut into tokens here."""

from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from skydraft.edge.channel import Waiting
from skydraft.edge.stock.dialect import Row, read_safely
from skydraft.edge.stock.ledger import Usage
from skydraft.edge.stock.wire import Events
from skydraft.engines.vocab import Mask, TokenIds, Vocab
from skydraft.errors import CloudError, CloudFailure, ContentFiltered, LeftGrammar, SkydraftError

_MAX_TOKEN = 1024  # bytes of text that are cut into tokens at a time: a server may send a megabyte at once
_MAX_IDLE = 1000  # events; llama-server tells how far it has read a prompt
_SOON = Waiting(0.5, 0.5, 0.5)
# Why a text ended, in small letters: it was cut, the server failed, or its filter cut in. All others are ends.
_CUT = ("length", "max_tokens", "model_length", "model_context_window_exceeded")
_FAILED = ("error", "abort", "insufficient_system_resource", "network_error")
_FILTERED = ("content_filter", "sensitive", "safety", "recitation", "prohibited_content", "blocklist", "refusal")
_LEFT = "The text that the server writes leaves the grammar."
_ALONE = "Without --require-cloud the draft model goes on there."
FILTERED = Row(-1, finish="content_filter")


class Writing:
    """One request for at most `num_tokens` tokens after `prefix`. One that breaks ends there: `error` says how."""

    def __init__(self, events: Events, dialect: Any, prefix: TokenIds, num_tokens: int) -> None:
        self.num_written = 0
        self.model = ""  # as the server names it
        self.has_gap = False  # whether the server has written tokens without telling them
        self.error: SkydraftError | None = None
        self._events, self._dialect = events, dialect
        self._prefix, self._left = prefix, num_tokens
        self._rows: deque[Row] = deque()
        self._own: list[int] = []  # tokens of the rows that were read
        self._is_over = False
        self._num_idle = 0  # events in a row without a token

    def continues(self, text: TokenIds) -> bool:
        start = len(self._prefix)
        return len(text) == start + len(self._own) and np.array_equal(text[start:], self._own)

    async def arrived(self, waiting: Waiting) -> bool:
        while not self._rows and not self._is_over and self._events.has_more:
            await self._next(waiting)
        return bool(self._rows)

    async def rest(self, *, is_last: bool) -> None:
        """Read the end of an answer, if it is whole or this token `is_last`: it tells what was in the cache."""
        with suppress(SkydraftError):
            while (is_last or self.is_whole) and not self._is_over:
                await self._next(_SOON)

    @property
    def is_whole(self) -> bool:
        return self.num_written >= self._left

    async def _next(self, waiting: Waiting) -> None:
        """Take the next event, or the end of the answer. Raises a SkydraftError if none of them comes."""
        came, num_before = await self._events.arriving(waiting), self.num_written
        try:
            read_safely(self._take, self._events.read(came))
            self._num_idle = 0 if self.num_written > num_before else self._num_idle + 1
            if self._num_idle > _MAX_IDLE:
                raise CloudFailure(f"The server sent {_MAX_IDLE} events without a token.")
        except SkydraftError as error:
            self.error, self._is_over = error, True

    async def next_row(self, waiting: Waiting, drafted: int | None = None, allowed: Mask | None = None) -> Row | None:
        """The next row, where the draft has the token `drafted`; None if no more comes. Of a server that gives text it
        is an allowed one. Raises a SkydraftError if nothing comes in time, or for an answer that failed before its
        first token; LeftGrammar where no allowed token is in the text."""
        while not self._rows and not self._is_over:
            await self._next(waiting)
        if not self._rows:
            return self._last_row()
        row = self._rows.popleft()
        self._own.append(row.token_id)
        return row

    def _last_row(self) -> Row | None:
        if isinstance(self.error, ContentFiltered):
            return FILTERED
        if self.error and not self._own:
            raise self.error
        return None

    def _take(self, event: Any) -> None:
        if event is None:
            self._is_over = True
            return
        read = self._dialect.written(event)
        rows, usage = read.rows, read.usage
        num_written = read.num_written or self.num_written + len(rows)
        self._events.request.says(replace(usage, num_written=max(usage.num_written, num_written)))
        if read.num_written:
            num_new = read.num_written - self.num_written
            if num_new > len(rows):  # some were not told, so what follows is of no use
                self.has_gap = self._is_over = True
                return
            rows = rows[max(len(rows) - num_new, 0) :]
        self.num_written += len(rows)
        if self.num_written > self._left:
            raise CloudFailure(f"The server wrote more than the {self._left} tokens that it was asked for.")
        self.model = read.model or self.model
        self._rows += rows

    def close(self) -> None:
        """Break it off: the server stops. What it had sent until now is counted, and the token that it writes now."""
        with suppress(SkydraftError):
            while (event := self._events.unread()) is not None:
                read_safely(self._take, event)
        if self.num_written and not self._is_over and not self.is_whole:
            self._events.request.says(Usage(num_written=self.num_written + 1))
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
        self._vocab, self._end_id = vocab, end_id
        self._again = (text.encode() if dialect.echoes else b"") + pending
        self._half = ""  # the first half of a character of UTF-16
        self._held = b""  # text that is not cut into tokens yet
        self._finish = ""  # why the text ended; some servers say so before its last events

    async def arrived(self, waiting: Waiting) -> bool:
        while not self._has_text and not self._is_over and (self._events.has_more or self._finish):
            await self._next(waiting)
        return self._has_text or self._has_ended

    @property
    def is_whole(self) -> bool:
        return bool(self._finish)

    @property
    def _has_ended(self) -> bool:
        return isinstance(self.error, ContentFiltered) or (self._is_over and self._finish not in ("", *_CUT))

    @property
    def _has_text(self) -> bool:
        return bool(self._held) and not self._again.startswith(self._held)

    async def next_row(self, waiting: Waiting, drafted: int | None = None, allowed: Mask | None = None) -> Row | None:
        """The token with which the text goes on: the drafted one, if the text begins with it."""
        piece = b"" if drafted is None else self._vocab.pieces[drafted]
        while not self._is_over and (
            not self._has_text or (len(self._held) < len(piece) and piece.startswith(self._held))
        ):
            await self._next(waiting)
        if self._has_text:
            token_id = drafted if piece and drafted is not None and self._held.startswith(piece) else self._cut()
            if allowed is not None and not allowed[token_id]:
                token_id = self._part(allowed)
            self._held = self._held[len(self._vocab.pieces[token_id]) :]
        elif isinstance(self.error, ContentFiltered) or not self._has_ended:
            return self._last_row()
        else:
            token_id = drafted if drafted is not None and drafted in self._vocab.end_ids else self._end_id
            if allowed is not None and not allowed[token_id]:
                raise LeftGrammar(_LEFT, hint=_ALONE)
        self._own.append(token_id)
        return Row(token_id)

    async def _next(self, waiting: Waiting) -> None:
        """Take the next event. After the text ended, one that does not come at once is not waited for."""
        try:
            await super()._next(_SOON if self._finish else waiting)
        except CloudError:
            if not self._finish:
                raise
            self._is_over = True

    def _take(self, event: Any) -> None:
        if event is None:
            self._is_over = True
            return
        said = self._dialect.written(event)
        self.model = said.model or self.model
        # A server sends an event for each token, or for a few; at the end it may count them itself.
        text = self._joined(said.text)
        num_tokens = max(self._num_tokens(text), bool(said.text))
        self.num_written = max(said.usage.num_written, self.num_written + num_tokens)
        self._events.request.says(replace(said.usage, num_written=self.num_written))
        self._held += text.encode()
        if self._again and not self._again.startswith(self._held):
            self._held, self._again = self._held.removeprefix(self._again), b""
        finish = said.finish.lower()
        if finish.startswith(_FILTERED):
            raise ContentFiltered(f"The server ended the text: {finish}.")
        if finish in _FAILED:
            raise CloudFailure(f"The server ended the text: {finish}.")
        self._finish = finish or ("" if said.text else self._finish)

    def _joined(self, text: str) -> str:
        """Text in whole characters: a server may cut one between two events. A half that stays alone becomes U+FFFD."""
        text = self._half + text
        self._half = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
        return text.removesuffix(self._half).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def _num_tokens(self, text: str) -> int:
        """About how many tokens a text is for the server; of a long one, its characters."""
        return len(self._vocab.encode(text)) if len(text) <= _MAX_TOKEN else len(text)

    def _cut(self) -> int:
        text = self._held[:_MAX_TOKEN].decode(errors="replace")
        for beginning in (text, text[:1]):
            for token_id in self._vocab.encode(beginning)[:1]:
                if (piece := self._vocab.pieces[token_id]) and self._held.startswith(piece):
                    return token_id
        with suppress(ValueError):  # a character that was begun by other tokens
            return self._vocab.pieces.index(self._held[:1])
        raise CloudFailure("The server wrote text that the draft model's tokens cannot write.")

    def _part(self, allowed: Mask) -> int:
        """The longest allowed token with which the text begins: it may leave the grammar within a token."""
        pieces = self._vocab.pieces
        parts = [token_id for token_id in np.flatnonzero(allowed).tolist() if pieces[token_id]]
        parts = [token_id for token_id in parts if self._held.startswith(pieces[token_id])]
        if not parts:
            raise LeftGrammar(_LEFT, hint=_ALONE)
        return max(parts, key=lambda token_id: len(pieces[token_id]))
