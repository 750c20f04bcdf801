"""Calls of one question and one answer: GetInfo, and gRPC's health check, which needs no token.

Anybody can begin such a call and send nothing, so each has a time limit, and nothing ever waits for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc

from skydraft.access.keys import Keyring
from skydraft.cloud.calls import Calls, Method, RpcContext, abort, said
from skydraft.cloud.worker import Worker
from skydraft.errors import CloudTimeout, NotAuthorized
from skydraft.protocol.codec import encode_info
from skydraft.protocol.values import SERVICE, ServerInfo

QUESTION_S = 10.0  # for a question and its answer
_LAST_WORDS_S = 0.2  # the same when the server ends
_HEALTH = "/grpc.health.v1.Health/Check"
# HealthCheckRequest with a service, "" for all; HealthCheckResponse with SERVING.
_NAMES = (b"", b"\n\0", b"\n" + bytes((len(SERVICE),)) + SERVICE.encode())
_SERVING = b"\x08\x01"


class Questions:
    """Answers questions about a server, as some of its `calls`."""

    def __init__(self, worker: Worker, info: Callable[[], ServerInfo], keyring: Keyring, calls: Calls) -> None:
        calls.add({f"/{SERVICE}/GetInfo": self._answering(self._get_info), _HEALTH: self._answering(self._check)})
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
        try:
            self._keyring.label(said(context, "authorization"))
        except NotAuthorized as error:
            self._worker.docket.count("info", error)
            raise
        self._worker.docket.count("info")
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
