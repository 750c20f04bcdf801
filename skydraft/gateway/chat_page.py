"""The files of the chat page, with headers that keep other sites from using them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

_FOLDER = Path(__file__).parent / "page"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def index(request: Request) -> Response:
    """The page itself."""
    return FileResponse(_FOLDER / "index.html", headers=_HEADERS)


class PageFiles(StaticFiles):
    """What the page loads."""

    def __init__(self) -> None:
        super().__init__(directory=_FOLDER)

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(_HEADERS)
        return response
