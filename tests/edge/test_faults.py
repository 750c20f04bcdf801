"""Faults of links and servers, with real sockets and a real process: nothing lost, nothing doubled, nobody stuck."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, cast

import grpc
import pytest

import skydraft
from bench.emulated_link import EmulatedLink, LinkShape
from skydraft import make_plan
from skydraft.access.limits import Limits
from skydraft.cloud.server import ServeOptions
from skydraft.cloud.worker import Worker
from skydraft.edge.channel import Channel, SessionStream, Waiting
from skydraft.edge.tls import ServerOptions
from skydraft.engines.toy import open_toy
from skydraft.errors import SessionNotFound

from ..serving import PATIENCE_S, Serving, free_port, serving
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


def written(server: Serving, plan: Any) -> tuple[int, ...]:
    with closing(skydraft.connect(server.address, require=True)) as cloud:
        return begin(cloud, plan).run().token_ids


def test_four_clients_on_two_seats_evict_each_other_and_lose_nothing() -> None:
    with serving(open_toy("toy"), max_sessions=2, metrics_port=free_port()) as server, ThreadPoolExecutor(4) as pool:
        plans = (LOSSLESS, GATED, LOSSLESS, GATED)
        for plan, done in [(plan, pool.submit(written, server, plan)) for plan in plans]:
            assert done.result(2 * PATIENCE_S) == undisturbed(plan)
        server.wait_until(lambda: server.metric("sessions_evicted") > 4)
        assert server.num_sessions <= 2


def test_a_session_that_expired_is_opened_again() -> None:
    ahead_s, limits = 0.0, Limits(session_ttl_s=600.0)
    worker = Worker(open_toy("toy"), limits, clock=lambda: time.perf_counter() + ahead_s)
    server = Serving(worker, ServeOptions(port=0, limits=limits, metrics_port=free_port()))
    try:
        with closing(skydraft.connect(server.address)) as cloud:
            generation = begin(cloud)
            for number, _ in enumerate(generation.rounds()):
                if number in (3, 8):
                    ahead_s += 601
                    server.wait_until(lambda: server.num_sessions == 0)
        assert generation.token_ids == undisturbed()
        server.wait_until(lambda: server.metric("sessions_expired") >= 2)
        assert server.metric("sessions_expired") == 2
    finally:
        server.stop()


def test_one_generation_is_one_stream(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, sound, server = list[str](), Channel.stream, start(session_ttl_s=600.0)
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
