"""A list of servers: who goes where, who is left out, and that no text tells the difference."""

import re
import time
from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft.decoding.plan import Plan
from skydraft.edge.server import Server
from skydraft.edge.servers import Servers
from skydraft.edge.session import OwnServer
from skydraft.edge.tls import ServerOptions
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudTimeout, NotAuthorized, OptionError, TargetChanged
from skydraft.protocol.address import parse_addresses

from ..hostile.texts import committed
from ..serving import PATIENCE_S, free_port, waiting
from ..toys import law
from .texts import ALONE, GATED, LOSSLESS, PARAMS, Start, begin, by_plan, connected, home, undisturbed

LONG = replace(PARAMS, max_new_tokens=1500, min_new_tokens=1500)  # what is streamed is read ahead

# --- Lists


LISTS = {
    "a": ["a:7373"], "a:1,b:2 , c": ["a:1", "b:2", "c:7373"], "[::1]:1,[::2]": ["[::1]:1", "[::2]:7373"],
    "a,b,a:7373": ["a:7373", "b:7373"], "Cloud.example,cloud.EXAMPLE": ["cloud.example:7373"],
    "[::1],[::1]:7373": ["[::1]:7373"],
}  # fmt: skip


@pytest.mark.parametrize("text", LISTS)
def test_a_list_of_servers_has_commas_between(text: str) -> None:
    assert parse_addresses(text) == LISTS[text]
    with closing(skydraft.connect(text)), closing(skydraft.connect(text.split(","))):
        pass


@pytest.mark.parametrize("text", ["", "a,,b", "a,", ",", "a,b c", "a,b:0", "a:７３７３", "::1,::2"])
def test_a_list_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="not "):
        skydraft.connect(text)


# --- Where a session goes


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


# --- When a server goes, or changes


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


# --- Getting in


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
