"""The service: bytes to jobs, answers to bytes. It decides who may ask and how much; the judge does the rest."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from typing import Any, TypeVar

import grpc

from skydraft.choosing.grammar import compile_grammar
from skydraft.cloud.access import Keyring, RowBudget
from skydraft.cloud.jobs import Answer, GenerateJob, Job, OpenJob, VerifyJob
from skydraft.cloud.judge import Judge
from skydraft.cloud.limits import Limits
from skydraft.cloud.streams import Stream, Streams
from skydraft.cloud.traces import Note, belongs_to, request_span
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
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.info import encode_info
from skydraft.protocol.status import to_status
from skydraft.protocol.values import SERVICE, Emission, Opened, Opening, ServerInfo, SessionCall, TargetId, VerifyCall
from skydraft.tracing import Tracing
from skydraft.types import Cost, Verdict

log = logging.getLogger("skydraft.cloud")
_MAX_SCOPE_CHARS, _MAX_NAME_CHARS, _MAX_STOPS, _MAX_STOP_CHARS, _MAX_BIASES = 64, 256, 64, 4096, 1024
RpcContext = grpc.aio.ServicerContext[bytes, bytes]
A = TypeVar("A", Opened, Verdict)


class VerifierService:
    """The methods of `skydraft.verifier.v1.Verifier`, over one judge. `clock` is the judge's."""

    def __init__(
        self,
        judge: Judge,
        info: Callable[[], ServerInfo],
        keyring: Keyring,
        limits: Limits,
        clock: Callable[[], float],
        *,
        log_prompts: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        self._judge = judge
        self._info = info
        self._context_len = judge.served.context_len
        self._keyring = keyring
        self._limits = limits
        self._budget = RowBudget(limits.rows_per_s)
        self._streams = Streams(keyring, limits, clock)
        self._clock = clock
        self._log_prompts = log_prompts
        self._tracing = tracing
        self._pending: Counter[str] = Counter()  # places taken, by owner
        self._compiling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by owner

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a gRPC server adds. Messages are parsed here, not by gRPC, so that a broken one gets a clean answer."""
        unary = {"GetInfo": self._get_info, "Open": self._open, "Verify": self._verify, "Close": self._close}
        methods: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(self._guarded(method)) for name, method in unary.items()
        }
        methods["Generate"] = grpc.unary_stream_rpc_method_handler(self._generate)
        methods["Session"] = grpc.stream_stream_rpc_method_handler(self._session)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _guarded(self, method: Callable[[bytes, str], Awaitable[bytes]]) -> Any:
        async def respond(data: bytes, context: RpcContext) -> bytes:
            self._note_trace(context)
            try:
                return await method(data, self._label(context))
            except Exception as error:
                return await _abort(context, error)

        return respond

    def _note_trace(self, context: RpcContext) -> None:
        if self._tracing:
            belongs_to(context.invocation_metadata())

    def _span(self, kind: str, call: SessionCall | VerifyCall, owner: str) -> AbstractContextManager[Note]:
        return request_span(self._tracing, kind, call, owner) if self._tracing else nullcontext(_untold)

    def _label(self, context: RpcContext) -> str:
        return self._keyring.label(_authorization(context))

    def drain(self) -> None:
        """The server is about to stop: end streams that ask for nothing, the others when they are answered."""
        self._streams.drain()

    async def _session(self, requests: Any, context: RpcContext) -> None:
        self._note_trace(context)
        try:
            with self._streams.entered(_authorization(context), _current_task()) as stream:
                await self._answer_all(stream, context)
        except grpc.aio.InternalError:
            return  # the client has left while it was being answered
        except Exception as error:
            with suppress(grpc.aio.InternalError):  # the client has left meanwhile
                await _abort(context, error)

    async def _answer_all(self, stream: Stream, context: RpcContext) -> None:
        """One request of a session after the other, each answered before the next is read.

        Whoever breaks off may come back: only his last message ends the session.
        """
        session = 0
        while isinstance(data := await context.read(), bytes):
            owner = self._keyring.label(stream.authorization)  # the token may have been revoked meanwhile
            call = codec.decode_streamed(data, session, self._context_len)
            if call is None:
                self._judge.close_session(session, owner)
                return
            session = call.session
            stream.is_busy = True
            reply = await (self._rule(call, owner) if isinstance(call, VerifyCall) else self._begin(call, owner))
            stream.is_busy, stream.used_at = False, self._clock()
            await context.write(reply)
            if self._streams.is_draining:
                raise CloudDraining("The server is shutting down.")

    async def _get_info(self, data: bytes, owner: str) -> bytes:
        return encode_info(self._info())

    async def _open(self, data: bytes, owner: str) -> bytes:
        return await self._begin(codec.decode_session_call(data, self._context_len), owner, pb.OpenReply)

    async def _begin(self, call: SessionCall, owner: str, reply: codec.OpenedKind = pb.VerifyReply) -> bytes:
        self._check_opening(call.opening)
        self._budget.spend(owner, call.opening.num_ids)
        self._log("open", call, owner)
        async with self._compiled(call.opening, owner):
            opened = await self._ask(OpenJob, call, owner, Opened)
        return codec.encode_opened(opened, self._asked_for(call.opening), reply)

    async def _verify(self, data: bytes, owner: str) -> bytes:
        return await self._rule(codec.decode_verify_call(data, self._context_len), owner)

    async def _rule(self, call: VerifyCall, owner: str) -> bytes:
        if len(call.draft_ids) > self._limits.max_block:
            raise LimitExceeded(
                f"The block has {len(call.draft_ids)} tokens; this server accepts up to {self._limits.max_block}.",
                hint="Use a smaller --k.",
            )
        if call.opening:
            self._check_opening(call.opening)
        # What no session can hold is refused before anybody looks through its ids again.
        self._check_fits(call.base + (len(call.opening.prompt.token_ids) if call.opening else 0))
        self._budget.spend(owner, call.num_rows)
        async with self._compiled(call.opening, owner):
            verdict = await self._ask(VerifyJob, call, owner, Verdict)
        self._log_verdict(call, owner, verdict)
        return codec.encode_verdict(verdict, self._asked_for(call.opening))

    def _asked_for(self, opening: Opening | None) -> TargetId | None:
        """Who answers, where an opening leaves it open."""
        return self._judge.served.target_id if opening and opening.target is None else None

    def _check_opening(self, opening: Opening) -> None:
        """Refuse what no session could hold before it waits for a seat."""
        for what, size, most in (
            ("characters in a cache scope", len(opening.cache_scope), _MAX_SCOPE_CHARS),
            ("characters in the name of a model", len(opening.model), _MAX_NAME_CHARS),
            ("stop strings", len(opening.params.stop), _MAX_STOPS),
            ("characters in stop strings", sum(map(len, opening.params.stop)), _MAX_STOP_CHARS),
            ("biased tokens", len(opening.params.logit_bias), _MAX_BIASES),
        ):
            if size > most:
                raise LimitExceeded(f"There are {size} {what}; this server accepts up to {most}.")
        num_ids = len(opening.prompt.token_ids)
        if num_ids > self._limits.max_prompt:
            raise LimitExceeded(
                f"The prompt has {num_ids} tokens; this server accepts up to {self._limits.max_prompt}."
            )
        self._check_fits(opening.num_ids)

    def _check_fits(self, num_ids: int) -> None:
        if num_ids >= self._context_len:
            raise LimitExceeded(f"{num_ids} tokens do not fit in the context of {self._context_len}.")

    @asynccontextmanager
    async def _compiled(self, opening: Opening | None, owner: str) -> AsyncIterator[None]:
        """Have the grammar of an opening, if there is one, compiled and held, so that the judge finds it at once.

        Whoever sends what takes long takes a place and waits behind himself, and nobody else does. Raises
        GrammarRefused.
        """
        if opening is None or not opening.params.grammar:
            yield
            return
        self._take_place(owner)
        try:
            async with self._compiling[owner]:
                held = await asyncio.to_thread(compile_grammar, opening.params.grammar, self._judge.served.vocab)
        except MissingDependency as error:
            raise GrammarRefused("This server follows no grammars: it has no llguidance.") from error
        finally:
            self._free_place(owner)
        yield
        del held

    async def _close(self, data: bytes, owner: str) -> bytes:
        self._judge.close_session(codec.decode_close(data), owner)
        return b""

    async def _ask(self, kind: Callable[..., Job], call: SessionCall | VerifyCall, owner: str, wanted: type[A]) -> A:
        """The judge's answer, which is a `wanted`; an error is raised. A caller who leaves changes nothing:
        it may ask again.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def settle(answer: Answer) -> None:
            self._free_place(owner)
            if not future.done():
                future.set_result(answer)

        job = kind(call, owner, lambda answer: loop.call_soon_threadsafe(settle, answer), self._clock())
        with self._span(job.kind, call, owner) as note:
            self._take_place(owner)
            self._judge.submit(job)
            answer = await future
            if isinstance(answer, wanted):
                note(answer)
                return answer
            raise answer if isinstance(answer, SkydraftError) else CloudFailure("The judge answered something else.")

    def _take_place(self, owner: str) -> None:
        """Take a place in the server, until the judge's last answer: it may be in a long forward and see its queue
        late, and what a caller has left lies there all the same.

        Where there are tokens, each leaves as many places free as it takes, so that there is one for everybody. Raises
        CloudBusy.
        """
        own, num_pending = self._pending[owner], self._pending.total()
        free = self._limits.max_queue - num_pending
        if free <= 0 or (self._keyring.has_tokens and own >= free):
            raise CloudBusy(
                f"{own if free > 0 else num_pending} requests are waiting already.", hint="Try again later."
            )
        self._pending[owner] += 1

    def _free_place(self, owner: str) -> None:
        self._pending[owner] -= 1
        if not self._pending[owner]:
            del self._pending[owner]

    async def _generate(self, data: bytes, context: RpcContext) -> AsyncIterator[bytes]:
        self._note_trace(context)
        try:
            owner = self._label(context)
            call = codec.decode_session_call(data, self._context_len)
            self._check_opening(call.opening)
            self._budget.spend(owner, call.opening.num_ids)
            self._log("generate", call, owner)
            target = self._asked_for(call.opening)
            with self._span("generate", call, owner) as note:
                async with self._compiled(call.opening, owner):
                    async for emission in self._stream(call, owner):
                        self._label(context)  # the token may have been revoked meanwhile
                        note(emission)
                        yield codec.encode_emission(emission, target)
                        target = None
        except Exception as error:
            await _abort(context, error)

    async def _stream(self, call: SessionCall, owner: str) -> AsyncIterator[Emission]:
        """Tokens as they come; those that came while the last message was being sent go into one."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Answer] = asyncio.Queue()  # bounded by the length of a generation

        def deliver(answer: Answer) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, answer)
            if not isinstance(answer, Emission) or answer.finish:
                loop.call_soon_threadsafe(self._free_place, owner)

        def charge(num_rows: int) -> float:
            return self._budget.charge(owner, num_rows)

        job = GenerateJob(call, owner, deliver, self._clock(), charge)
        self._take_place(owner)
        self._judge.submit(job)
        try:
            finish = None
            while finish is None:
                answers = [await arrived.get()]
                while not arrived.empty():
                    answers.append(arrived.get_nowait())
                if emissions := [answer for answer in answers if isinstance(answer, Emission)]:
                    yield (merged := _merge(emissions))
                    finish = merged.finish
                if isinstance(answers[-1], SkydraftError):
                    raise answers[-1]
        finally:
            self._judge.cancel(job)

    def _log(self, event: str, call: SessionCall, owner: str) -> None:
        extra = {"session": call.session, "epoch": call.epoch, "base": len(call.opening.committed_ids), "token": owner}
        if self._log_prompts:
            extra["prompt_ids"] = call.opening.prompt.token_ids
        log.info(event, extra=extra)

    def _log_verdict(self, call: VerifyCall, owner: str, verdict: Verdict) -> None:
        if not log.isEnabledFor(logging.DEBUG) and not call.opening:
            return
        extra: dict[str, Any] = {"session": call.session, "epoch": call.epoch, "round": call.base, "token": owner}
        extra |= {"drafted": len(call.draft_ids), "accepted": verdict.num_accepted, "finish": verdict.finish}
        extra |= {"forward_ms": round(verdict.cost.forward_ms, 2), "queue_ms": round(verdict.cost.queue_ms, 2)}
        if self._log_prompts and call.opening:
            extra["prompt_ids"] = call.opening.prompt.token_ids
        log.log(logging.INFO if call.opening else logging.DEBUG, "verify", extra=extra)


def _untold(answer: object) -> None:
    return None


def _authorization(context: RpcContext) -> str:
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get("authorization", ""))


def _current_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None  # of a coroutine that runs
    return task


def _merge(emissions: list[Emission]) -> Emission:
    if len(emissions) == 1:
        return emissions[0]
    return Emission(
        emissions[0].base,
        tuple(token_id for emission in emissions for token_id in emission.token_ids),
        emissions[-1].finish,
        sum((emission.cost for emission in emissions), Cost()),
    )


async def _abort(context: RpcContext, error: Exception) -> bytes:
    """End the call with the status of an error; one that is not ours is logged and not explained."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, SkydraftError):
        log.exception("a request failed")
        error = CloudFailure("The server failed; its log says why.")
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
    return b""  # abort raises
