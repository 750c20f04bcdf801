"""Calls of one question and one answer: GetInfo, and gRPC's health check, which needs no token.

Anybody can begin such a call and send nothing, so each has a time limit.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from skydraft.access.keys import Keyring
from skydraft.cloud.calls import Count, Method, RpcContext, abort, authorization
from skydraft.errors import CloudTimeout, NotAuthorized
from skydraft.protocol.codec import VOCABULARY_WANTED, encode_info
from skydraft.protocol.values import GET_INFO, HEALTH, SERVICE, SERVING, ServerInfo

QUESTION_S = 3.0  # for a question and its answer; a server that stops waits for them
# HealthCheckRequest with a service, "" for all.
_NAMES = (b"", b"\n\0", b"\n" + bytes((len(SERVICE),)) + SERVICE.encode())


def questions(
    info: Callable[[], ServerInfo], vocabulary: Callable[[], bytes], keyring: Keyring, count: Count
) -> dict[str, Method]:
    """The methods that answer questions about a server, by their paths."""

    async def get_info(asked: bytes, context: RpcContext) -> bytes:
        try:
            keyring.label(authorization(context))
        except NotAuthorized as error:
            count("info", error)
            raise
        count("info", None)
        told = await asyncio.to_thread(vocabulary) if asked == VOCABULARY_WANTED else b""
        return await asyncio.to_thread(encode_info, info(), told) if told else encode_info(info())

    return {GET_INFO: _answering(get_info), HEALTH: _answering(_check)}


async def _check(asked: bytes, context: RpcContext) -> bytes:
    if asked not in _NAMES:
        await context.abort(grpc.StatusCode.NOT_FOUND, "There is no such service.")
    return SERVING


def _answering(how: Callable[[bytes, RpcContext], Awaitable[bytes]]) -> Method:
    """A method of streams, which is called before the question has come, for a call of one message each way."""

    async def answer(requests: Any, context: RpcContext) -> None:
        try:
            async with asyncio.timeout(QUESTION_S):
                if isinstance(asked := await context.read(), bytes):
                    await context.write(await how(asked, context))
        except TimeoutError:
            await abort(context, CloudTimeout("The question did not come."))
        except Exception as error:
            await abort(context, error)

    return answer
