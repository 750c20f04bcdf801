"""What the gateway answers while its models load: 503, and where to look again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from skydraft.gateway.app import Gateway

_ERROR = {"message": "The gateway is starting: its models load.", "type": "server_error", "code": "starting"}


class Entrance:
    """An ASGI application that leads to `gateway`, once it is there."""

    def __init__(self, gateway: Gateway | None = None) -> None:
        self.gateway = gateway

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        app = self.gateway.app if self.gateway else _starting
        await app(scope, receive, send)


async def _starting(scope: Any, receive: Any, send: Any) -> None:
    said = {"status": "starting"} if scope["path"] == "/health" else {"error": _ERROR}
    await JSONResponse(said, 503, {"Retry-After": "2"})(scope, receive, send)
