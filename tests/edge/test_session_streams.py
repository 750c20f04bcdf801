"""A session's stream meets what streams meet: cuts, silence, another server. No token is the worse."""

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest

import skydraft
from skydraft import make_plan
from skydraft.edge.channel import Channel, SessionStream, Waiting
from skydraft.edge.tls import ServerOptions
from skydraft.engines.toy import open_toy
from skydraft.errors import SessionNotFound

from ..serving import Serving, serving
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
