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
from bench.emulated_link import EmulatedLink
from skydraft import DecodingParams, Generation, make_plan
from skydraft.edge.channel import Awaited, Channel, SessionStream, Waiting, shared_loop
from skydraft.edge.tls import ServerOptions
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudLost, CloudTimeout, SessionNotFound
from skydraft.protocol import codec
from skydraft.protocol.values import OpenCall, Opening
from skydraft.types import Prompt

from ..serving import PATIENCE_S, Serving, serving

PARAMS = DecodingParams(max_new_tokens=60, min_new_tokens=60, temperature=0.8, seed=5)
LOSSLESS = make_plan("lossless", k=4)
GATED = make_plan(gate="entropy:0.3", k=4)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(open_toy("toy"), session_ttl_s=600.0) as running:
        yield running


def begin(cloud: Any, plan: Any = LOSSLESS) -> Generation:
    return skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, plan=plan, params=PARAMS)


@pytest.fixture(scope="module")
def expected() -> dict[Any, tuple[int, ...]]:
    """What one process writes, by plan."""
    return {plan: begin(open_toy("toy"), plan).run().token_ids for plan in (LOSSLESS, GATED)}


def test_a_server_that_says_goaway_is_followed_by_another(expected: dict[Any, tuple[int, ...]]) -> None:
    with (
        serving(open_toy("toy")) as first,
        serving(open_toy("toy")) as second,
        EmulatedLink(("127.0.0.1", first.port)) as link,
    ):
        cloud = skydraft.connect(link.address)
        generation = begin(cloud)
        for number, _ in enumerate(generation.rounds()):
            if number == 4:
                link.retarget(("127.0.0.1", second.port))
                first.stop(PATIENCE_S)  # GOAWAY, and the idle stream ends
        assert generation.token_ids == expected[LOSSLESS]
        assert link.num_connections == 2
        cloud.close()


def test_one_generation_is_one_stream(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, sound = list[str](), Channel.stream
    monkeypatch.setattr(Channel, "stream", lambda self, trace: opened.append(trace) or sound(self, trace))
    cloud = skydraft.connect(server.address, require=True)
    for number, plan in enumerate((LOSSLESS, GATED, make_plan("cloud"), make_plan()), 1):
        with begin(cloud, plan) as generation:
            generation.run()
        assert len(opened) == number
    cloud.close()
    server.wait_until(lambda: server.num_sessions == 0)
    assert len(opened) == 4  # it ended in its stream


class Slow:
    """An engine whose forwards wait until they may go on."""

    def __init__(self) -> None:
        self.engine = open_toy("toy")
        self.may_go_on = threading.Event()
        sound = self.engine.forward

        def forward(feeds: Any, *, want_logits: bool) -> Any:
            self.may_go_on.wait(PATIENCE_S)
            return sound(feeds, want_logits=want_logits)

        self.engine.forward = forward  # type: ignore[method-assign]


def asked_slowly(address: str, waiting: Waiting) -> tuple[Channel, Awaited[bytes]]:
    """A stream in which a session is opened; its answer is waited for on the event loop."""
    channel = Channel(ServerOptions(address))
    opening = Opening(codec.short_fingerprint(open_toy("toy").vocab.fingerprint), Prompt((1, 2, 3)))

    async def ask() -> bytes:
        stream = channel.stream("")
        message = codec.encode_open(OpenCall(1, 0, opening))
        try:
            return await stream.receive(waiting, message)
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
