"""Several servers behind one name: who goes where, who is left out, and that no text tells the difference."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft.decoding.context import Context
from skydraft.edge.fleet import Fleet, Links
from skydraft.edge.link import LinkOptions
from skydraft.edge.patience import Patience
from skydraft.edge.verifier import RemoteVerifier
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudLost, CloudTimeout, OptionError
from skydraft.protocol.address import parse_addresses
from skydraft.protocol.values import Opening

from ..serving import PATIENCE_S, free_port
from ..toys import law
from .several_servers import ALONE, GATED, LOSSLESS, PARAMS, Start, begin, connected, towards, undisturbed
from .test_patience import BLOCK, EDGE_S, PROMPT, Clock, VirtualLink, clock  # noqa: F401  a fixture

# --- Lists


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("a", ["a:7373"]),
        ("a:1,b:2 , c", ["a:1", "b:2", "c:7373"]),
        ("[::1]:1,[::2],127.0.0.1:1", ["[::1]:1", "[::2]:7373", "127.0.0.1:1"]),
        ("a:1,a:2", ["a:1", "a:2"]),
    ],
)
def test_a_list_of_servers_has_commas_between(text: str, servers: list[str]) -> None:
    assert parse_addresses(text) == servers
    with closing(skydraft.connect(text)), closing(skydraft.connect(text.split(","))):
        pass


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not the address"),
        ("a,,b", "nothing between"),
        ("a,", "nothing between"),
        (",", "nothing between"),
        ("a,a:7373", "a:7373 is in the list twice"),
        ("Cloud.example,cloud.EXAMPLE", "twice"),
        ("[::1],[0:0::1]:7373", "twice"),
        ("a,b c", "'b c' is not the address"),
        ("a,b:0", "'0' is not a port"),
        ("::1,::2", "'::1' is not the address"),
    ],
)
def test_a_list_that_cannot_be_meant_is_refused(text: str, says: str) -> None:
    with pytest.raises(OptionError, match=says.replace("(", r"\(")):
        skydraft.connect(text)


# --- Where a session goes


def fleet_of(names: list[str], well: list[str]) -> Fleet:
    """A fleet that asks nobody and believes this."""
    fleet = Fleet([LinkOptions(name) for name in names])
    fleet._is_watched = fleet._has_looked = True
    fleet._watch = lambda *_: None  # type: ignore[method-assign]
    for name, server in fleet._servers.items():
        server.error = None if name in well else CloudLost("gone.")
    return fleet


@law(30)
@given(st.lists(st.integers(1, 999), min_size=2, max_size=6, unique=True), st.integers(1, 2**21 - 1), st.data())
def test_only_sessions_of_a_server_that_is_lost_move_and_only_new_ones_come_back(
    ports: list[int], number: int, data: st.DataObject
) -> None:
    names = [f"server:{port}" for port in ports]
    fleet, lost = fleet_of(names, names), data.draw(st.sampled_from(names))
    home = fleet.home(number)
    assert fleet_of(names[::-1], names).home(number) == home  # however the list is written
    fleet.lost(lost, CloudLost("gone."))
    moved = fleet.place(number, home, 0)
    assert (moved == home) == (home != lost) and moved != lost
    fleet._servers[lost].error = None
    assert fleet.place(number, moved, 0) == moved and fleet.home(number) == home


def test_numbers_spread_over_servers_evenly_and_over_the_rest_when_one_is_lost() -> None:
    names = ["a:7373", "b:7373", "c:7373"]
    for well in (names, names[:2]):
        counts = Counter(map(fleet_of(names, well).home, range(1, 3001)))
        assert set(counts) == set(well) and max(counts.values()) < 1.1 * 3000 / len(well)


def test_nobody_is_waited_for_who_has_answered_meanwhile() -> None:
    names = ["a:7373", "b:7373"]
    for well in (names, names[:1]):
        fleet = fleet_of(names, well)
        fleet._has_looked = False  # the first session gave up before they answered
        for server in fleet._servers.values():
            server.was_asked = True
        began = time.monotonic()
        assert fleet.place(1, "b:7373", wait_s=60) == well[-1]
        assert time.monotonic() - began < 30


def test_sessions_of_edges_spread_and_each_is_at_the_server_of_its_number(start: Start) -> None:
    servers = [start() for _ in range(3)]
    ports = {each.address: each for each in servers}
    with closing(connected(servers)) as cloud:
        seen = Counter()
        for _ in range(40):
            address = cloud.link.target
            generation = begin(cloud, params=replace(PARAMS, max_new_tokens=8, min_new_tokens=8))
            rounds = generation.rounds()
            next(rounds)
            assert [name for name, each in ports.items() if each.num_sessions] == [address]
            generation.close()
            ports[address].wait_until(lambda server=ports[address]: not server.num_sessions)
            seen[address] += 1
    assert len(seen) == 3


# --- When a server goes


@pytest.mark.parametrize("how", ["dies", "drains"])
@pytest.mark.parametrize("unary", [False, True], ids=["streams", "calls"])
@pytest.mark.parametrize("plan", [LOSSLESS, ALONE, GATED], ids=["lossless", "cloud", "gated"])
def test_a_text_goes_on_at_another_server_when_its_own_one_goes(
    start: Start, plan: Any, unary: bool, how: str, unhurried: None
) -> None:
    # A stream of mode cloud is read ahead: it has to be longer.
    params = replace(PARAMS, max_new_tokens=1500, min_new_tokens=1500) if plan is ALONE else PARAMS
    servers, lines = [start(toys_slow(plan)), start()], list[str]()
    with closing(connected(servers, unary=unary, notify=lines.append)) as cloud:
        towards(cloud, servers[0])
        generation = begin(cloud, plan, params)
        for number, _ in enumerate(generation.rounds()):
            if number == 5:
                assert servers[0].num_sessions == 1
                servers[0].stop(grace_s=0.3 if how == "drains" else 0.0)
        assert "edge-fallback" not in generation.origins
        assert generation.token_ids == undisturbed(plan, params)
        assert len(lines) == 1 and f"{servers[0].address} is left out" in lines[0]


def toys_slow(plan: Any) -> Engine:
    """A target that takes its time where a stream would be over before its server is."""
    engine = open_toy("toy")
    if plan is ALONE:
        forward = engine.forward

        def slow(feeds: Any, *, want_logits: bool) -> Any:
            time.sleep(0.002)
            return forward(feeds, want_logits=want_logits)

        engine.forward = slow  # type: ignore[method-assign]
    return engine


def test_who_was_told_that_a_server_leaves_does_not_try_it_again(start: Start) -> None:
    servers = [start(), start()]
    with closing(connected(servers)) as cloud:
        towards(cloud, servers[0])
        generation = begin(cloud)
        rounds = generation.rounds()
        for _ in range(3):
            next(rounds)
        leaving, num_streams = cloud._links._to(servers[0].address), []
        leaving.session = lambda: num_streams.append(1)  # type: ignore[assignment, method-assign, return-value]
        servers[0].stop(grace_s=0.3)
        for _ in rounds:
            pass
        assert generation.token_ids == undisturbed() and num_streams == []


def test_a_server_that_comes_back_gets_new_sessions_and_no_old_ones(start: Start) -> None:
    port, lines = free_port(), list[str]()
    first, second = start(port=port), start()
    with closing(connected([first, second], notify=lines.append)) as cloud:
        towards(cloud, first)
        generation = begin(cloud)
        rounds = generation.rounds()
        next(rounds)
        first.stop()
        next(rounds)
        next(rounds)
        assert second.num_sessions == 1
        again = start(port=port)
        again.wait_until(lambda: len(lines) == 2)
        assert lines[1] == f"The server at {again.address} is back."
        for _ in range(3):
            next(rounds)
        assert (again.num_sessions, second.num_sessions) == (0, 1)  # it stays where it is
        with closing(cloud.beside(lines.append)) as other:
            towards(other, again)
            newer = begin(other)
            next(newer.rounds())
            assert (again.num_sessions, second.num_sessions) == (1, 1)
            newer.close()
        for _ in rounds:
            pass
        assert generation.token_ids == undisturbed()


def test_one_address_where_nobody_is_costs_a_line_and_nothing_else(start: Start) -> None:
    server, lines = start(), list[str]()
    addresses = ["127.0.0.1:9", server.address, f"[::1]:{free_port()}"]
    with closing(skydraft.connect(addresses, notify=lines.append)) as cloud:
        for _ in range(4):
            assert begin(cloud).run().token_ids == undisturbed()
    assert sorted(line.split(" is left out")[0] for line in lines) == sorted(
        f"The server at {address}" for address in (addresses[0], addresses[2])
    )


def test_without_any_server_a_gated_text_goes_on_alone_and_takes_the_first_that_comes(start: Start) -> None:
    ports, lines = [free_port(), free_port()], list[str]()
    names = ",".join(f"127.0.0.1:{port}" for port in ports)
    with closing(skydraft.connect(names, notify=lines.append)) as cloud:
        generation = begin(cloud, GATED)
        server = None
        for done, _ in generation.rounds():
            if done.record.outcome == "fallback" and server is None:
                assert f"The cloud at {names} is gone (no server is well" in lines[-1]
                server = start(port=ports[1])
                server.wait_until(lambda: "The cloud is back" in lines[-1])
        assert generation.origins[0] == "edge-fallback" and "recovered" in generation.origins
        assert len(generation.token_ids) == 80


@pytest.mark.parametrize("require", [False, True])
def test_without_any_server_what_must_be_verified_fails_with_one_line_that_names_all(require: bool) -> None:
    names = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with closing(skydraft.connect(names, timeout_s=1, require=require)) as cloud:
        with pytest.raises(CloudTimeout) as caught:
            begin(cloud, GATED if require else LOSSLESS).run()
        with pytest.raises(CloudTimeout, match="did not answer for 1 s"):
            cloud.info()
    for part in (f"The cloud at {names} did not answer", *names.split(","), "refused", f"doctor --cloud {names}"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


# --- Patience, in virtual time


def silent(clock: Clock, gone: set[str], patience: Patience) -> RemoteVerifier:  # noqa: F811
    """A verifier of three servers, of which these never answer, which nobody has noticed yet."""
    names = [f"server:{port}" for port in (1, 2, 3)]
    fleet = fleet_of(names, names)

    def make(options: LinkOptions, traffic: Any) -> Any:
        link = VirtualLink(clock, rtt_s=None if options.target in gone else 0.1)
        link.target = options.target
        return link

    number = next(number for number in range(999) if fleet.home(number) == "server:1")
    links = Links(fleet, make=make)
    return RemoteVerifier(links, Context(PROMPT), Opening("00" * 8, PROMPT), patience, number=number)


def test_a_gated_text_reaches_the_next_server_before_it_would_go_on_alone(clock: Clock) -> None:  # noqa: F811
    verifier, began = silent(clock, {"server:1"}, Patience(30, falls_back=True, has_others=True)), clock.now
    assert verifier.verify(BLOCK, ()).token_id == 5
    assert 0.3 < clock.now - began < EDGE_S + 0.2  # the verdict's own round trip


def test_a_gated_text_goes_on_alone_within_a_second_however_many_servers_are_silent(
    clock: Clock,  # noqa: F811
) -> None:
    names = {f"server:{port}" for port in (1, 2, 3)}
    verifier, began = silent(clock, names, Patience(30, falls_back=True, has_others=True)), clock.now
    with pytest.raises(CloudLost):
        verifier.verify(BLOCK, ())
    assert 0.3 < clock.now - began < EDGE_S


def test_what_is_always_verified_leaves_a_silent_server_long_before_its_patience_ends(
    clock: Clock,  # noqa: F811
) -> None:
    verifier, began = silent(clock, {"server:1", "server:2"}, Patience(30, has_others=True)), clock.now
    assert verifier.verify(BLOCK, ()).token_id == 5
    assert clock.now - began < 10


# --- Several generations at a time


def test_generations_at_a_time_share_what_is_known_of_servers(start: Start) -> None:
    servers, lines = [start(), start()], list[str]()
    with closing(connected(servers, notify=lines.append)) as cloud:
        clouds = [cloud.beside(lines.append) for _ in range(4)]
        servers[0].stop()
        found: list[tuple[int, ...]] = []
        threads = [
            threading.Thread(target=lambda each=each: found.append(begin(each).run().token_ids)) for each in clouds
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert found == [undisturbed()] * 4
        assert len(lines) == 1 and servers[0].address in lines[0]
        for each in clouds:
            each.close()
