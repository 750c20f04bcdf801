"""Clients of the gateway that take and do not read, and keys that would have it for themselves."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import pytest

from skydraft import api
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import TargetChanged
from skydraft.gateway import connections
from skydraft.gateway.desk import Desk
from skydraft.gateway.refusals import Refusal
from skydraft.prompts.messages import asked

from ..gateway.running import Running, gateway, toy_pair
from ..serving import PATIENCE_S


def test_a_client_that_reads_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page needs no key: 512 connections that ask for it and never read would have been all there are, for ever."""
    monkeypatch.setattr(connections, "_UNREAD_S", 0.5)
    with gateway() as running, socket.socket() as greedy:
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        greedy.connect(("127.0.0.1", running.port))
        greedy.settimeout(PATIENCE_S)
        with pytest.raises(ConnectionError):  # the other end is gone, not only full
            for _ in range(1_000_000):
                greedy.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)


def test_a_text_that_fits_no_context_is_refused_before_each_choice_reads_it(served: Running) -> None:
    """Sixteen million characters and four choices took 700 MB and seven seconds of everybody's."""
    began = time.process_time()
    reply = served.chat("a" * (4 << 20), model="skydraft-edge", n=4)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
    assert time.process_time() - began < 1


REQUEST = GenerateRequest(asked("a"))


@asynccontextmanager
async def desk_that_runs(run: Callable[[Any], None], *limits: int) -> AsyncIterator[Desk]:
    """A desk that answers by `run`; at the end it has answered everything."""
    desk = Desk(toy_pair(), *limits, has_keys=True)
    desk._run = run  # type: ignore[method-assign, assignment]
    yield desk
    while desk.num_running:
        await asyncio.sleep(0.01)
    desk.close()


def test_one_key_leaves_places_and_turns_to_the_others() -> None:
    async def hogged() -> tuple[int, list[str]]:
        began: list[str] = []
        async with desk_that_runs(lambda ticket: began.append(ticket.label), 1, 31) as desk:
            num_taken = 0
            with pytest.raises(Refusal):
                for _ in range(9):
                    desk.submit([REQUEST] * 4, "eve")
                    num_taken += 4
            desk.submit([REQUEST] * 8, "ann")
        return num_taken, began

    num_taken, began = asyncio.run(hogged())
    assert num_taken <= 20
    assert sorted(began) == ["ann"] * 8 + ["eve"] * num_taken


def test_answers_of_one_key_that_never_end_leave_a_place_for_another() -> None:
    never, begun = threading.Event(), list[str]()

    def run(ticket: Any) -> None:
        begun.append(ticket.label)
        if ticket.label == "eve":
            never.wait(30)

    async def order() -> int:
        async with desk_that_runs(run, 3, 30) as desk:
            desk.submit([REQUEST] * 8, "eve")
            while len(begun) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # for one more, if it may begin
            num_of_one = len(begun)
            for _ in range(5):
                desk.submit([REQUEST], "ann")
                while desk.num_running > 2:
                    await asyncio.sleep(0.01)
            never.set()
        return num_of_one

    assert asyncio.run(order()) == 2
    assert begun[:7] == ["eve"] * 2 + ["ann"] * 5 and begun.count("eve") == 8


@pytest.mark.parametrize("depth", [100, 990, 50_000])
@pytest.mark.parametrize("inner", ['"\\u0041"', "1"])
def test_depth_is_no_failure_of_the_gateway(served: Running, depth: int, inner: str) -> None:
    deep = '{"a":' * depth + inner + "}" * depth
    asks = '{"model":"skydraft-edge","max_tokens":2,"messages":[{"role":"user","content":"x"}],"tools":[' + deep + "]}"
    reply = httpx.post(f"{served.v1}/chat/completions", content=asks, timeout=30)
    assert reply.status_code in (200, 400) and served.chat().status_code == 200


def test_servers_that_differ_are_an_error_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(*_: object) -> bool:
        raise TargetChanged("One of the servers runs another model.")

    monkeypatch.setattr(api, "is_calibrated", differ)
    with gateway() as running:
        for reply in (httpx.get(f"{running.v1}/models"), running.chat(model="skydraft")):
            assert reply.status_code == 503 and "another model" in reply.json()["error"]["message"]
        assert httpx.get(f"{running.url}/health").status_code == running.chat().status_code == 200
