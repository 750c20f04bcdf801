"""The service: it turns calls into jobs and answers into bytes, and checks keys and limits. The worker computes."""

import asyncio
import logging
from collections import Counter, defaultdict
from functools import partial
from typing import Any

import grpc

import skydraft.errors as errors
from skydraft.access.keys import Keyring
from skydraft.access.limits import RowBudget
from skydraft.access.shares import Shares
from skydraft.choosing.grammar import compile_grammar
from skydraft.cloud import log
from skydraft.cloud.calls import Method, RpcContext, abort, authorization, is_news
from skydraft.cloud.docket import Answer, Job
from skydraft.cloud.options import ServeOptions
from skydraft.cloud.streams import Stream, Streams
from skydraft.cloud.worker import Worker
from skydraft.config import MAX_K
from skydraft.decoding.race.branch import MAX_AHEAD, MAX_KEPT
from skydraft.protocol import codec
from skydraft.protocol.values import (
    GET_INFO,
    HEALTH,
    SESSION,
    CloseCall,
    OpenCall,
    Opened,
    Opening,
    Stopped,
    VerifyCall,
)
from skydraft.types import Draft, Verdict

_MAX_DRAFTS = MAX_KEPT + MAX_AHEAD  # messages with drafts ahead of the target's tokens
Answers = asyncio.Queue[tuple[Answer, bool]]  # answers, and whether each is the last


class Calls:
    """The calls of a server, by method path. Calls before the model is loaded get an error. gRPC queues unhandled calls
    by path, so a flood of one method delays no other.

    `num_ended` counts calls by (path, "ok" or the name of the error).
    """

    def __init__(self) -> None:
        self.methods: dict[str, Method] = {}
        self.num_ended = Counter[tuple[str, str]]()
        logging.getLogger("grpc._cython.cygrpc").addFilter(is_news)

    def answer_at(self, server: grpc.aio.Server) -> None:
        """Register the methods; call this before the server starts."""
        for path in (SESSION, GET_INFO, HEALTH):
            service, _, method = path[1:].partition("/")
            server.add_registered_method_handlers(service, {method: self._handler(path)})

    def _handler(self, path: str) -> Any:
        async def answer(requests: Any, context: RpcContext) -> None:
            outcome = "Cancelled"
            try:
                if not (method := self.methods.get(path)):
                    raise errors.CloudLost("The server is starting: its model loads.")
                await method(context)
                outcome = "ok"
            except Exception as error:
                outcome = type(error).__name__
                await abort(context, error)
            finally:
                self.num_ended[path, outcome] += 1

        return grpc.stream_stream_rpc_method_handler(answer)


class VerifierService:
    """Serves sessions over one worker. It parses messages itself, so that a broken message gets a clear error."""

    def __init__(self, worker: Worker, keyring: Keyring, options: ServeOptions) -> None:
        limits = options.limits
        self._worker, self._docket = worker, worker.docket
        self._context_len = worker.served.engine.context_len
        self._keyring, self._limits = keyring, limits
        self._budget = RowBudget(limits.rows_per_s)
        self._streams = Streams(keyring, limits, worker.clock)
        self._places = Shares(limits.max_queue, apart=keyring.has_tokens)  # one for each request until its last answer
        self._compiling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by owner
        self.drain = self._streams.drain

    async def session(self, context: RpcContext) -> None:
        """Answer requests in order. A disconnected client may come back, so only a close message ends the session."""
        with self._streams.entered(authorization(context)) as stream:
            await self._answer_all(stream, context)

    async def _answer_all(self, stream: Stream, context: RpcContext) -> None:
        reading = asyncio.ensure_future(self._read(stream, context))
        try:
            while (data := await self._next(stream)) is not None:
                if not await self._answer(data, stream, context):
                    return
                stream.is_busy, stream.used_at = False, self._worker.clock()
                if self._streams.is_draining:
                    raise errors.CloudDraining("The server is shutting down.")
        finally:
            reading.cancel()
            reading.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _next(self, stream: Stream) -> bytes | None:
        async with errors.within(self._limits.session_ttl_s, errors.CloudLost("The stream was idle for too long.")):
            return await stream.requests.get()

    async def _read(self, stream: Stream, context: RpcContext) -> None:
        """Put the requests of a stream into its queue, at most one ahead of the answers, and None at the end. A stop of
        the current verify, or a further request, ends the target's writing; a stop of an earlier verify is too late.
        Drafts wait beside the queue until a forward has rows for them."""
        try:
            while isinstance(data := await context.read(), bytes):
                aside, job = codec.decode_aside(data), stream.job
                if isinstance(aside, Draft):
                    self._take_draft(aside, stream)
                    continue
                if job and isinstance(job.call, VerifyCall) and aside in (None, job.call.base):
                    self._worker.post(partial(self._docket.stop_writing, job))
                if aside is None:
                    stream.requests.put_nowait(data)
                    await stream.requests.join()  # until its job has begun
        finally:
            stream.requests.put_nowait(None)

    def _take_draft(self, draft: Draft, stream: Stream) -> None:
        """Keep drafts for the worker. End the stream of a device that sends many more than a text can use."""
        stream.num_drafts += 1 + len(draft.token_ids) // MAX_KEPT
        if stream.num_drafts > _MAX_DRAFTS:
            error = errors.RateLimited("There are more drafts than the text can use.", retry_after_s=1.0)
            self._streams.end(stream, error)
        elif max(draft.token_ids) < self._worker.served.engine.vocab.size:
            stream.drafts.append(draft)

    async def _answer(self, data: bytes, stream: Stream, context: RpcContext) -> bool:
        """Answer a request; returns False if it closes the session."""
        self._keyring.label(stream.authorization)  # the token may have been revoked meanwhile
        call = codec.decode_call(data, stream.session, self._context_len)
        if isinstance(call, CloseCall):
            self._worker.post(partial(self._docket.close, (call.session, stream.owner)))
            return False
        stream.session, stream.is_busy = call.session, True
        self._check(call)
        if self._limits.rows_per_s:
            self._budget.spend(stream.owner, call.num_rows)
        grammar = await self._compile(call.opening, stream.owner)
        await self._serve(call, stream, context)
        del grammar
        return True

    async def _serve(self, call: OpenCall | VerifyCall, stream: Stream, context: RpcContext) -> None:
        stream.job, answers = self._submit(call, stream)
        # The reply names the target if the opening does not.
        target = self._worker.served.target_id if call.opening and call.opening.target is None else None
        is_first, is_last = True, False
        try:
            while not is_last:
                answer, is_last = await answers.get()
                if isinstance(answer, errors.SkydraftError):
                    raise answer
                if is_first:
                    self._log(call, stream.owner, answer)
                self._keyring.label(stream.authorization)  # the token may have been revoked meanwhile
                if isinstance(answer, Opened):
                    await context.write(codec.encode_opened(answer, target))
                elif isinstance(answer, Stopped):
                    await context.write(codec.encode_stopped(answer))
                else:
                    stream.num_drafts = max(stream.num_drafts - MAX_AHEAD * answer.num_tokens, 0)
                    marked = is_last and isinstance(call, VerifyCall) and call.write > 0
                    await context.write(codec.encode_verdict(answer, target, is_last=marked, is_first=is_first))
                target, is_first = None, False
        finally:
            if not stream.job.is_answered:
                self._worker.post(partial(self._docket.stop_writing, stream.job))
            stream.job = None

    def _submit(self, call: OpenCall | VerifyCall, stream: Stream) -> tuple[Job, Answers]:
        """Submit a job, which stays if the client disconnects; returns it and its answers. Raises CloudBusy."""
        loop, owner = asyncio.get_running_loop(), stream.owner
        answers: Answers = asyncio.Queue()  # bounded by the length of a generation

        def take(answer: Answer, is_last: bool) -> None:
            if is_last:
                self._places.give_back(owner)
            answers.put_nowait((answer, is_last))

        def deliver(answer: Answer, is_last: bool) -> None:
            loop.call_soon_threadsafe(take, answer, is_last)

        self._take_place(owner)
        job = Job(call, owner, deliver, self._worker.clock(), stream.drafts, self._budget)
        self._worker.post(partial(self._docket.take, job))
        stream.requests.task_done()  # the next request may be read
        return job, answers

    def _take_place(self, owner: str) -> None:
        if not self._places.may_take(owner):
            num_waiting = self._limits.max_queue - self._places.num_free
            raise errors.CloudBusy(f"{num_waiting} requests are waiting already.", hint="Try again later.")
        self._places.take(owner)

    async def _compile(self, opening: Opening | None, owner: str) -> Any:
        """Compile the grammar of an opening, if any. While the caller holds it, the worker finds it compiled. A slow
        grammar delays only other grammars of its owner. Raises GrammarRefused."""
        if opening is None or not opening.params.grammar:
            return None
        self._take_place(owner)
        try:
            async with self._compiling[owner]:
                vocab = self._worker.served.engine.vocab
                return await asyncio.to_thread(compile_grammar, opening.params.grammar, vocab)
        except errors.MissingDependency as error:
            hint = "On the server: pip install 'skydraft[grammar]'."
            raise errors.GrammarRefused("This server follows no grammars: it has no llguidance.", hint=hint) from error
        finally:
            self._places.give_back(owner)

    def _check(self, call: OpenCall | VerifyCall) -> None:
        """Raise LimitExceeded for a call beyond a limit, before it waits for KV memory."""
        num_prompt = len(call.opening.prompt.token_ids) if call.opening else 0
        num_drafts = len(call.draft_ids) if isinstance(call, VerifyCall) else 0
        num_ids = num_prompt + call.base
        for what, num, limit, hint in (
            ("block", num_drafts, MAX_K, "Use a smaller --k."),
            ("prompt", num_prompt, self._limits.max_prompt, "Shorten it, or raise --max-prompt of the server."),
            ("text", num_ids, self._context_len - 1, "Shorten it, or raise --context of the server."),
        ):
            if num > limit:
                raise errors.LimitExceeded(f"The {what} has {num} tokens; up to {limit} fit here.", hint=hint)

    def _log(self, call: OpenCall | VerifyCall, owner: str, answer: Answer) -> None:
        extra = {"session": call.session, "epoch": call.epoch, "token": owner}
        if isinstance(call, VerifyCall) and isinstance(answer, Verdict):
            extra |= {"round": call.base, "drafted": len(call.draft_ids), "accepted": answer.num_accepted}
            extra |= {"forward_ms": round(answer.cost.forward_ms, 2), "queue_ms": round(answer.cost.queue_ms, 2)}
        log.log(logging.INFO if call.opening is not None else logging.DEBUG, call.kind, extra=extra)
