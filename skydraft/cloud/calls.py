"""The calls of a server: which methods there are, and how a call ends with an error."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import grpc

from skydraft.cloud import log
from skydraft.errors import CloudFailure, SkydraftError
from skydraft.protocol.status import to_status
from skydraft.protocol.values import GET_INFO, HEALTH, SERVICE, SESSION

RpcContext: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]
Method: TypeAlias = Callable[[Any, RpcContext], Awaitable[None]]  # takes the requests and the call
Count: TypeAlias = Callable[[str, Exception | None], None]  # notes a request of a kind, and what refused it


class _Handler:
    """A grpc.RpcMethodHandler for streams of bytes, whose method may be exchanged."""

    request_streaming = response_streaming = True
    request_deserializer = response_serializer = None

    def __init__(self, method: Method) -> None:
        self.stream_stream = method


class Calls(grpc.GenericRpcHandler):
    """The calls of a server, by the paths of its methods; until it has some, each is told that the model loads. gRPC
    keeps the calls that nobody has looked at yet apart by these paths: floods of one method delay no other."""

    def __init__(self) -> None:
        self._handlers = {path: _Handler(self._refuse) for path in (SESSION, GET_INFO, HEALTH)}
        self._has_methods = False
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)

    def add(self, methods: Mapping[str, Method]) -> None:
        self._has_methods = True
        for path, method in methods.items():
            self._handlers[path].stream_stream = method

    def answer_at(self, server: Any) -> None:
        """Has to be called before the server starts."""
        server.add_generic_rpc_handlers((self,))
        for path, handler in self._handlers.items():
            name, _, method = path[1:].partition("/")
            server.add_registered_method_handlers(name, {method: handler})

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method, _Handler(self._refuse))

    async def _refuse(self, requests: Any, context: RpcContext) -> None:
        if self._has_methods:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"There is no such method, only {SERVICE}.")
        await context.abort(grpc.StatusCode.UNAVAILABLE, "The server is starting: its model loads.")


def _is_news(record: logging.LogRecord) -> bool:
    """False for what gRPC logs when a client leaves just before the last status of its call is sent."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


def authorization(context: RpcContext) -> str:
    return str(dict(context.invocation_metadata() or ()).get("authorization", ""))


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
