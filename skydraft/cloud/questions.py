"""Calls of one question and one answer: GetInfo, and gRPC's health check, which needs no token.

Anybody can begin such a call and send nothing, so each has a time limit, and nothing ever waits for one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc

from skydraft.cloud.access import Calls, Keyring, Method, RpcContext
from skydraft.cloud.worker import Worker
from skydraft.errors import CloudFailure, CloudTimeout, SkydraftError
from skydraft.protocol.info import encode_info
from skydraft.protocol.status import to_status
from skydraft.protocol.values import SERVICE, ServerInfo

log = logging.getLogger("skydraft.cloud")
QUESTION_S = 10.0  # for a question and its answer
_LAST_WORDS_S = 0.2  # the same when the server ends
# grpc.health.v1: HealthCheckRequest with a service, "" for all; HealthCheckResponse with SERVING.
_HEALTH, _NAMES = "grpc.health.v1.Health", (b"", b"\n\0", b"\n" + bytes((len(SERVICE),)) + SERVICE.encode())
_SERVING = b"\x08\x01"


class Questions:
    """Answers questions about a server, as some of its `calls`."""

    def __init__(self, worker: Worker, info: Callable[[], ServerInfo], keyring: Keyring, calls: Calls) -> None:
        named = ((SERVICE, "GetInfo", self._get_info), (_HEALTH, "Check", self._check))
        calls.add({f"/{service}/{name}": self._answering(how) for service, name, how in named})
        self._worker = worker
        self._info = info
        self._keyring = keyring
        self._limits: set[asyncio.Timeout] = set()  # of the questions under way

    def end(self) -> None:
        """Leave the questions under way a moment."""
        for limit in self._limits:
            with suppress(RuntimeError):  # its time is over, and the client is told so
                limit.reschedule(asyncio.get_running_loop().time() + _LAST_WORDS_S)

    async def _check(self, asked: bytes, context: RpcContext) -> bytes:
        if asked not in _NAMES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "There is no such service.")
        return _SERVING

    async def _get_info(self, asked: bytes, context: RpcContext) -> bytes:
        metrics = self._worker.docket.metrics
        try:
            self._keyring.label(authorization(context))
        except Exception as error:
            if metrics:
                metrics.asked("info", error)
            raise
        if metrics:
            metrics.asked("info", None)
        return encode_info(self._info())

    def _answering(self, how: Callable[[bytes, RpcContext], Awaitable[bytes]]) -> Method:
        """A method of streams, which is called before the question has come, for a call of one message each way."""

        async def answer(requests: Any, context: RpcContext) -> None:
            limit = asyncio.timeout(QUESTION_S)
            self._limits.add(limit)
            try:
                async with limit:
                    if isinstance(asked := await context.read(), bytes):
                        await context.write(await how(asked, context))
            except TimeoutError:
                await abort(context, CloudTimeout("The question did not come."))
            except Exception as error:
                await abort(context, error)
            finally:
                self._limits.discard(limit)

        return answer


def authorization(context: RpcContext) -> str:
    """What a call says about who it comes from."""
    return str(dict(context.invocation_metadata() or ()).get("authorization", ""))


async def abort(context: RpcContext, error: Exception) -> None:
    """End the call with the status of an error. An unexpected error is logged; the client gets no details."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, SkydraftError):
        log.exception("a request failed")
        error = CloudFailure("The server failed; its log says why.")
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
