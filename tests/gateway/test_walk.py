"""The modules that a chat completion enters, from its route to the JSON answer, besides those of decoding rounds."""

import asyncio
import sys
import threading
from typing import Any

import httpx2 as httpx

from skydraft.config import DecodingParams
from skydraft.decoding.loop import SpeculativeLoop
from skydraft.gateway.app import Gateway, GatewayOptions
from skydraft.gateway.requests import Defaults

from ..test_walks import walk
from .running import toy_pair


class Tracer:
    """Modules of the package that were entered, apart for rounds and for all else; of any thread."""

    def __init__(self) -> None:
        self.in_rounds: set[str] = set()
        self.beside: set[str] = set()
        self._where = threading.local()

    def __call__(self, frame: Any, event: str, arg: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code is SpeculativeLoop.rounds.__code__ and event in ("call", "return"):
            self._where.is_round = event == "call"  # a generator is called for each round, and returns with it
        elif event == "call" and name.startswith("skydraft."):
            is_round = getattr(self._where, "is_round", False)
            (self.in_rounds if is_round else self.beside).add(name.removeprefix("skydraft."))


async def complete(gateway: Gateway) -> None:
    message, gate = {"role": "user", "content": "语速"}, {"gate": "entropy:3.25+start"}  # of two nats toys are unsure
    body = {"model": "skydraft-quality", "messages": [message], "max_tokens": 40, "skydraft": gate}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway.app), base_url="http://localhost") as client:
        reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200 and {"accepted", "skipped"} <= set(reply.json()["skydraft"]["origins"])


def test_a_chat_completion_walks_through_few_modules() -> None:
    tracer, gateway = Tracer(), Gateway(toy_pair(), Defaults(DecodingParams()), GatewayOptions())
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        asyncio.run(complete(gateway))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gateway.close()
    assert tracer.beside - tracer.in_rounds == walk("One chat completion")
