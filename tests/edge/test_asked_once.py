"""What a server is asked and fed: once, not for each text, and not without a pause."""

import asyncio
import dataclasses
import random
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.edge.channel import shared_loop
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudError, CloudFailure, SessionNotFound
from skydraft.protocol.codec import decode_info, encode_info

from ..hostile.storms import refuses
from ..serving import PATIENCE_S, Relay, free_port, waiting
from .texts import ALONE, GATED, LOSSLESS, Start, begin, undisturbed

RACE = make_plan("lossless")


def num_asked(relay: Relay, name: str) -> int:
    return sum(each == name for each, _ in relay.requests)


def test_a_server_that_forgets_every_session_is_not_asked_without_a_pause(relay: Relay) -> None:
    """Each opening feeds the whole prompt again."""
    with closing(skydraft.connect(relay.address, timeout_s=1.5, require=True)) as cloud:
        relay.faults = repeat(refuses(SessionNotFound))
        with pytest.raises(CloudError):
            begin(cloud).run()
    assert 3 <= num_asked(relay, "verify") <= 12


def test_nonsense_that_a_server_says_of_itself_is_its_failure(relay: Relay) -> None:
    def without_a_place(replies: Iterator[bytes], context: Any) -> Iterator[bytes]:
        return (encode_info(dataclasses.replace(decode_info(each), max_sessions=0)) for each in replies)

    relay.silence = without_a_place
    with closing(skydraft.connect(relay.address, timeout_s=1)) as cloud:
        for ask in (cloud.info, lambda: cloud.facts(None)):
            with pytest.raises(CloudFailure, match="invalid description"):
                ask()


def test_what_a_server_costs_is_asked_once(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(skydraft.connect(relay.address)) as cloud:
        assert {begin(cloud, RACE).run().token_ids for _ in range(3)} == {undisturbed()}
        now = time.monotonic
        monkeypatch.setattr("skydraft.edge.cloud.time", SimpleNamespace(monotonic=lambda: now() + 3600))
        begin(cloud, RACE).run()
        assert num_asked(relay, "GetInfo") == 1  # who it is


def test_one_generation_is_one_stream_which_ends_its_session(start: Start) -> None:
    server = start(session_ttl_s=600.0, metrics_port=free_port())
    with closing(skydraft.connect(server.address, require=True)) as cloud:
        for plan in (LOSSLESS, GATED, ALONE, RACE):
            with begin(cloud, plan) as generation:
                generation.run()
        server.wait_until(lambda: server.num_sessions == 0)
        streams = {'{method="Session",outcome="ok"}': 4.0}
        server.wait_until(lambda: server.metrics("calls_total").items() >= streams.items())


def test_texts_that_wait_share_one_ping(relay: Relay) -> None:
    with closing(skydraft.connect(relay.address)) as cloud:
        (server,) = cloud.servers.all

        async def ping_all() -> None:
            await asyncio.gather(*(server.ping(PATIENCE_S) for _ in range(50)))

        shared_loop().begin(ping_all()).result(PATIENCE_S)
    assert num_asked(relay, "Check") == 1


def counting(target: Engine, rows: list[int]) -> Engine:
    forward = target.forward

    def counted(feeds: Any, **options: Any) -> Any:
        feeds = list(feeds)
        rows.append(sum(len(feed) for _, feed in feeds))
        return forward(feeds, **options)

    target.forward = counted  # type: ignore[method-assign]
    return target


@pytest.mark.parametrize(("number", "context_len"), [(0, 4096), (1, 4096), (2, 650), (3, 300)])
def test_a_prompt_is_read_once_and_nothing_is_fed_twice(start: Start, number: int, context_len: int) -> None:
    """A server spends the rows of the prompt and those of the tokens and of drafts that do not stand, none besides. A
    draft model whose context is shorter than the text, or than the prompt, drafts as far as it can."""
    rows = list[int]()
    prompt = "".join(random.Random(number).choices("今天气很好我们去公园走", k=320))
    params = DecodingParams(max_new_tokens=80, min_new_tokens=80, temperature=0.8, seed=number)
    given: Any = {"edge": open_toy("toy:drift=0.2", context_len), "params": params, "raw": True}
    server = start(waiting(counting(open_toy("toy"), rows), lambda: time.sleep(0.004)))
    with closing(skydraft.connect(server.address)) as cloud:
        generation = skydraft.generate(prompt, cloud=cloud, plan=RACE, **given).run()
    assert generation.num_prompt_tokens >= 320
    assert generation.stats.num_accepted_tokens or context_len == 300
    assert sum(rows) == generation.num_prompt_tokens - 1 + sum(each.num_draft + 1 for each in generation.records)
    alone = skydraft.generate(prompt, cloud=open_toy("toy"), plan=ALONE, **given).run()
    assert generation.token_ids == alone.token_ids
