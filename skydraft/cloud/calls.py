"""The ends of a server's calls, and its methods with one question and one answer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

import grpc

from skydraft.access.keys import Keyring
from skydraft.cloud import log
from skydraft.errors import CloudFailure, CloudTimeout, SkydraftError, within
from skydraft.protocol.codec import VOCABULARY_WANTED, encode_info
from skydraft.protocol.status import to_status
from skydraft.protocol.values import GET_INFO, HEALTH, SERVING, ServerInfo

QUESTION_S = 3.0  # limit for a question and its answer; a stopping server waits for them
RpcContext: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]
Method: TypeAlias = Callable[[RpcContext], Awaitable[None]]


def is_news(record: logging.LogRecord) -> bool:
    """Filter gRPC's log records of clients that leave just before the last status of their call is sent."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


def authorization(context: RpcContext) -> str:
    return str(dict(context.invocation_metadata() or ()).get("authorization", ""))


async def abort(context: RpcContext, error: Exception) -> None:
    """End the call with an error's status. An unexpected error is logged; the client gets no details."""
    if isinstance(error, grpc.aio.InternalError):  # the client has left, so nobody would get a status
        raise asyncio.CancelledError
    if not isinstance(error, SkydraftError):
        log.exception("a request failed")
        error = CloudFailure("The server failed; its log says why.")
    status = to_status(error)
    with suppress(grpc.aio.InternalError):  # the client leaves now
        await context.abort(status.code, status.details, status.trailing_metadata)


def questions(info: Callable[[], ServerInfo], vocabulary: Callable[[], bytes], keyring: Keyring) -> dict[str, Method]:
    """Return the methods with one question and one answer: GetInfo, and gRPC's health check, which needs no token."""

    async def get_info(question: bytes, context: RpcContext) -> bytes:
        keyring.label(authorization(context))
        if question != VOCABULARY_WANTED:
            return encode_info(info())
        return await asyncio.to_thread(lambda: encode_info(info(), vocabulary()))

    async def check(question: bytes, context: RpcContext) -> bytes:
        return SERVING

    return {GET_INFO: _answering(get_info), HEALTH: _answering(check)}


def _answering(how: Callable[[bytes, RpcContext], Awaitable[bytes]]) -> Method:
    """Make a method of `how`, with a time limit, since anybody can begin such a call and send nothing."""

    async def answer(context: RpcContext) -> None:
        async with within(QUESTION_S, CloudTimeout("The question did not come.")):
            if isinstance(question := await context.read(), bytes):
                await context.write(await how(question, context))

    return answer
