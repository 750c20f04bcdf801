"""Faults of links and servers, with real sockets and a real process: nothing lost, nothing doubled, nobody stuck."""

import asyncio
from contextlib import closing
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import grpc
import pytest

import skydraft
from bench.emulated_link import EmulatedLink, LinkShape
from skydraft import make_plan
from skydraft.edge.channel import Channel, SessionStream, Waiting
from skydraft.edge.tls import ServerOptions
from skydraft.engines.toy import open_toy
from skydraft.errors import SessionNotFound

from ..serving import serving
from .texts import ALONE, GATED, LOSSLESS, PLANS, Start, begin, undisturbed


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ten_percent_of_chunks_cut_the_connection(seed: int) -> None:
    with (
        serving(open_toy("toy")) as server,
        EmulatedLink(("127.0.0.1", server.port), LinkShape(cut_rate=0.1, seed=seed)) as link,
        closing(skydraft.connect(link.address, require=True)) as cloud,
    ):
        for plan in PLANS.values():
            num_cut = link.num_cut
            assert begin(cloud, plan).run().token_ids == undisturbed(plan)
            assert link.num_cut > num_cut or not plan.drafts


def test_one_generation_is_one_stream(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, sound, server = list[Channel](), Channel.stream, start(session_ttl_s=600.0)
    monkeypatch.setattr(Channel, "stream", lambda self: opened.append(self) or sound(self))
    with closing(skydraft.connect(server.address, require=True)) as cloud:
        for number, plan in enumerate((LOSSLESS, GATED, ALONE, make_plan()), 1):
            with begin(cloud, plan) as generation:
                generation.run()
            assert len(opened) == number
    server.wait_until(lambda: server.num_sessions == 0)
    assert len(opened) == 4  # it ended in its stream


def test_a_status_that_grpc_replaced_by_an_error_of_its_own_is_a_lost_stream() -> None:
    """No failure of the server: the text opens another stream, where it hears why, for example a revoked token."""
    status, nothing = grpc.StatusCode.INTERNAL, grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(status, nothing, nothing, "Internal error from Core", "Failed 'execute_batch'")
    replaced: Any = Mock(write=AsyncMock(side_effect=error), read=AsyncMock(side_effect=error))

    async def receive() -> bytes:
        stream = SessionStream(Channel(ServerOptions("127.0.0.1:9")), cast("Any", None), replaced)
        return await stream.receive(Waiting(9.0, 9.0, 9.0), b"a message")

    with pytest.raises(SessionNotFound, match="ended early"):
        asyncio.run(receive())
