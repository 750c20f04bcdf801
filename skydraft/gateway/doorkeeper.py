"""Check keys, origins and body sizes, before any other handling of a request."""

import re
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeAlias

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from skydraft.access.shares import Shares
from skydraft.errors import NotAuthorized, within
from skydraft.gateway.refusals import RETRY_AFTER_S, Refusal
from skydraft.protocol.address import is_loopback

# Returns the label of an Authorization header; raises NotAuthorized.
Authorize: TypeAlias = Callable[[str], str]
_MEMORY = 256 * 1024 * 1024  # bytes of bodies and recordings
_LONG_BODY = 64 * 1024
_CLOSED = ("/v1/", "/metrics")


@dataclass(slots=True)
class Visit:
    """One HTTP request: the label of its client's key ("local" without keys), its body, its part of the `memory`.

    `at_end` is closed when the request ends, even after an error.
    """

    label: str
    memory: Shares
    at_end: ExitStack
    body: bytearray = field(default_factory=bytearray)
    num_taken: int = 0  # bytes

    @property
    def is_long(self) -> bool:
        """Whether parsing the body would block the event loop for too long."""
        return len(self.body) > _LONG_BODY

    def take(self, num_bytes: int) -> None:
        """Count bytes until the request ends. Raises Refusal if there is no room for them."""
        if not self.memory.may_take(self.label, num_bytes):
            raise Refusal(503, "Too many long requests at once.", code="busy", retry_after_s=RETRY_AFTER_S)
        self.memory.take(self.label, num_bytes)
        self.num_taken += num_bytes


class Doorkeeper:
    """ASGI middleware that puts a Visit into the request's state.

    The page and /health need no key. The whole body is read here, so that a slow or endless body occupies nothing else.
    A limit on memory holds for all bodies and decoded recordings together, with a share for each key.
    """

    def __init__(
        self, app: ASGIApp, authorize: Authorize | None, origins: Collection[str], max_body_bytes: int, body_s: float
    ) -> None:
        self._app, self._authorize, self._origins = app, authorize, origins
        self._max_body_bytes, self._body_s = max_body_bytes, body_s
        self._memory = Shares(_MEMORY, apart=authorize is not None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with ExitStack() as at_end:
                visit = Visit(self._label(scope), self._memory, at_end)
                at_end.callback(lambda: self._memory.give_back(visit.label, visit.num_taken))
                # Paths that need no key accept no body: a client without a key must not fill the memory.
                if _needs_key(scope):
                    await self._read(visit, scope, receive)
                scope.setdefault("state", {})["visit"] = visit
                await self._app(scope, receive, send)
        except Refusal as refusal:
            headers = {**refusal.headers, "Connection": "close"}
            await JSONResponse(refusal.body, refusal.status, headers)(scope, receive, send)

    def _label(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        self._check_headers(headers)
        if self._authorize is None or not _needs_key(scope):
            return "local"
        given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
        try:
            return self._authorize(given)
        except NotAuthorized as error:
            message = "Give a valid API key, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            raise Refusal(401, message, code="invalid_api_key") from error

    def _check_headers(self, headers: Headers) -> None:
        """Raise Refusal for ambiguous lengths, and for requests from another site's page in the user's browser.

        Such a page has another origin, or a host name that points to this machine (DNS rebinding).
        """
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may use the other one
            raise Refusal(400, "Give Content-Length or Transfer-Encoding, not both.")
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if self._authorize is None and not is_loopback(re.sub(r"\.?(:\d*)?$", "", host.lower())):  # without the port
            message = "Without API keys the gateway answers only to http://localhost. Others need --api-key-file."
            raise Refusal(403, message, code="wrong_host")
        if origin and origin not in self._origins and origin.partition("://")[2] != host:
            raise Refusal(403, "Pages of this origin may not use the gateway.", code="wrong_origin")

    async def _read(self, visit: Visit, scope: Scope, receive: Receive) -> None:
        """Read the body. Raises Refusal if it is too long or too slow."""
        length = Headers(scope=scope).get("content-length", "0")
        self._check_length(int(length) if length.isdecimal() else 0)
        late = Refusal(408, f"The body did not come within {self._body_s:g} s.")
        try:
            async with within(self._body_s, late):
                async for part in Request(scope, receive).stream():
                    visit.take(len(part))
                    visit.body += part
                    self._check_length(len(visit.body))
        except ClientDisconnect as error:
            raise Refusal(400, "The client disconnected.") from error

    def _check_length(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise Refusal(413, f"A body may have at most {self._max_body_bytes} bytes.", code="body_too_long")


def _needs_key(scope: Scope) -> bool:
    return str(scope["path"]).startswith(_CLOSED) and scope["method"] != "OPTIONS"
