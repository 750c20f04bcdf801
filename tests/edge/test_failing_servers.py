"""Servers and links that forget, cut, or are wrong about themselves cost no token. And what a server is asked and fed:
once, not for each text."""

import asyncio
import dataclasses
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest

import skydraft
from bench.emulated_link import EmulatedLink, LinkShape
from skydraft import DecodingParams, make_plan
from skydraft.edge.channel import Channel, shared_loop
from skydraft.edge.tls import ServerOptions
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudError, CloudFailure, SessionNotFound
from skydraft.protocol.codec import encode_info
from skydraft.protocol.values import HEALTH

from ..hostile.own import refuses
from ..serving import PATIENCE_S, Relay, Serving, serving, waiting
from .texts import ALONE, GATED, LOSSLESS, PLANS, Start, begin, undisturbed

AUTO = make_plan("lossless")


@pytest.fixture
def server() -> Iterator[Serving]:
    with serving(open_toy("toy")) as running:
        yield running


def write(cloud: Any, plan: Any = AUTO) -> tuple[int, ...]:
    return begin(cloud, plan).run().token_ids


def test_a_server_that_forgets_every_session_is_not_asked_without_a_pause(server: Serving) -> None:
    """Each opening feeds the whole prompt again."""
    alone = {"timeout_s": 1.5, "require": True}
    with Relay(server.address) as relay, closing(skydraft.connect(relay.address, **alone)) as cloud:
        relay.faults = repeat(refuses(SessionNotFound))
        with pytest.raises(CloudError):
            write(cloud, make_plan(k=5))
    assert 3 <= sum(name == "verify" for name, _ in relay.requests) <= 12


def test_nonsense_that_a_server_says_of_itself_is_its_failure(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    said = encode_info(dataclasses.replace(server.server.info(), max_sessions=0))
    sound = Channel.call

    async def call(self: Channel, path: str, timeout_s: float) -> bytes:
        return said if path.endswith("GetInfo") else await sound(self, path, timeout_s)

    monkeypatch.setattr(Channel, "call", call)
    with closing(skydraft.connect(server.address, timeout_s=1)) as cloud:
        for ask in (cloud.info, lambda: cloud.facts(None)):
            with pytest.raises(CloudFailure, match="invalid description"):
                ask()


def test_what_a_server_costs_is_asked_once(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    with Relay(server.address) as relay, closing(skydraft.connect(relay.address)) as cloud:

        def num_asked() -> int:
            return sum(name == "GetInfo" for name, _ in relay.requests)

        assert {write(cloud) for _ in range(3)} == {write(open_toy("toy"))} and num_asked() == 1  # who it is
        now = time.monotonic
        monkeypatch.setattr("skydraft.edge.cloud.time", SimpleNamespace(monotonic=lambda: now() + 3600))
        write(cloud)
        assert num_asked() == 1


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


SCRIPT = """
import time
import skydraft
from skydraft.engines.toy import open_toy
from tests.serving import serving

with serving(open_toy("toy"), session_ttl_s=1) as server:
    edge, cloud = skydraft.load("toy"), skydraft.connect(server.address, require=True)
    for _ in range(2):
        skydraft.generate("语速", edge=edge, cloud=cloud).run()
        time.sleep(3)
"""


def test_a_connection_that_was_idle_ends_without_a_line() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def counting(target: Engine, rows: list[int]) -> Engine:
    forward = target.forward

    def counted(feeds: Any, **options: Any) -> Any:
        feeds = list(feeds)
        rows.append(sum(len(feed) for _, feed in feeds))
        return forward(feeds, **options)

    target.forward = counted  # type: ignore[method-assign]
    return target


@pytest.mark.parametrize(("number", "context_len"), [(0, 4096), (1, 4096), (2, 650), (3, 300)])
def test_a_prompt_is_read_once_and_nothing_is_fed_twice(number: int, context_len: int) -> None:
    """A server spends the rows of the prompt and those of the tokens and of drafts that do not stand, none besides. A
    draft model whose context is shorter than the text, or than the prompt, drafts as far as it can."""
    rows = list[int]()
    prompt = "".join(random.Random(number).choices("今天气很好我们去公园走", k=320))
    params = DecodingParams(max_new_tokens=80, min_new_tokens=80, temperature=0.8, seed=number)
    given = {"edge": open_toy("toy:drift=0.2", context_len), "params": params, "raw": True}
    target = waiting(counting(open_toy("toy"), rows), lambda: time.sleep(0.004))
    with serving(target) as server, closing(skydraft.connect(server.address)) as cloud:
        generation = skydraft.generate(prompt, cloud=cloud, plan=make_plan("lossless"), **given).run()  # type: ignore[arg-type]
    assert generation.num_prompt_tokens >= 320
    assert generation.stats.num_accepted_tokens > 4 or context_len == 300
    assert sum(rows) == generation.num_prompt_tokens - 1 + sum(each.num_draft + 1 for each in generation.records)
    alone = skydraft.generate(prompt, cloud=open_toy("toy"), plan=make_plan("cloud"), **given).run()  # type: ignore[arg-type]
    assert generation.token_ids == alone.token_ids


def test_waiting_texts_share_one_ping(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    called, sound = list[str](), Channel.call

    async def call(self: Channel, path: str, timeout_s: float) -> bytes:
        called.append(path)
        return await sound(self, path, timeout_s)

    async def ping_all() -> None:
        channel = Channel(ServerOptions(server.address))
        await asyncio.gather(*(channel.ping(PATIENCE_S) for _ in range(50)))
        await channel.close()

    monkeypatch.setattr(Channel, "call", call)
    shared_loop().begin(ping_all()).result(PATIENCE_S)
    assert called == [HEALTH]
