"""A gateway in this process, on a free port of loopback, over a toy pair."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx2 as httpx
import uvicorn

from skydraft.config import DecodingParams
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.gateway.app import Gateway, GatewayOptions
from skydraft.gateway.doorkeeper import Authorize
from skydraft.gateway.pair import Pair
from skydraft.gateway.requests import Defaults
from skydraft.gateway.server import Entrance, ListenOptions, listen, server_of

from ..serving import PATIENCE_S as PATIENCE_S
from ..serving import Serving


class Running:
    def __init__(self, gateway: Gateway, url: str, server: uvicorn.Server) -> None:
        self.gateway = gateway
        self.server = server
        self.url = url
        self.v1 = f"{url}/v1"
        self.port = int(url.rpartition(":")[2])
        # Certificates, which nobody asks for here, take longer to read than most answers to come.
        self.client = httpx.Client(
            timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0), verify=False, trust_env=False
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(f"{self.v1}/{path}", json=body)

    def chat(self, content: Any = "语速", *, timeout_s: float = PATIENCE_S, **body: Any) -> httpx.Response:
        """One request, not streamed unless it says so."""
        messages = content if isinstance(content, list) and "role" in content[0] else None
        messages = messages or [{"role": "user", "content": content}]
        given = {"model": "skydraft-lossless", "messages": messages, "max_tokens": 16} | body
        return self.client.post(f"{self.v1}/chat/completions", json=given, timeout=timeout_s)

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: not self.gateway.desk.num_running and not self.gateway.desk.num_waiting)

    wait_until = staticmethod(Serving.wait_until)


def toy_pair(max_sequences: int = 6) -> Pair:
    return Pair(open_toy("toy:drift=0.2", 4096, max_sequences), open_toy("toy", 4096, max_sequences))


@contextmanager
def written_by(template: str) -> Iterator[Running]:
    """A gateway over toys with another chat template."""
    pair = toy_pair(2)
    for engine in (pair.edge, pair.cloud):
        engine.vocab.chat_template = template  # type: ignore[union-attr]
    with gateway(pair) as running:
        yield running


@contextmanager
def over(cloud: Cloud, draft: Engine | None = None, **options: Any) -> Iterator[Running]:
    """A gateway over a connection, which ends with it; `options` are those of `gateway`."""
    pair = Pair(draft or open_toy("toy:drift=0.2", 4096, 6), cloud)
    with closing(cloud), gateway(pair, **options) as running:
        yield running


@contextmanager
def gateway(
    pair: Pair | None = None, *, authorize: Authorize | None = None, defaults: Defaults | None = None, **options: Any
) -> Iterator[Running]:
    """Serve a pair; `options` are those of GatewayOptions."""
    made = Gateway(pair or toy_pair(), defaults or Defaults(DecodingParams()), GatewayOptions(**options), authorize)
    listening = listen(ListenOptions())
    server = server_of(Entrance(made), ListenOptions())
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    Running.wait_until(lambda: server.started or not thread.is_alive())
    running = Running(made, f"http://127.0.0.1:{listening.getsockname()[1]}", server)
    try:
        yield running
    finally:
        running.client.close()
        made.desk.stop()
        server.should_exit = True
        thread.join(PATIENCE_S)
        made.close()


def client(port: int, body: bytes, length: int = 0, path: str = "/v1/chat/completions") -> socket.socket:
    """One that has sent a request, or the beginning of one with this `length`."""
    made = socket.create_connection(("127.0.0.1", port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length or len(body)}\r\n\r\n"
    made.sendall(head.encode() + body)
    return made
