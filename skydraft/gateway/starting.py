"""What the gateway answers while its models load: 503, and where to look again."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

_PATIENCE_S = 0.5  # for a client to send its request; others wait meanwhile
_ERROR = {"message": "The gateway is starting: its models load.", "type": "server_error", "code": "starting"}


@contextmanager
def starting(listening: socket.socket, *, encrypted: bool) -> Iterator[None]:
    """Answer on a listening socket within the block. Clients of an encrypted one wait instead."""
    if encrypted:
        yield
        return
    server = HTTPServer(("", 0), _Starting, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="starting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


class _Starting(BaseHTTPRequestHandler):
    timeout = _PATIENCE_S

    def _answer(self) -> None:
        is_health = self.path == "/health"
        body = json.dumps({"status": "starting"} if is_health else {"error": _ERROR}).encode()
        self.send_response(503)
        for name, value in (
            ("Content-Type", "application/json"), ("Content-Length", str(len(body))),
            ("Retry-After", "2"), ("Connection", "close"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_OPTIONS = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""

    def version_string(self) -> str:
        return "skydraft"
