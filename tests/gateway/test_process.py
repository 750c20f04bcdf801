"""The gateway as a process: it listens before its models are loaded, few modules answer, the page is its own."""

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from skydraft.config import DecodingParams
from skydraft.decoding.loop import SpeculativeLoop
from skydraft.errors import EngineError, OptionError
from skydraft.gateway import app
from skydraft.gateway.app import Gateway, GatewayOptions
from skydraft.gateway.requests import Defaults
from skydraft.gateway.server import ListenOptions, listen, serve

from ..serving import PATIENCE_S
from ..test_imports import walk
from .running import toy_pair


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with listen(ListenOptions()) as listening:
        yield listening


def url(listening: socket.socket) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def starting(listening: socket.socket, first: Callable[[], object], then: Callable[[], object]) -> None:
    """Start a gateway: one thing is done while its models load, one when it is ready; then it is stopped."""
    ended = list[Future[None]]()

    def load() -> Gateway:
        first()
        return Gateway(toy_pair(), Defaults(DecodingParams()), GatewayOptions())

    def last() -> None:
        try:
            then()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        serve(load, ListenOptions(), listening, lambda gateway, port: ended.append(pool.submit(last)))
    ended[0].result()


def said(connection: socket.socket) -> bytes:
    """What is answered on a connection that asks for the gateway's health."""
    connection.settimeout(PATIENCE_S)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while b"}" not in answer:
        answer += connection.recv(65536)
    return answer


def test_while_models_load_all_is_answered_and_who_connected_is_served_then(listening: socket.socket) -> None:
    with socket.socket() as silent, socket.socket() as asking:

        def loading() -> None:
            health = httpx.get(f"{url(listening)}/health")
            assert (health.status_code, health.json()) == (503, {"status": "starting"})
            for answer in (
                httpx.post(f"{url(listening)}/v1/chat/completions", json={"messages": ["a" * 100_000]}),
                httpx.get(f"{url(listening)}/v1/models"), httpx.options(f"{url(listening)}/v1/models"),
            ):  # fmt: skip
                assert answer.status_code == 503 and answer.headers["Retry-After"] == answer.headers["Refresh"] == "2"
                assert answer.json()["error"]["message"] == "The gateway is starting: its models load."
            for connection in (silent, asking):
                connection.connect(listening.getsockname())
            assert b"503" in said(asking).splitlines()[0]

        def ready() -> None:
            for connection in (asking, silent):
                assert b"200" in said(connection).splitlines()[0]

        starting(listening, loading, ready)


def test_the_port_is_refused_before_a_model_is_loaded(listening: socket.socket) -> None:
    with pytest.raises(OptionError, match=r"Cannot listen on .*: Address already in use"):
        listen(ListenOptions(port=listening.getsockname()[1]))


@pytest.mark.parametrize("error", [EngineError("no such model"), KeyboardInterrupt(), None])
def test_models_that_do_not_load_and_signals_end_it(listening: socket.socket, error: BaseException | None) -> None:
    def fail() -> Any:
        if error is not None:
            raise error
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(type(error) if error else KeyboardInterrupt):
        serve(fail, ListenOptions(), listening, lambda gateway, port: None)
    assert not [thread for thread in threading.enumerate() if thread.name == "serving"]


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


PAGE = Path(app.__file__).parent / "page"
OWN = {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir() if path.is_file()}
ENGLISH, CHINESE = (json.loads((PAGE / f"words/{name}.json").read_text(encoding="utf-8")) for name in ("en", "zh"))
# Keys that are put together: the page shows an unknown name as it is.
FAMILIES = ("link", "mode", "about", "figure", "outcome", "origin", "meaning", "reason")


def test_both_languages_have_the_words_that_the_page_uses_and_no_others() -> None:
    assert list(ENGLISH) == list(CHINESE)
    for key, english in ENGLISH.items():
        assert english and CHINESE[key]
        assert set(re.findall(r"\{\w+\}", english)) == set(re.findall(r"\{\w+\}", CHINESE[key])), key
    source = "".join(OWN.values())
    marked = set(re.findall(r'data-word(?:-\w+)?="([^"]+)"', OWN["index.html"]))
    said = set(re.findall(r"(?:(?:say|announce|note)\(|worded\([^']*?, )'([\w.-]+)'", source))
    plain = {key for key in ENGLISH if key.split(".")[0] not in FAMILIES or "." not in key}
    assert marked and said and marked | said <= ENGLISH.keys()
    assert {key for key in plain if not re.search(rf"""['"`]{re.escape(key)}['"`]""", source)} == set()


def test_nothing_of_the_page_comes_from_elsewhere() -> None:
    for name, text in OWN.items():
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), name
        assert not re.search(r"innerHTML|outerHTML|AdjacentHTML|\beval\(|new Function|document\.write", text), name
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", OWN["index.html"])


def test_the_files_of_other_projects_are_those_that_were_published() -> None:
    lines = (PAGE / "vendor/VERSIONS").read_text(encoding="utf-8").splitlines()
    named = [line.split() for line in lines if not line.startswith("#")]
    held = {path.name for path in (PAGE / "vendor").iterdir()}
    assert held == {"VERSIONS"} | {name for file, *_ in named for name in (file, f"{file.split('.')[0]}.LICENSE")}
    for file, *_, sha256 in named:
        assert hashlib.sha256((PAGE / "vendor" / file).read_bytes()).hexdigest() == sha256, file
