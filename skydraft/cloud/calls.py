"""The calls of a server: which methods there are, and how a call ends with an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import grpc

from skydraft.errors import CloudFailure, SkydraftError
from skydraft.protocol.status import to_status
from skydraft.protocol.values import SERVICE

log = logging.getLogger("skydraft.cloud")
RpcContext: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]
Method: TypeAlias = Callable[[Any, RpcContext], Awaitable[None]]  # takes the requests and the call
Count: TypeAlias = Callable[[str, Exception | None], None]  # notes a request of a kind, and what refused it


class Calls(grpc.GenericRpcHandler):
    """The calls of a server, by the paths of its methods; until it has some, each is told that the model loads."""

    def __init__(self) -> None:
        self._methods: dict[str, Any] = {}
        self._other: Any = grpc.stream_stream_rpc_method_handler(self._refuse)
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)

    def add(self, methods: Mapping[str, Method]) -> None:
        for path, method in methods.items():
            self._methods[path] = grpc.stream_stream_rpc_method_handler(method)

    def service(self, handler_call_details: Any) -> Any:
        return self._methods.get(handler_call_details.method, self._other)

    async def _refuse(self, requests: Any, context: RpcContext) -> None:
        if self._methods:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"There is no such method, only {SERVICE}.")
        await context.abort(grpc.StatusCode.UNAVAILABLE, "The server is starting: its model loads.")


def _is_news(record: logging.LogRecord) -> bool:
    """False for what gRPC logs when a client leaves just before the last status of its call is sent."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


def said(context: RpcContext, name: str) -> str:
    return str(dict(context.invocation_metadata() or ()).get(name, ""))


async def abort(context: RpcContext, error: Exception) -> None:
    """End the call with the status of an error. An unexpected error is logged; the client gets no details."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):  # the client has left: there is nobody to send a status to
        raise asyncio.CancelledError
    if not isinstance(error, SkydraftError):
        log.exception("a request failed")
        error = CloudFailure("The server failed; its log says why.")
    status = to_status(error)
    with suppress(grpc.aio.InternalError):  # it leaves now
        await context.abort(status.code, status.details, status.trailing_metadata)
