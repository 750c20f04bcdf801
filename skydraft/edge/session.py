"""A server that runs `skydraft serve`, and a text there: a session. The edge's committed tokens are authoritative; the
server has a copy.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from skydraft.characters import one_line
from skydraft.decoding.accounts.receipt import Sent
from skydraft.decoding.context import Context
from skydraft.decoding.request import Prepared
from skydraft.decoding.target import TargetFacts
from skydraft.edge.budget import Budget
from skydraft.edge.channel import Channel, SessionStream, Waiting
from skydraft.edge.server import OURS
from skydraft.edge.stock.drafts import DraftPort
from skydraft.edge.tls import ServerOptions
from skydraft.engines.vocab import Vocab
from skydraft.errors import CloudFailure, Diverged, ProtocolError, SkydraftError, VocabularyMismatch, or_else
from skydraft.protocol import codec, values
from skydraft.protocol.values import Opening, ServerInfo, TargetId
from skydraft.types import Cost, Draft, DraftBlock, LinkCost, Verdict

T = TypeVar("T")
_NUM_BRANCHES = 64  # branches to keep: a verdict may be about old drafts


class OwnText:
    resumes = True

    def __init__(self, server: OwnServer, context: Context, vocab: Vocab, request: Prepared) -> None:
        prompt = request.prompts.target
        self.number, self.epoch = new_number(), 0
        self.target: TargetId | None = None
        self.sent, self.spent = Sent(), LinkCost()  # in total
        self._server, self._context, self._vocab_size = server, context, vocab.size
        self._opening = Opening(
            codec.short_fingerprint(vocab.fingerprint), prompt,
            params=request.params, cache_scope=request.cache_scope, num_best=request.num_best,
        )  # fmt: skip
        self._prompt_ids = np.array(prompt.token_ids, np.int32)
        self._is_open = False  # the server has confirmed this epoch
        self._was_sent = False  # the server may have the session open, even without a reply
        self._stream: SessionStream | None = None
        self._last: SessionStream | None = None  # the last used stream, perhaps still in use
        self._is_named = False  # the stream has named its session
        self._writing: tuple[int, int] | None = None  # (base of the verify call, base at which the target must stop)
        self._drafts: dict[int, Draft] = {}  # the newest branches, by number
        self._told = 0, 0  # (the last branch sent on this stream, the end of its sent drafts)
        self._base = 0  # of the target's next token
        self._takes_drafts = False  # the target writes, or will once it has read its message
        self._sending: asyncio.Task[None] | None = None  # the last message with drafts
        self._cost: Cost | None = None  # of an opening ahead; the first verdict includes it

    @property
    def is_writing(self) -> bool:
        return self._writing is not None

    def reopen(self, server: OwnServer | None = None, *, renumber: bool = False) -> None:
        self.break_off()
        self._was_sent = self._was_sent and not (server or renumber)
        self._server = server or self._server
        if renumber:
            self.number = new_number()
        self.epoch += 1
        self._is_open, self._cost = False, None

    def break_off(self) -> None:
        """Drop the stream but keep the session. The target's unread tokens are lost."""
        self._writing, self._takes_drafts = None, False
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    async def renew(self) -> None:
        self.break_off()
        if self._last is not None:
            await self._last.renew()

    def open(self, waiting: Waiting) -> Coroutine[Any, Any, None]:
        return self._open(codec.encode_open(values.OpenCall(self.number, self.epoch, self._opening_now())), waiting)

    async def _open(self, message: bytes, waiting: Waiting) -> None:
        reply = await self._exchange(self._stream_now(), message, waiting, self._opening)
        opened, target = self._server.read(codec.decode_opened, reply)
        self.target, self._is_open = self.target or target, True
        self._cost = opened.cost
        self._count(tokens_hit=opened.cost.num_cached)

    async def verify(self, block: DraftBlock, catch_up: tuple[int, ...], write: int, waiting: Waiting) -> Verdict:
        opening = None if self._is_open else self._opening_now()
        checksum = codec.digest(self._prompt_ids, self._context.generated)
        stream = self._stream_now()
        sent_ids = (*catch_up, *block.token_ids)
        number = 0 if self._is_named else self.number  # only a stream's first message names the session
        call = values.VerifyCall(number, self.epoch, block.base, catch_up, block.token_ids, checksum, opening, write)
        self._base, self._takes_drafts = block.base, write > 0
        asyncio.get_running_loop().call_soon(self._send_drafts)  # after the message
        reply = await self._exchange(stream, codec.encode_verify(call), waiting, opening, call)
        decode = partial(codec.decode_verdict, num_audited=len(catch_up), sent_ids=sent_ids)
        verdict, is_last, target = self._server.read(decode, reply)
        if verdict is None or verdict.base != block.base or verdict.num_accepted > len(block.token_ids):
            raise self._failed("an answer to another request")
        self._check(verdict, verdict.commits(block))
        if opening is not None:
            self.target, self._is_open = self.target or target, True
        has_more = write > 0 and not is_last and verdict.hands_over(block)
        self._base, self._takes_drafts = block.base + verdict.num_tokens, has_more
        self._writing = (block.base, self._base + write) if has_more else None
        cost, self._cost = self._cost, None
        return replace(verdict, cost=cost + verdict.cost) if cost else verdict

    async def next_written(self, waiting: Waiting) -> Verdict | None:
        assert self._stream is not None and self._writing is not None
        _, limit = self._writing
        with or_else(self.break_off):
            reply = await self._stream.receive(waiting)
            self._count(bytes_down=len(reply))
            decode = partial(codec.decode_verdict, drafts=self._drafts, is_first=False)
            verdict, is_last, _ = self._server.read(decode, reply)
            if verdict is not None:
                self._check_written(verdict, limit)
        if verdict is not None:
            self._base += verdict.num_tokens
            is_last = is_last or verdict.finish is not None or self._base >= limit
            if verdict.branch:
                self._drafts = {number: each for number, each in self._drafts.items() if number >= verdict.branch}
        self._writing, self._takes_drafts = None if is_last else self._writing, not is_last
        return verdict

    def draft(self, draft: Draft) -> None:
        """Send drafts while the target writes. One message is under way at a time; the next has all drafts since."""
        self._drafts[draft.branch] = draft.after(self._drafts.get(draft.branch))
        for number in sorted(self._drafts)[:-_NUM_BRANCHES]:
            del self._drafts[number]
        self._send_drafts()

    def _send_drafts(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_all_drafts())

    async def _send_all_drafts(self) -> None:
        while (stream := self._stream) is not None and (message := self._next_drafts()):
            await stream.write(message)

    def _next_drafts(self) -> bytes:
        """Return the message with all unsent drafts; empty without any."""
        if not self._takes_drafts or not self._drafts:
            return b""
        newest = self._drafts[max(self._drafts)]
        number, place = self._told
        is_named = number == newest.branch
        place = place if is_named else max(newest.base, self._base)
        if not (token_ids := newest.at(place, len(newest.token_ids))):
            return b""
        self._told = newest.branch, place + len(token_ids)
        message = codec.encode_draft(Draft(0, 0, token_ids) if is_named else Draft(newest.branch, place, token_ids))
        self._count(bytes_up=len(message), tokens_in=len(token_ids))
        self.sent.blocks.append((place, token_ids))
        return message

    def stop(self) -> None:
        if self._writing is not None and self._stream is not None:
            message = codec.encode_stop(self._writing[0])
            self._count(bytes_up=len(message))
            self._takes_drafts = False
            self._stream.send(message)

    async def close(self) -> None:
        stream, was_sent, is_named = self._stream, self._was_sent, self._is_named
        self._stream, self._writing, self._is_open = None, None, False
        self._server.budget.pay(self.spent)
        if stream is not None and not stream.is_over:
            await stream.finish(codec.encode_close(0 if is_named else self.number))
        elif was_sent:
            await self._server.stream().finish(codec.encode_close(self.number))

    def _opening_now(self) -> Opening:
        seen = self._context.generated[: self._context.num_seen]
        return replace(self._opening, target=self.target, committed_ids=tuple(seen.tolist()))

    def _stream_now(self) -> SessionStream:
        if self._stream is None or self._stream.is_over:
            self._stream = self._last = self._server.stream()
            self._is_named, self._told = False, (0, 0)
        return self._stream

    async def _exchange(
        self, stream: SessionStream, message: bytes, waiting: Waiting, opening: Opening | None,
        call: values.VerifyCall | None = None,
    ) -> bytes:  # fmt: skip
        budget, day = self._server.budget, None
        if budget.bounds_calls and call is not None:
            day = budget.take()
        elif budget.bounds_calls:
            budget.check()  # an opening counts as part of the first call
        num_read = len(self._prompt_ids) + len(opening.committed_ids) if opening else 0
        num_read += len(call.catch_up_ids) + len(call.draft_ids) if call else 0
        self._count(bytes_up=len(message), tokens_in=num_read)
        self._is_named = self._was_sent = True
        if is_noted := stream.may_have_sent:
            self._note_sent(opening, call)
        try:
            with or_else(self.break_off):
                reply = await stream.receive(waiting, message)
        finally:
            if not is_noted and stream.may_have_sent:  # the connection has come since
                self._note_sent(opening, call)
            elif not is_noted and day is not None:
                budget.give_back(day)
        self._count(bytes_down=len(reply))
        return reply

    def _note_sent(self, opening: Opening | None, call: values.VerifyCall | None) -> None:
        sent = self.sent
        if opening is not None:
            self._count(shared_bytes=codec.media_bytes(opening))
            sent.servers.append(self._server.address)
            sent.num_prompt_tokens = len(self._prompt_ids)
            sent.blocks.append((0, opening.committed_ids))
        if call is not None:
            sent.num_calls += 1
            sent.blocks.append((call.base - len(call.catch_up_ids), (*call.catch_up_ids, *call.draft_ids)))

    def _count(self, **figures: int) -> None:
        self.spent += LinkCost(**figures)

    def _check_written(self, verdict: Verdict, limit: int) -> None:
        if (base := verdict.base) != self._base:
            raise Diverged(f"The target writes at {base}, and the text is at {self._base}.")
        if verdict.num_accepted > len(verdict.draft_ids):
            raise self._failed("an answer to another request")
        if (end := base + verdict.num_tokens) > limit:
            raise self._failed(f"{end - limit} tokens more than requested")
        self._check(verdict, verdict.commits())

    def _check(self, verdict: Verdict, token_ids: tuple[int, ...]) -> None:
        """Raise CloudFailure for impossible tokens or scores, before a commit that nothing can undo."""
        end, limit = verdict.base + len(token_ids), self._opening.params.max_new_tokens
        if (highest := max(token_ids)) >= self._vocab_size:
            raise self._failed(f"the token {highest}, which the vocabulary does not have")
        if end > limit or (end == limit and verdict.finish is None):
            raise self._failed(f"tokens beyond the {limit} requested")
        if self._opening.num_best is not None and not verdict.scores:
            raise self._failed("no log-probabilities")
        if any(token_id >= self._vocab_size for each in verdict.scores for token_id, _ in each.best):
            raise self._failed("log-probabilities of tokens that the vocabulary does not have")
        self._count(tokens_hit=verdict.cost.num_cached, tokens_out=int(verdict.token_id is not None))

    def _failed(self, says: str) -> SkydraftError:
        return CloudFailure(f"The cloud at {self._server.address} sent {says}.")


class OwnServer(Channel):
    """`Server` over gRPC. `budget` bounds the calls of all its texts."""

    kind = OURS
    drafts: DraftPort | None = None  # sessions send drafts on their own streams

    def __init__(self, options: ServerOptions, budget: Budget | None = None) -> None:
        super().__init__(options)
        self.uses_tls = options.uses_tls
        self.is_exact = True  # until `info` reports another execution
        self.runs: TargetId | None = None
        self.budget = budget or Budget()

    @property
    def is_met(self) -> bool:
        return bool(self.heard_at)

    async def info(self, timeout_s: float) -> ServerInfo:
        """Return the server's description. Names become one line without control characters: users see them."""
        info = self.read(codec.decode_info, await self.call(values.GET_INFO, timeout_s), "an invalid description")
        self.runs = codec.target_id(info.weights, info.execution, info.context_len)
        self.is_exact = info.execution == "exact"
        return replace(info, model=one_line(info.model)[:200], version=one_line(info.version)[:200])

    async def vocabulary(self, timeout_s: float) -> bytes:
        """Return a GGUF file without matrices; empty if the server has none."""
        reply = await self.call(values.GET_INFO, timeout_s, codec.VOCABULARY_WANTED)
        return self.read(codec.decode_vocabulary, reply, "an invalid vocabulary")

    def read(self, decode: Callable[[bytes], T], reply: bytes, what: str = "an answer that cannot be read") -> T:
        """Decode a reply. A malformed one raises CloudFailure: it is the server's fault, not the user's."""
        try:
            return decode(reply)
        except ProtocolError as error:
            raise CloudFailure(f"The cloud at {self.address} sent {what}: {error.message}") from error

    async def greet(self, vocab: Vocab, timeout_s: float) -> None:
        info = await self.info(timeout_s)
        if info.fingerprint != codec.short_fingerprint(vocab.fingerprint):
            says = f"{info.model} there uses other tokens than the draft model."
            raise VocabularyMismatch(says, hint="Choose two models of one family.")

    async def learn(self, timeout_s: float) -> TargetFacts:
        info = await self.info(timeout_s)
        return TargetFacts(info.model, info.weights)

    def begin(self, context: Context, vocab: Vocab, request: Prepared) -> OwnText:
        return OwnText(self, context, vocab, request)


def new_number() -> int:
    return random.SystemRandom().randint(1, values.MAX_SESSION)
