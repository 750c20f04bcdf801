"""Read the tokens that a server writes after a prefix: as ids, or as text that is cut into tokens here."""

import codecs
from collections import deque
from contextlib import suppress
from dataclasses import replace

import numpy as np

from skydraft.edge.channel import Waiting, shared_loop
from skydraft.edge.stock.dialect import Dialect, Read, Row, TokenTuple, is_refusal, read_safely
from skydraft.edge.stock.wire import Events, parsed
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.errors import CloudError, CloudFailure, ContentFiltered, SkydraftError
from skydraft.types import LinkCost

_MAX_TEXT = 1024  # characters to cut into tokens at a time: a server may send a megabyte at once
_MAX_IDLE = 1000  # events; some are normal: llama-server reports its progress in reading a prompt
_SOON = Waiting(0.5, 0.5, 0.5)
# Finish reasons in lower case: the text was cut, the server failed, or its filter ended the text. Others are normal.
_CUT = ("length", "max_tokens", "model_length", "model_context_window_exceeded")
_FAILED = ("error", "abort", "insufficient_system_resource", "network_error")
_FILTERED = ("content_filter", "sensitive", "safety", "recitation", "prohibited_content", "blocklist", "refusal")
FILTERED = Row(-1, finish="content_filter")


class Writing:
    """One request for at most `limit` tokens after `prefix`. If it breaks, `error` has the reason."""

    def __init__(self, events: Events, dialect: Dialect, prefix: TokenIds, limit: int) -> None:
        self.num_written = 0
        self.has_gap = False  # whether the server has counted tokens that it did not send
        self.error: SkydraftError | None = None
        self.request = events.request
        self._events, self._dialect = events, dialect
        self._prefix, self._limit = prefix, limit
        self._rows: deque[Row] = deque()
        self._own: list[int] = []  # tokens returned by `next_row`
        self._is_over = False
        self._num_idle = 0  # events in a row without a token

    def continues(self, text: TokenIds) -> bool:
        start = len(self._prefix)
        return len(text) == start + len(self._own) and np.array_equal(text[start:], self._own)

    async def arrived(self, waiting: Waiting) -> bool:
        while not self._rows and not self._is_over and self._events.has_more:
            await self._next(waiting)
        return bool(self._rows)

    async def rest(self) -> None:
        """Read the last events of a complete answer: they have the token counts."""
        began = shared_loop().now()
        with suppress(SkydraftError):
            while self.is_whole and not self._is_over:
                await self._next(_SOON, began)

    @property
    def is_whole(self) -> bool:
        return self.num_written >= self._limit

    async def _next(self, waiting: Waiting, began: float | None = None) -> None:
        """Take the next event or the end of the answer. Raises a SkydraftError if neither comes in time. The time
        counts from `began`, by default from now."""
        came, num_before = await self._events.next(waiting, began), self.num_written
        try:
            if isinstance(came, SkydraftError):
                raise came
            if came is not None:
                self._take(came)
            self._is_over |= came is None
            self._num_idle = 0 if self.num_written > num_before else self._num_idle + 1
            if self._num_idle > _MAX_IDLE:
                raise CloudFailure(f"The server sent {_MAX_IDLE} events without a token.")
        except SkydraftError as error:
            self.error, self._is_over = error, True

    async def next_row(self, waiting: Waiting) -> Row | None:
        """Return the next row; None after the last. Raises a SkydraftError if no token comes in time, not even a
        thought, or if the answer failed before its first token."""
        began, num_before = shared_loop().now(), self.num_written
        while not self._rows and not self._is_over:
            await self._next(waiting, began)
            if self.num_written > num_before:
                began, num_before = shared_loop().now(), self.num_written
        if self._rows:
            self._own.append(self._rows[0].token_id)
            return self._rows.popleft()
        if isinstance(self.error, ContentFiltered):
            return FILTERED
        if self.error and not self._own:
            raise self.error
        return None

    def _take(self, data: bytes) -> None:
        read = self._said(data)
        rows, usage = read.rows, read.usage
        num_written = read.num_written or self.num_written + len(rows)
        self.request.says(replace(usage, tokens_out=max(usage.tokens_out, num_written)))
        if read.num_written:
            num_new = read.num_written - self.num_written
            if num_new > len(rows):  # some tokens are missing, so later ones are useless
                self.has_gap = self._is_over = True
                return
            rows = rows[max(len(rows) - num_new, 0) :]
        self.num_written += len(rows)
        if self.num_written > self._limit:
            raise CloudFailure(f"The server wrote more than the {self._limit} tokens requested.")
        self._rows += [replace(row, goes_on=row is not rows[-1]) for row in rows]

    def _said(self, data: bytes) -> Read:
        """Read an event. If it is malformed, count all requested tokens: the real number is unknown."""
        event = None
        try:
            return read_safely(self._dialect.written, event := parsed(data))
        except CloudFailure:
            if not is_refusal(event):
                self.request.says(LinkCost(tokens_out=self._limit))
            raise

    def close(self) -> None:
        """Close the request, so that the server stops. Count the tokens sent so far, and one that is being written."""
        with suppress(SkydraftError):
            while (data := self._events.unread()) is not None:
                self._take(data)
        if self.num_written and not self._is_over and not self.is_whole:
            self.request.says(LinkCost(tokens_out=self.num_written + 1))
        self._events.close()


class ChatWriting(Writing):
    """A chat's answer, cut into tokens of the draft model. The tokens `before` come first, and `end_id` ends it."""

    def __init__(
        self, events: Events, dialect: Dialect, prefix: TokenIds, limit: int, vocab: Vocab, end_id: int,
        before: TokenTuple,
    ) -> None:  # fmt: skip
        super().__init__(events, dialect, prefix, limit)
        self._vocab, self._end_id, self._before = vocab, end_id, before
        self._half = ""  # a high surrogate of UTF-16 without its second half
        self._held = ""  # the last characters, which may share a token with the next ones
        self._num_cut = self._num_events = 0  # tokens; events with text or thoughts
        self._finish = ""  # why the text ended; some servers send text after it
        self._ended_at = 0.0  # time of the finish, or of the last text after it

    @property
    def is_whole(self) -> bool:
        return bool(self._finish)

    async def _next(self, waiting: Waiting, began: float | None = None) -> None:
        """Take the next event. Any end or error ends the text. After a finish reason the wait is short."""
        try:
            await (super()._next(_SOON, self._ended_at) if self._finish else super()._next(waiting, began))
        except CloudError as error:
            self.error, self._is_over = error, True
        if self._is_over:
            self.error = None if self._finish else self.error  # an error after the finish does not matter
            self._cut(is_last=True)
            if self._finish:
                self._rows.append(Row(-1, finish="length") if self._finish in _CUT else Row(self._end_id))

    def _take(self, data: bytes) -> None:
        said = self._said(data)
        self._num_events += bool(said.text or said.thinks)
        self._held += self._joined(said.text)
        self._cut(is_last=False)
        # A server sends an event for each token, or for a few. At the end it may send its own count.
        self.num_written = max(said.usage.tokens_out, self._num_cut, self._num_events)
        self.request.says(replace(said.usage, tokens_out=self.num_written))
        finish = said.finish.lower()
        if finish.startswith(_FILTERED):
            raise ContentFiltered(f"The server ended the text: {finish}.")
        if finish in _FAILED:
            raise CloudFailure(f"The server ended the text: {finish}.")
        if said.text or not self._finish:
            self._ended_at = shared_loop().now()
        self._finish = finish or ("" if said.text else self._finish)

    def _joined(self, text: str) -> str:
        """Join surrogate halves that a server split between two events. A lone half becomes U+FFFD."""
        text = self._half + text
        self._half = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
        return text.removesuffix(self._half).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def _cut(self, *, is_last: bool) -> None:
        """Cut the text so far into tokens. Unless it is the last text, hold back its end: later text may change the
        last token."""
        while self._held:
            text, rest = self._held[:_MAX_TEXT], self._held[_MAX_TEXT:]
            token_ids = self._tokens(text)
            if not (rest or is_last):
                token_ids = self._whole(token_ids[:-1])
                rest = text[len(self._vocab.decode(token_ids)) :]
            if not token_ids:
                return
            self._held = rest
            self._rows += map(Row, (*self._before, *token_ids))
            self._num_cut, self._before = self._num_cut + len(token_ids), ()

    def _tokens(self, text: str) -> tuple[int, ...]:
        with suppress(ValueError):
            if self._vocab.text_bytes(token_ids := self._vocab.literal(text)) == text.encode():
                return token_ids
        try:
            return tuple(self._vocab.pieces.index(bytes([byte])) for byte in text.encode())
        except ValueError as error:
            raise CloudFailure("The server wrote text that the draft model's tokens cannot write.") from error

    def _whole(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Drop tokens after the last complete character."""
        while codecs.utf_8_decode(written := self._vocab.text_bytes(token_ids), "replace", False)[1] < len(written):
            token_ids = token_ids[:-1]
        return token_ids
