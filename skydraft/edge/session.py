"""A session: a text as messages to a server. The edge's committed tokens are the truth; the server has a copy.

After the loss of a message, a session or a server, the edge asks again or opens the session again from its tokens, so
no token is lost or doubled. For that it remembers the number of the session and its epoch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from skydraft.decoding.context import Context
from skydraft.decoding.receipt import Sent
from skydraft.edge.budget import Budget
from skydraft.edge.channel import Channel, SessionStream, Waiting
from skydraft.errors import CloudFailure, Diverged, ProtocolError, SkydraftError
from skydraft.protocol import codec
from skydraft.protocol.values import MAX_SESSION, OpenCall, Opened, Opening, StopCall, TargetId, VerifyCall, Written
from skydraft.types import Cost, DraftBlock, LinkCost, Verdict

T = TypeVar("T")


class Session:
    """`ServedText` at one server of ours. `opening` is its beginning; ids are below `vocab_size`."""

    def __init__(
        self, context: Context, opening: Opening, vocab_size: int, channel: Channel, *,
        traceparent: str = "", budget: Budget | None = None,
    ) -> None:  # fmt: skip
        self.number = new_number()
        self.epoch = 0
        self.sent = Sent()
        self.spent = LinkCost()  # in all
        self._context = context
        self._opening = opening
        self._prompt_ids = np.array(opening.prompt.token_ids, np.int32)
        self._vocab_size = vocab_size
        self._channel = channel
        self._traceparent = traceparent
        self._budget = budget
        self._is_open = False  # the server has this epoch
        self._was_sent = False  # so the server may have it open, even without a reply
        self._stream: SessionStream | None = None
        self._last: SessionStream | None = None  # the last used stream, perhaps still in use
        self._is_named = False  # the stream has named its session
        self._writing: tuple[int, int, int] | None = None  # bases: of its verify, of the next token, of the limit
        self._cost: Cost | None = None  # of an opening ahead, for the first verdict

    @property
    def target(self) -> TargetId | None:
        return self._opening.target

    @target.setter
    def target(self, target: TargetId | None) -> None:
        self._opening = replace(self._opening, target=target)

    @property
    def is_writing(self) -> bool:
        return self._writing is not None

    def reopen(self, server: Channel | None = None, *, renumber: bool = False) -> None:
        """Make the next call open the session again, one epoch higher, perhaps elsewhere or with another number."""
        self.break_off()
        self._was_sent = self._was_sent and not (server or renumber)
        self._channel = server or self._channel
        if renumber:
            self.number = new_number()
        self.epoch += 1
        self._is_open = False
        self._cost = None

    def break_off(self) -> None:
        """Drop the stream; the session stays. Tokens that the target was writing are not read any more."""
        self._writing = None
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    async def renew(self) -> None:
        self.break_off()
        if self._last is not None:
            await self._last.renew()

    def open(self, waiting: Waiting) -> Coroutine[Any, Any, None]:
        return self._open(codec.encode_open(OpenCall(self.number, self.epoch, self._opening_now())), waiting)

    async def _open(self, message: bytes, waiting: Waiting) -> None:
        if self._budget is not None:
            self._budget.check()
        reply = await self._exchange(self._stream_now(), message, waiting, self._opening)
        opened: Opened = self._read(codec.decode_opened, reply)
        self._note_opened(reply)
        self._cost = opened.cost

    async def verify(self, block: DraftBlock, catch_up: tuple[int, ...], write: int, waiting: Waiting) -> Verdict:
        opening = None if self._is_open else self._opening_now()
        checksum = codec.digest(self._prompt_ids, self._context.generated)
        stream = self._stream_now()
        number = 0 if self._is_named else self.number  # a stream is about one session, which its first message names
        call = VerifyCall(number, self.epoch, block.base, catch_up, block.token_ids, checksum, opening, write)
        reply = await self._exchange(stream, codec.encode_verify(call), waiting, opening, call)
        verdict, is_last = self._read(lambda data: codec.decode_verdict(data, len(catch_up)), reply)
        self._check(verdict, block)
        if opening is not None:
            self._note_opened(reply)
        has_more = write > 0 and not is_last and verdict.hands_over(block)
        base = block.base + verdict.num_tokens
        self._writing = (block.base, base, base + write) if has_more else None
        cost, self._cost = self._cost, None
        return replace(verdict, cost=cost + verdict.cost) if cost else verdict

    async def next_written(self, waiting: Waiting) -> Written:
        """The next tokens that the target wrote; the last message may hold none."""
        assert self._stream is not None and self._writing is not None
        base, next_base, limit = self._writing
        try:
            reply = await self._stream.receive(waiting)
            self._count(0, len(reply))
            written = self._read(codec.decode_written, reply)
            self._check_written(written, next_base, limit)
        except BaseException:
            self.break_off()
            raise
        next_base += len(written.token_ids)
        has_more = not (written.is_last or written.finish) and next_base < limit
        self._writing = (base, next_base, limit) if has_more else None
        return written

    def stop(self) -> None:
        if self._writing is not None and self._stream is not None:
            message = codec.encode_stop(StopCall(self._writing[0]))
            self._count(len(message), 0)
            self._stream.send(message)

    async def close(self) -> None:
        stream, was_sent, is_named = self._stream, self._was_sent, self._is_named
        self._stream, self._writing, self._is_open = None, None, False
        if stream is not None and not stream.is_over:
            await stream.finish(codec.encode_close(0 if is_named else self.number))
        elif was_sent:
            await self._channel.stream(self._traceparent).finish(codec.encode_close(self.number))

    def _opening_now(self) -> Opening:
        self.spent += LinkCost(shared_bytes=codec.media_bytes(self._opening))
        seen = self._context.generated[: self._context.num_seen]
        return replace(self._opening, committed_ids=tuple(seen.tolist()))

    def _stream_now(self) -> SessionStream:
        """The session's stream; a new one if the server ended the old one while idle."""
        if self._stream is None or self._stream.is_over:
            self._stream = self._last = self._channel.stream(self._traceparent)
            self._is_named = False
        return self._stream

    async def _exchange(
        self, stream: SessionStream, message: bytes, waiting: Waiting, opening: Opening | None,
        call: VerifyCall | None = None,
    ) -> bytes:  # fmt: skip
        day = self._budget.take() if self._budget is not None and call is not None else None
        self._count(len(message), 0)
        self._is_named = self._was_sent = True
        if is_noted := stream.may_have_sent:
            self._note_sent(opening, call)
        try:
            reply = await stream.receive(waiting, message)
        except BaseException:
            self.break_off()
            raise
        finally:
            if not is_noted and stream.may_have_sent:  # the connection was made meanwhile
                self._note_sent(opening, call)
            elif not is_noted and self._budget is not None and day is not None:
                self._budget.give_back(day)
        self._count(0, len(reply))
        return reply

    def _note_sent(self, opening: Opening | None, call: VerifyCall | None) -> None:
        sent, target = self.sent, self._channel.address
        if opening is not None:
            sent.servers.append(target)
            sent.num_prompt_tokens = len(self._prompt_ids)
            sent.blocks.append((0, opening.committed_ids))
        if call is not None:
            sent.blocks.append((call.base - len(call.catch_up_ids), (*call.catch_up_ids, *call.draft_ids)))
            sent.num_calls += 1

    def _count(self, up: int, down: int) -> None:
        self.spent += LinkCost(bytes_up=up, bytes_down=down)

    def _note_opened(self, reply: bytes) -> None:
        if self.target is None:
            self.target = self._read(codec.decode_target, reply)
        self._is_open = True

    def _read(self, decode: Callable[[bytes], T], reply: bytes) -> T:
        """The decoded reply. A malformed reply raises CloudFailure: it is the server's failure, not wrong use."""
        try:
            return decode(reply)
        except ProtocolError as error:
            raise self._failed("an answer that cannot be read") from error

    def _check(self, verdict: Verdict, block: DraftBlock) -> None:
        """Raise CloudFailure for a verdict that cannot belong to this block: a commit could not be undone."""
        if verdict.base != block.base or verdict.num_accepted > len(block.token_ids):
            raise self._failed("an answer to another request")
        self._check_tokens(verdict.commits(block), block.base + verdict.num_tokens, verdict.finish is not None)

    def _check_written(self, written: Written, base: int, limit: int) -> None:
        """Raise Diverged or CloudFailure for written tokens that cannot follow the text, or go beyond `limit`."""
        if written.base != base:
            raise Diverged(f"The target writes at {written.base}, and the text is at {base}.")
        end = base + len(written.token_ids)
        if end > limit:
            raise self._failed(f"{end - limit} tokens more than it was to write")
        self._check_tokens(written.token_ids, end, written.finish is not None)

    def _check_tokens(self, token_ids: tuple[int, ...], end: int, has_finish: bool) -> None:
        limit = self._opening.params.max_new_tokens
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                raise self._failed(f"the token {token_id}, which the vocabulary does not have")
        if token_ids and (end > limit or (end == limit and not has_finish)):
            raise self._failed(f"tokens beyond the {limit} that were asked for")

    def _failed(self, says: str) -> SkydraftError:
        return CloudFailure(f"The cloud at {self._channel.address} sent {says}.")


def new_number() -> int:
    return random.SystemRandom().randint(1, MAX_SESSION)
