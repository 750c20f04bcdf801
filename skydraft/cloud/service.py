"""The service: bytes to jobs, answers to bytes. It checks tokens and limits; the worker computes the answers."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, closing, nullcontext, suppress
from functools import partial
from typing import Any

import grpc

from skydraft.choosing.grammar import compile_grammar
from skydraft.cloud.access import Calls, Keyring, RowBudget, RpcContext
from skydraft.cloud.docket import Answer, Job
from skydraft.cloud.limits import Limits
from skydraft.cloud.questions import abort, authorization
from skydraft.cloud.shares import Shares
from skydraft.cloud.streams import Stream, Streams
from skydraft.cloud.traces import Note, belongs_to, request_span
from skydraft.cloud.worker import Worker
from skydraft.errors import (
    CloudBusy,
    CloudDraining,
    CloudFailure,
    GrammarRefused,
    LimitExceeded,
    MissingDependency,
    SkydraftError,
)
from skydraft.protocol import codec
from skydraft.protocol.values import (
    SERVICE,
    CloseCall,
    OpenCall,
    Opened,
    Opening,
    StopCall,
    TargetId,
    VerifyCall,
    Written,
)
from skydraft.tracing import Tracing
from skydraft.types import Cost, Verdict

log = logging.getLogger("skydraft.cloud")
_MAX_SCOPE_CHARS, _MAX_STOPS, _MAX_STOP_CHARS, _MAX_BIASES = 64, 64, 4096, 1024
Answers = asyncio.Queue[tuple[Answer, bool]]  # each with a flag: this is the last one


class VerifierService:
    """The sessions of `skydraft.verifier.v3.Verifier`, over one worker, as one of `calls`. `clock` is the worker's.

    It parses messages itself, so a broken message gets a clear error.
    """

    def __init__(
        self,
        worker: Worker,
        keyring: Keyring,
        limits: Limits,
        clock: Callable[[], float],
        calls: Calls,
        *,
        log_prompts: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        self._worker, self._calls = worker, calls
        calls.add({f"/{SERVICE}/Session": self._session})
        calls.known = self.ports
        if keyring.has_tokens:
            calls.spared = self.ports
        self._most_bytes = limits.message_bytes(takes_audio=worker.served.engine.takes_audio)
        self._context_len = worker.served.engine.context_len
        self._keyring = keyring
        self._limits = limits
        self._budget = RowBudget(limits.rows_per_s)
        self._streams = Streams(keyring, limits, clock)
        self._clock = clock
        self._log_prompts = log_prompts
        self._tracing = tracing
        self._places = Shares(limits.max_queue, apart=keyring.has_tokens)  # one a request, until its last answer
        self._compiling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by owner

    def ports(self) -> set[int]:
        """The ports of the clients that have a session, or wait for one."""
        return self._streams.ports

    def drain(self) -> set[asyncio.Task[None]]:
        """Prepare to stop: end idle streams now, and the others after their answer. Returns their tasks."""
        return self._streams.drain()

    async def _session(self, requests: Any, context: RpcContext) -> None:
        if self._tracing:
            belongs_to(context.invocation_metadata())
        is_entered = False
        try:
            with (
                self._streams.entered(authorization(context), _current_task(), context.peer()) as stream,
                closing(_Messages(context)) as messages,
            ):
                is_entered = True
                await self._answer_all(stream, messages, context)
        except grpc.aio.InternalError:
            return  # the client disconnected during the answer
        except Exception as error:
            if not is_entered:
                self._count("session", error)
            with suppress(grpc.aio.InternalError):  # the client disconnected meanwhile
                await abort(context, error)

    async def _answer_all(self, stream: Stream, messages: _Messages, context: RpcContext) -> None:
        """Answer the requests of a session in order: each before the next is read.

        A disconnected client may come back: only a close message ends the session.
        """
        session = 0
        while isinstance(data := await messages.next(), bytes):
            kind = "session"
            try:
                self._keyring.label(stream.authorization)  # the token may have been revoked meanwhile
                self._check_size(data)
                call = codec.decode_call(data, session, self._context_len)
                if isinstance(call, CloseCall):
                    self._worker.post(partial(self._worker.docket.close, call.session, stream.owner))
                    return
                if isinstance(call, StopCall):
                    continue  # the stop crossed the last reply on the way
                kind, session, stream.is_busy = call.kind, call.session, True
                if isinstance(call, OpenCall):
                    await context.write(await self._open(call, stream.owner))
                else:
                    async for reply in self._verify(call, stream, messages):
                        await context.write(reply)
                if not stream.is_known:
                    self._calls.forgive(context)
            except Exception as error:
                self._count(kind, error)
                raise
            self._count(kind)
            stream.is_busy, stream.is_known, stream.used_at = False, True, self._clock()
            if self._streams.is_draining:
                raise CloudDraining("The server is shutting down.")

    def _count(self, kind: str, error: Exception | None = None) -> None:
        if (metrics := self._worker.docket.metrics) is not None:
            metrics.asked(kind, error)

    async def _open(self, call: OpenCall, owner: str) -> bytes:
        self._check_opening(call.opening)
        self._budget.spend(owner, call.num_rows)
        self._log("open", call, call.opening, owner)
        async with self._compiled(call.opening, owner):
            with self._span(call, owner) as note:
                _, answers = self._submit(call, owner)
                opened, _ = await answers.get()
                if not isinstance(opened, Opened):
                    raise _as_error(opened)
                note(opened)
        return codec.encode_opened(opened, self._unnamed(call.opening))

    async def _verify(self, call: VerifyCall, stream: Stream, messages: _Messages) -> AsyncIterator[bytes]:
        """Yield the verdict and, if the call lets the target write, the written tokens."""
        owner = stream.owner
        self._check_verify(call)
        self._budget.spend(owner, call.num_rows)
        async with self._compiled(call.opening, owner):
            with self._span(call, owner) as note:
                job, answers = self._submit(call, owner)
                try:
                    verdict, is_last = await answers.get()
                    if not isinstance(verdict, Verdict):
                        raise _as_error(verdict)
                    note(verdict)
                    self._log_verdict(call, owner, verdict)
                    yield codec.encode_verdict(verdict, self._unnamed(call.opening), is_last=is_last and call.write > 0)
                    while not is_last:
                        written, is_last = await self._written(job, call, answers, messages)
                        self._keyring.label(stream.authorization)  # the token may have been revoked meanwhile
                        note(written)
                        yield codec.encode_written(written)
                finally:
                    if not job.is_answered:
                        self._worker.post(partial(self._worker.docket.leave, job))

    async def _written(self, job: Job, call: VerifyCall, answers: Answers, messages: _Messages) -> tuple[Written, bool]:
        """The next written tokens; tokens that came while the last message was sent are merged into one message.

        The client may stop the writing meanwhile.
        """
        arrived = asyncio.ensure_future(answers.get())
        try:
            while not arrived.done():
                stop = messages.peek()
                await asyncio.wait((arrived, *((stop,) if stop else ())), return_when=asyncio.FIRST_COMPLETED)
                if stop and stop.done() and messages.stops(call.base):
                    self._worker.post(partial(self._worker.docket.stop_writing, job))
        finally:
            arrived.cancel()
        ready = [arrived.result()]
        while not answers.empty():
            ready.append(answers.get_nowait())
        if isinstance(error := ready[-1][0], SkydraftError):
            raise error
        return _merged([answer for answer, _ in ready if isinstance(answer, Written)]), ready[-1][1]

    def _submit(self, call: OpenCall | VerifyCall, owner: str) -> tuple[Job, Answers]:
        """Post a job to the worker; the job stays if the client disconnects. Raises CloudBusy."""
        loop = asyncio.get_running_loop()
        answers: Answers = asyncio.Queue()  # bounded by the length of a generation

        def take(answer: Answer, is_last: bool) -> None:
            if is_last:
                self._places.give_back(owner)
            answers.put_nowait((answer, is_last))

        def deliver(answer: Answer, is_last: bool) -> None:
            loop.call_soon_threadsafe(take, answer, is_last)

        self._take_place(owner)
        job = Job(call, owner, deliver, self._clock(), partial(self._budget.charge, owner))
        self._worker.post(partial(self._worker.docket.take, job))
        return job, answers

    def _take_place(self, owner: str) -> None:
        if not self._places.may_take(owner):
            num_waiting = self._limits.max_queue - self._places.num_free
            raise CloudBusy(f"{num_waiting} requests are waiting already.", hint="Try again later.")
        self._places.take(owner)

    @asynccontextmanager
    async def _compiled(self, opening: Opening | None, owner: str) -> AsyncIterator[None]:
        """Compile the grammar of an opening, if any, and keep it in memory, so that the worker need not compile it.

        A slow grammar delays only other grammars of its owner. Raises GrammarRefused.
        """
        if opening is None or not opening.params.grammar:
            yield
            return
        self._take_place(owner)
        try:
            async with self._compiling[owner]:
                held = await asyncio.to_thread(
                    compile_grammar, opening.params.grammar, self._worker.served.engine.vocab
                )
        except MissingDependency as error:
            raise GrammarRefused(
                "This server follows no grammars: it has no llguidance.",
                hint="On the server: pip install 'skydraft[grammar]'.",
            ) from error
        finally:
            self._places.give_back(owner)
        yield
        del held

    def _unnamed(self, opening: Opening | None) -> TargetId | None:
        """The target, if the opening names none."""
        return self._worker.served.target_id if opening and opening.target is None else None

    def _check_size(self, message: bytes) -> None:
        """gRPC's own limit was set before it was known whether the model takes audio."""
        if len(message) > self._most_bytes:
            raise LimitExceeded(f"A message of {len(message)} bytes is larger than {self._most_bytes}, the limit here.")

    def _check_verify(self, call: VerifyCall) -> None:
        if len(call.draft_ids) > self._limits.max_block:
            raise LimitExceeded(
                f"The block has {len(call.draft_ids)} tokens; this server accepts up to {self._limits.max_block}.",
                hint="Use a smaller --k.",
            )
        if call.opening:
            self._check_opening(call.opening)
        # An opening too large for any session is refused before the scan of its ids.
        self._check_fits(call.base + (len(call.opening.prompt.token_ids) if call.opening else 0))

    def _check_opening(self, opening: Opening) -> None:
        """Refuse an opening that exceeds a limit, before it waits for a seat. Raises LimitExceeded."""
        for what, size, most in (
            ("characters in a cache scope", len(opening.cache_scope), _MAX_SCOPE_CHARS),
            ("stop strings", len(opening.params.stop), _MAX_STOPS),
            ("characters in stop strings", sum(map(len, opening.params.stop)), _MAX_STOP_CHARS),
            ("biased tokens", len(opening.params.logit_bias), _MAX_BIASES),
            ("stop tokens", len(opening.params.stop_token_ids), _MAX_BIASES),
        ):
            if size > most:
                raise LimitExceeded(f"There are {size} {what}; this server accepts up to {most}.")
        num_ids = len(opening.prompt.token_ids)
        if num_ids > self._limits.max_prompt:
            raise LimitExceeded(
                f"The prompt has {num_ids} tokens; this server accepts up to {self._limits.max_prompt}.",
                hint="Shorten it, or start the server with a larger --max-prompt.",
            )
        self._check_fits(opening.num_ids)

    def _check_fits(self, num_ids: int) -> None:
        if num_ids >= self._context_len:
            raise LimitExceeded(
                f"{num_ids} tokens do not fit in the context of {self._context_len}.",
                hint="Shorten the text, or start the server with a larger --context.",
            )

    def _span(self, call: OpenCall | VerifyCall, owner: str) -> AbstractContextManager[Note]:
        return request_span(self._tracing, call, owner) if self._tracing else nullcontext(_note_nothing)

    def _log(self, event: str, call: OpenCall | VerifyCall, opening: Opening | None, owner: str, **more: Any) -> None:
        is_opening = opening is not None
        if not is_opening and not log.isEnabledFor(logging.DEBUG):
            return
        extra: dict[str, Any] = {"session": call.session, "epoch": call.epoch, "token": owner} | more
        if opening is not None:
            extra["base"] = len(opening.committed_ids)
            extra |= {"prompt_ids": opening.prompt.token_ids} if self._log_prompts else {}
        log.log(logging.INFO if is_opening else logging.DEBUG, event, extra=extra)

    def _log_verdict(self, call: VerifyCall, owner: str, verdict: Verdict) -> None:
        self._log(
            "verify", call, call.opening, owner, round=call.base, drafted=len(call.draft_ids),
            accepted=verdict.num_accepted, finish=verdict.finish, forward_ms=round(verdict.cost.forward_ms, 2),
            queue_ms=round(verdict.cost.queue_ms, 2),
        )  # fmt: skip


class _Messages:
    """The messages of a stream; the next message can be read ahead while the current one is answered."""

    def __init__(self, context: RpcContext) -> None:
        self._context = context
        self._next: asyncio.Task[Any] | None = None
        self._is_held = False  # the next message was read ahead

    async def next(self) -> Any:
        """The next message, or gRPC's EOF at the end."""
        self._is_held = False
        if self._next is None:
            return await self._context.read()
        task, self._next = self._next, None
        return await task

    def peek(self) -> asyncio.Task[Any] | None:
        """A task that reads the next message; None if that message was read ahead already."""
        if self._is_held:
            return None
        if self._next is None:
            self._next = asyncio.ensure_future(self._context.read())
        return self._next

    def stops(self, base: int) -> bool:
        """Whether the message of `peek` ends the writing after the verify of `base`: its stop, or a new request.

        A new request is kept for `next`. A stop of another verify came too late and is dropped.
        """
        assert self._next is not None
        data = self._next.result()
        if isinstance(data, bytes) and (stopped := codec.stopped_base(data)) is not None:
            self._next = None
            return stopped == base
        self._is_held = True
        return isinstance(data, bytes)

    def close(self) -> None:
        """Stop reading."""
        if self._next is not None:
            self._next.cancel()
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())


def _note_nothing(answer: object) -> None:
    return None


def _as_error(answer: Answer) -> SkydraftError:
    return answer if isinstance(answer, SkydraftError) else CloudFailure("The worker answered something else.")


def _current_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None  # a running coroutine has a task
    return task


def _merged(parts: list[Written]) -> Written:
    if len(parts) == 1:
        return parts[0]
    token_ids = tuple(token_id for part in parts for token_id in part.token_ids)
    cost = sum((part.cost for part in parts), Cost())
    return Written(parts[0].base, token_ids, parts[-1].finish, parts[-1].is_last, cost)
