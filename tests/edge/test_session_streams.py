"""A session's stream meets what streams meet: cuts, silence, another server. No token is the worse."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest

import skydraft
from skydraft import make_plan
from skydraft.edge.channel import Awaited, Channel, SessionStream, Waiting, shared_loop
from skydraft.edge.tls import ServerOptions
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudLost, CloudTimeout, SessionNotFound
from skydraft.protocol import codec
from skydraft.protocol.values import OpenCall, Opening
from skydraft.types import Prompt

from ..serving import PATIENCE_S, Serving, serving, waiting
from .texts import ALONE, GATED, LOSSLESS, begin


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(open_toy("toy"), session_ttl_s=600.0) as running:
        yield running


def test_one_generation_is_one_stream(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, sound = list[str](), Channel.stream
    monkeypatch.setattr(Channel, "stream", lambda self, trace: opened.append(trace) or sound(self, trace))
    cloud = skydraft.connect(server.address, require=True)
    for number, plan in enumerate((LOSSLESS, GATED, ALONE, make_plan()), 1):
        with begin(cloud, plan) as generation:
            generation.run()
        assert len(opened) == number
    cloud.close()
    server.wait_until(lambda: server.num_sessions == 0)
    assert len(opened) == 4  # it ended in its stream


class Slow:
    """`engine` waits with each forward until it may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.engine = waiting(open_toy("toy"), lambda: self.may_go_on.wait(PATIENCE_S))


def asked_slowly(address: str, times: Waiting) -> tuple[Channel, Awaited[bytes]]:
    """A stream in which a session is opened; its answer is waited for on the event loop."""
    channel = Channel(ServerOptions(address))
    opening = Opening(codec.short_fingerprint(open_toy("toy").vocab.fingerprint), Prompt((1, 2, 3)))

    async def ask() -> bytes:
        stream = channel.stream("")
        message = codec.encode_open(OpenCall(1, 0, opening))
        try:
            return await stream.receive(times, message)
        except CloudLost:
            assert stream.is_over
            raise
        finally:
            await channel.close()

    return channel, shared_loop().begin(ask())


def test_a_slow_answer_is_waited_for_while_the_server_shows_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    pings, sound = list[float](), Channel.ping

    async def ping(self: Channel, timeout_s: float) -> float:
        pings.append(await sound(self, timeout_s))
        if len(pings) == 2:
            slow.may_go_on.set()
        return pings[-1]

    monkeypatch.setattr(Channel, "ping", ping)
    with serving(slow.engine) as server:
        _, pending = asked_slowly(server.address, Waiting(PATIENCE_S, 0.05, PATIENCE_S))
        assert codec.decode_opened(pending.result()).base == 0
    assert len(pings) >= 2


@pytest.mark.parametrize("is_there", [True, False])
def test_an_answer_that_never_comes_breaks_the_stream_in_time(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(self: Channel, timeout_s: float) -> float:
        raise CloudLost("no sign of life.")

    slow = Slow()
    if not is_there:
        monkeypatch.setattr(Channel, "ping", nobody)
    with serving(slow.engine) as server:
        began = time.monotonic()
        _, pending = asked_slowly(server.address, Waiting(0.5 if is_there else PATIENCE_S, 0.1, PATIENCE_S))
        with pytest.raises(CloudTimeout if is_there else CloudLost, match="in time" if is_there else "sign of life"):
            pending.result()
        assert time.monotonic() - began < PATIENCE_S / 3
        slow.may_go_on.set()


def test_a_status_that_grpc_replaced_by_an_error_of_its_own_is_a_lost_stream() -> None:
    """No failure of the server: the text opens another stream, where it hears why, for example a revoked token."""

    class Replaced:
        async def write(self, message: bytes) -> None:
            await self.read()

        async def read(self) -> bytes:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.INTERNAL, nothing, nothing, "Internal error from Core", "Failed 'execute_batch'"
            )

    async def receive() -> bytes:
        stream = SessionStream(Channel(ServerOptions("127.0.0.1:9")), cast("Any", None), Replaced())
        return await stream.receive(Waiting(9.0, 9.0, 9.0), b"a message")

    with pytest.raises(SessionNotFound, match="ended early"):
        asyncio.run(receive())
