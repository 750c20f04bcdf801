"""A list of servers: who goes where, who is left out, that no text tells the difference; and each is asked and fed
once, not for each text, and not without a pause.
"""

import asyncio
import dataclasses
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams
from skydraft.decoding.plan import Plan
from skydraft.edge.channel import shared_loop
from skydraft.edge.server import Server
from skydraft.edge.servers import Servers
from skydraft.edge.session import OwnServer
from skydraft.edge.tls import ServerOptions
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.errors import (
    CloudError,
    CloudFailure,
    CloudTimeout,
    NotAuthorized,
    OptionError,
    SessionNotFound,
    TargetChanged,
)
from skydraft.protocol.address import parse_addresses
from skydraft.protocol.codec import decode_info, encode_info

from ..hostile.storms import refuses
from ..hostile.texts import committed
from ..serving import PATIENCE_S, Relay, free_port, waiting
from ..toys import law
from .conftest import ALONE, GATED, LOSSLESS, PARAMS, RACE, Start, begin, by_plan, connected, home, undisturbed

LONG = replace(PARAMS, max_new_tokens=1500, min_new_tokens=1500)  # what is streamed is read ahead
LISTS = {
    "a": ["a:7373"], "a:1,b:2 , c": ["a:1", "b:2", "c:7373"], "[::1]:1,[::2]": ["[::1]:1", "[::2]:7373"],
    "a,b,a:7373": ["a:7373", "b:7373"], "Cloud.example,cloud.EXAMPLE": ["cloud.example:7373"],
    "[::1],[::1]:7373": ["[::1]:7373"],
}  # fmt: skip


def num_asked(relay: Relay, name: str) -> int:
    return sum(each == name for each, _ in relay.requests)


@pytest.mark.parametrize("text", LISTS)
def test_a_list_of_servers_has_commas_between(text: str) -> None:
    assert parse_addresses(text) == LISTS[text]
    with closing(skydraft.connect(text)), closing(skydraft.connect(text.split(","))):
        pass


@pytest.mark.parametrize("text", ["", "a,,b", "a,", ",", "a,b c", "a,b:0", "a:７３７３", "::1,::2"])
def test_a_list_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="not "):
        skydraft.connect(text)


def servers_of(names: list[str]) -> Servers:
    return Servers([OwnServer(ServerOptions(name)) for name in names])


def named(servers: Servers, name: str) -> Server:
    return next(server for server in servers.all if server.address == name)


def order(servers: Servers, number: int) -> list[str]:
    return [server.address for server in servers.in_order(number)]


@law(30)
@given(st.lists(st.integers(1, 999), min_size=2, max_size=6, unique=True), st.integers(1, 2**21 - 1), st.data())
def test_a_lost_server_is_tried_last_the_rest_keep_order(ports: list[int], number: int, data: st.DataObject) -> None:
    names = [f"server:{port}" for port in ports]
    servers, lost = servers_of(names), data.draw(st.sampled_from(names))
    before = order(servers, number)
    assert sorted(before) == sorted(names)
    assert order(servers_of(names[::-1]), number) == before  # however the list is written
    servers.lost(named(servers, lost))
    assert order(servers, number) == [*(name for name in before if name != lost), lost]


def test_numbers_spread_evenly_over_servers_but_those_that_were_lost_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    names, now = ["a:7373", "b:7373", "c:7373"], time.monotonic()
    servers = servers_of(names)
    for well in (names, names[:2], names):
        counts = Counter(order(servers, number)[0] for number in range(1, 3001))
        assert set(counts) == set(well) and max(counts.values()) < 1.1 * 3000 / len(well)
        if well == names[:2]:
            monkeypatch.setattr("skydraft.edge.servers.time", SimpleNamespace(monotonic=lambda: now + 10))
        else:
            servers.lost(named(servers, "c:7373"))


@pytest.mark.parametrize("how", ["dies", "drains", "another model"])
@by_plan
def test_a_text_goes_on_at_another_server_when_its_own_goes(start: Start, plan: Any, how: str, unhurried: None) -> None:
    params = LONG if plan is ALONE else PARAMS
    servers, lines = [start(slow(plan), port=free_port()) for _ in range(2)], list[str]()
    with closing(connected(servers, notify=lines.append)) as cloud:
        generation = begin(cloud, plan, params)
        rounds = generation.rounds()
        while not generation.stats.num_escalated:
            next(rounds)
        there, other = home(servers)
        there.stop(grace_s=0.3 if how == "drains" else 0.0)
        changed = start(open_toy("toy:drift=0.4"), port=there.port) if how == "another model" else None
        places = {(other.num_sessions, changed.num_sessions if changed else 0) for _ in rounds}
        assert "edge-fallback" not in generation.origins and lines == []
        assert generation.token_ids == undisturbed(plan, params)
        assert places <= {(1, 0), (0, 0)} and (plan is ALONE or (1, 0) in places)  # a stream is read ahead
        for _ in range(3 if changed else 0):
            assert begin(cloud, plan).run().token_ids == undisturbed(plan)


def slow(plan: Any) -> Engine:
    """A target that takes its time where a stream would be over before its server is."""
    engine: Engine = waiting(open_toy("toy"), lambda: time.sleep(0.001 * (plan is ALONE)))
    return engine


@pytest.mark.parametrize(("room", "execution"), [(4096, "exact"), (3000, "throughput"), (2500, "exact")])
def test_a_text_goes_on_with_more_room_and_with_nothing_else_that_changes(
    start: Start, room: int, execution: Any
) -> None:
    port = free_port()
    with closing(skydraft.connect(f"127.0.0.1:{port}", timeout_s=10, require=True)) as cloud:
        first = start(open_toy("toy", 3000), port=port)
        next(rounds := (generation := begin(cloud)).rounds())
        first.stop()
        start(open_toy("toy", room), port=port, execution=execution)
        with nullcontext() if room == 4096 else pytest.raises(TargetChanged, match="text was begun with"):
            list(rounds)
    written = committed(generation)
    assert written and written == undisturbed()[: len(written)] and (len(written) == 80) == (room == 4096)


def test_when_all_servers_of_a_list_run_something_new_texts_begin_with_that(start: Start) -> None:
    servers = [start(port=free_port()) for _ in range(2)]
    with closing(connected(servers)) as cloud:
        next(rounds := begin(cloud).rounds())
        for each in servers:
            each.stop()
            start(open_toy("toy:drift=0.4"), port=each.port)
        with pytest.raises(TargetChanged, match="begun with"):
            list(rounds)
        expected = begin(open_toy("toy:drift=0.4")).run().token_ids
        assert expected != undisturbed()
        for plan in (LOSSLESS, ALONE) * 3:
            assert begin(cloud, plan).run().token_ids == expected
        assert cloud.info().model == "toy:drift=0.4"


@pytest.mark.parametrize("plan", [GATED, LOSSLESS])
def test_without_any_server_what_must_be_verified_fails_with_one_line_that_names_all(plan: Plan) -> None:
    names = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with closing(skydraft.connect(names, timeout_s=1, require=True)) as cloud:
        with pytest.raises(CloudTimeout) as caught:
            begin(cloud, plan).run()
        with pytest.raises(CloudTimeout, match=r"did not answer for 1.0 s"):
            cloud.info()
    for part in (f"The cloud at {names} did not answer", f"doctor --cloud {names}"):
        assert part in str(caught.value)
    assert re.search("refused|no answer in time", str(caught.value))  # late on a busy machine
    assert "\n" not in str(caught.value)


@by_plan
@pytest.mark.parametrize("is_first", [True, False])
def test_of_a_wrong_token_and_a_dead_server_the_token_is_told(
    start: Start, tmp_path: Path, plan: Any, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order they are tried: it is the fault that waiting does not cure."""
    (tmp_path / "theirs").write_text("other another-token-of-24-chars\n")
    wrong, dead = start(token_file=tmp_path / "theirs").address, f"127.0.0.1:{free_port()}"
    monkeypatch.setattr(Servers, "in_order", lambda self, key: self.all)
    addresses = [wrong, dead] if is_first else [dead, wrong]
    cloud = skydraft.connect(addresses, token="a-token-of-24-characters", timeout_s=PATIENCE_S)
    with closing(cloud), pytest.raises(NotAuthorized):
        begin(cloud, plan).run()


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
    server = start(waiting(counting(open_toy("toy"), rows), lambda: time.sleep(0.02)))
    with closing(skydraft.connect(server.address)) as cloud:
        generation = skydraft.generate(prompt, cloud=cloud, plan=RACE, **given).run()
    assert generation.num_prompt_tokens >= 320
    assert generation.stats.num_accepted_tokens > 4 or context_len == 300
    assert sum(rows) == generation.num_prompt_tokens - 1 + sum(each.num_draft + 1 for each in generation.records)
    alone = skydraft.generate(prompt, cloud=open_toy("toy"), plan=ALONE, **given).run()
    assert generation.token_ids == alone.token_ids
